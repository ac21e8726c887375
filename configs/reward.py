"""`reward`: what a reply to a row of `data` is worth."""

from dataclasses import dataclass
from typing import Any

from configs.setting import Condition, Section, setting


@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """The reward of a reply to a row of `data`."""

    function: str | None = setting(None)
    """`path.py:function` or `module:function`, plain or async: of (row, reply), verl's `compute_score`, or
    TRL's (prompts, completions, **columns). Or the name of a built-in part, such as `math`. An evaluation set
    without a reward takes the run's."""
    args: dict[str, Any] = setting({})
    """Keyword arguments of the function."""
    parts: list[Any] = setting([])
    """A reward of several parts, in place of `reward.function`: a list of `{name, use, weight, ...}`."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.function is None or not self.parts,
                "reward.parts",
                "be empty where reward.function is set (a part may name the function in its `use`)",
                self.parts,
            ),
            Condition(
                self.function is not None or not self.args,
                "reward.args",
                "be empty without reward.function (arguments of a part stand beside its `use`)",
                self.args,
            ),
        ]
