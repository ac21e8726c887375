"""The staleness controller: how far ahead of the newest version groups are admitted, by what staleness does to the gradient.

It works under the bound S and never beyond it (`buffers.staleness`).
"""

import logging
import math
from collections.abc import Mapping

from configs.staleness import Controller, StalenessConfig

log = logging.getLogger("slipstream.buffer")

ESS = "offpolicy/ess_token"
"""The learner's metric that a controlled lag follows."""
ROOM = 0.5
"""How much of the way from the target to 1 the ESS must have come before the lag is raised again."""


def first_lag(bound: int) -> int:
    """Where a controlled lag begins: low, for nothing is known yet."""
    return min(1, bound)


def next_lag(lag: int, ess: float, target: float, bound: int, since: int) -> int:
    """The lag to admit from now on: half when the effective sample size is below its target, one more, up to the bound, when it is
    well above; else the same. It begins at `first_lag`.

    `ess`: of the last step, Σ²/(n Σ of squares) of the tokens' π_θ / μ, within 0 .. 1. `since`: steps since the lag was last changed:
    what was leased before must have been trained before it can be judged, which takes `lag` + 1 steps.
    """
    if since < lag + 1 or not math.isfinite(ess):
        return lag
    if ess < target:
        return lag // 2
    if ess > target + ROOM * (1 - target):
        return min(bound, lag + 1)
    return lag


class LagController:
    def __init__(self, config: StalenessConfig, bound: int) -> None:
        self._config, self._bound, self._since = config, bound, 0
        self.lag = first_lag(bound) if config.controller is Controller.ess else bound

    def see(self, step: int, metrics: Mapping[str, float]) -> int:
        """The lag to admit from now on, after a step with these metrics."""
        ess = metrics.get(ESS)
        if self._config.controller is Controller.fixed or ess is None:
            return self.lag
        before, self._since = self.lag, self._since + 1
        self.lag = next_lag(before, ess, self._config.ess_target, self._bound, self._since)
        if self.lag != before:
            self._since = 0
            log.info(
                "step %d: effective sample size %.3f, target %.3f: groups are admitted %d versions ahead instead of %d (bound %d)",
                step, ess, self._config.ess_target, self.lag, before, self._bound,
            )  # fmt: skip
        return self.lag
