"""`algo.reward`: the changes of rewards before they become advantages."""

from dataclasses import dataclass

from configs.rules import POSITIVE, above_up_to
from configs.setting import Section, setting


@dataclass(kw_only=True, slots=True)
class RewardShapingConfig(Section):
    """The changes of rewards before they become advantages."""

    overlong_share: float | None = setting(None, above_up_to(0, 1))
    """DAPO's soft overlong penalty: the last share of `sampling.max_tokens`, over which a sample's reward
    falls linearly by 1. The longest reply of a sample of several turns counts. Null: no penalty."""
    overlong_filter: bool = setting(False)
    """Train neither policy nor critic on samples that were cut off, at `sampling.max_tokens` or because the
    context was full. They count for their group."""
    normalize: bool = setting(False)
    """Replace each reward R by (R − mean) / std over the step's batch."""
    clip: float | None = setting(None, POSITIVE)
    """Keep rewards within ± this, after `normalize`. Null: no bound."""
    filter_power: float | None = setting(None, POSITIVE)
    """Draw sequences again, with replacement, in proportion to |reward|^power (PF-PPO). Null: each counts
    once."""
