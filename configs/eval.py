"""`eval`: evaluation on held-out prompts."""

from dataclasses import dataclass

from configs.rules import NOT_NEGATIVE
from configs.setting import Section, setting


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    every: int = setting(0, NOT_NEGATIVE)
    """Steps between evaluations. 0: only before the first step and after the last."""
    prompts: int = setting(512, NOT_NEGATIVE)
    """Held-out prompts of one evaluation, one sample each at the run's temperature. 0 switches evaluation
    off."""
