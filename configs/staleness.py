"""`staleness`: how old a token may be when it is trained."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE, strictly_between
from configs.setting import Condition, Section, setting, show_value


class OnLate(StrEnum):
    """Fate of a group whose rollout takes longer than the staleness bound S allows."""

    wait = "wait"
    """The step waits for its straggler. Nothing is late and nothing is wasted."""
    mask = "mask"
    """The step trains other complete groups. The straggler's tokens that grew too old are context without
    loss."""
    cancel = "cancel"
    """A group that has held a step for `straggler_timeout_s` is aborted, and a fresh group takes its
    place."""


class Controller(StrEnum):
    """Rule for the admission lag: how many steps ahead of the learner a group may be leased."""

    fixed = "fixed"
    """Always `max_versions`."""
    ess = "ess"
    """At most `max_versions`, and less while the effective sample size is below `ess_target`."""


@dataclass(kw_only=True, slots=True)
class StalenessConfig(Section):
    """How old a token may be when it is trained."""

    max_versions: int = setting(2, NOT_NEGATIVE)
    """The staleness bound S. No token is trained that was sampled more than S versions before the one that
    trains it. 0 is the synchronous algorithm."""
    on_late: OnLate = setting(OnLate.wait)
    """Fate of a group whose rollout takes longer than S steps allow."""
    straggler_timeout_s: float | None = setting(None, POSITIVE)
    """Seconds that a group may hold a step before it is aborted and refilled. For `on_late=cancel` only."""
    controller: Controller = setting(Controller.fixed)
    """Rule that admits new groups: the bound S alone, or a lead of at most S that follows the effective
    sample size."""
    ess_target: float = setting(0.9, strictly_between(0, 1, "0.9 is the default"))
    """Effective sample size of the tokens' π_θ / μ below which groups are admitted later, as a share of all
    tokens. For `controller=ess` only."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                (self.on_late is OnLate.cancel) == (self.straggler_timeout_s is not None),
                "staleness.straggler_timeout_s",
                "be set exactly when staleness.on_late=cancel",
                f"{show_value(self.straggler_timeout_s)} with on_late={self.on_late}",
            )
        ]
