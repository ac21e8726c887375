"""The staleness controller: decides how far ahead of the newest version groups are leased, by the effect of
staleness on the gradient.

It stays within `staleness.max_versions`, the bound that `buffers.staleness` proves.
"""

import logging
import math
from collections.abc import Mapping

from configs.staleness import Controller, StalenessConfig

log = logging.getLogger("slipstream.buffer")

ESS_METRIC = "offpolicy/ess_token"
"""The learner's metric that the controller follows."""
RAISE_SHARE = 0.5
"""Share of the way from the target to 1 that the ESS must have come before the lag is raised again."""


def first_lag(max_versions: int) -> int:
    """Returns the lag at which the controller begins. It is low, because nothing is known yet."""
    return min(1, max_versions)


def next_lag(lag: int, ess: float, target: float, max_versions: int, steps_since: int) -> int:
    """Returns the lag to admit from now on.

    It is half as large when the effective sample size is below its target, one larger, up to `max_versions`,
    when the size is well above, and the same otherwise.

    `ess`: of the last step, (Σ ρ)² / (n Σ ρ²) of the tokens' ρ = π_θ / μ, within 0 .. 1. `steps_since`: steps
    since the lag was last changed. Groups that were leased before a change must have been trained before it
    can be judged, which takes `lag` + 1 steps.
    """
    if steps_since < lag + 1 or not math.isfinite(ess):
        return lag
    if ess < target:
        return lag // 2
    if ess > target + RAISE_SHARE * (1 - target):
        return min(max_versions, lag + 1)
    return lag


class LagController:
    def __init__(self, config: StalenessConfig, max_versions: int) -> None:
        self._config, self._max_versions, self._steps_since = config, max_versions, 0
        self.lag = first_lag(max_versions) if config.controller is Controller.ess else max_versions
        """How many versions ahead of the newest groups are leased."""

    def update_lag(self, step: int, metrics: Mapping[str, float]) -> int:
        """Returns the lag to admit from now on, after a step with these metrics."""
        ess = metrics.get(ESS_METRIC)
        if self._config.controller is Controller.fixed or ess is None:
            return self.lag
        before, self._steps_since = self.lag, self._steps_since + 1
        self.lag = next_lag(before, ess, self._config.ess_target, self._max_versions, self._steps_since)
        if self.lag != before:
            self._steps_since = 0
            log.info(
                "step %d: effective sample size %.3f, target %.3f: groups are admitted %d versions ahead "
                "instead of %d (max_versions %d)",
                step,
                ess,
                self._config.ess_target,
                self.lag,
                before,
                self._max_versions,
            )
        return self.lag
