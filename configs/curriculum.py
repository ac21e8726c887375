"""`curriculum`: which prompts are asked next, by what the policy has made of them."""

from dataclasses import dataclass, fields
from enum import StrEnum

from configs.rules import FINITE, NOT_NEGATIVE, POSITIVE, Rule
from configs.setting import Condition, Section, section, setting, show_value

REVIEW = Rule("in [0, 0.9]", lambda share: 0 <= share <= 0.9)


class CurriculumKind(StrEnum):
    none = "none"
    """Each source in its own order, by weight alone."""
    pools = "pools"
    """Prompts stand in pools by the latest mean reward of their group."""
    levels = "levels"
    """Sources of rising difficulty: the next level opens when the present one is mastered."""


@dataclass(kw_only=True, slots=True)
class PoolsConfig(Section):
    """Pools of prompts, for `curriculum.kind=pools`. A group's mean reward says where its prompt stands next.

    Each source has pools of its own. Among those that hold a prompt, one is drawn by weight, and gives the
    prompt that has waited longest. A pool of weight 0 gives prompts only when nothing else is left. Prompts
    that came back without a result are asked about as often as the average prompt.
    """

    hard_up_to: float = setting(0.25, FINITE)
    """Prompts whose group had this mean reward, or less, are hard."""
    normal_up_to: float = setting(0.75, FINITE)
    """Prompts up to this mean reward are normal, those above it easy."""
    unseen_weight: float | None = setting(None, POSITIVE)
    """Weight of prompts that were never asked. Null: they come first. A source without end needs a number."""
    hard_weight: float = setting(1.0, NOT_NEGATIVE)
    """Weight of hard prompts."""
    normal_weight: float = setting(1.0, NOT_NEGATIVE)
    """Weight of normal prompts."""
    easy_weight: float = setting(0.2, NOT_NEGATIVE)
    """Weight of easy prompts."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.hard_up_to < self.normal_up_to,
                "curriculum.pools.hard_up_to",
                "be below curriculum.pools.normal_up_to",
                f"{self.hard_up_to:g} and {self.normal_up_to:g}",
            ),
            Condition(
                self.hard_weight + self.normal_weight + self.easy_weight > 0,
                "curriculum.pools.normal_weight",
                "be above 0 where hard_weight and easy_weight are 0 (some pool must be drawn from)",
                self.normal_weight,
            ),
        ]


@dataclass(kw_only=True, slots=True)
class LevelsConfig(Section):
    """Levels of difficulty, for `curriculum.kind=levels`. Sources without a level are always open."""

    raise_at: float = setting(0.8, FINITE)
    """The next level opens when the latest `curriculum.window` groups of the present level have this mean
    reward, or more."""
    lower_at: float = setting(0.2, FINITE)
    """The present level closes, and the one below is present again, when their mean reward is this or
    less."""
    review: float = setting(0.2, REVIEW)
    """Part of the groups of all levels that the levels below the present one get."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.lower_at < self.raise_at,
                "curriculum.levels.lower_at",
                "be below curriculum.levels.raise_at",
                f"{self.lower_at:g} and {self.raise_at:g}",
            )
        ]


@dataclass(kw_only=True, slots=True)
class CurriculumConfig(Section):
    """The choice of prompts by what the policy has made of them."""

    kind: CurriculumKind = setting(CurriculumKind.none)
    """`none`, `pools` or `levels`."""
    window: int = setting(64, POSITIVE)
    """Latest groups of a source, or of a level, whose mean reward counts."""
    keep: list[float] | None = setting(None)
    """`[low, high]`: a group whose mean reward is outside is rejected as `uninformative`, and a fresh group
    takes its place. `algo.dynamic_sampling` is the same for groups whose rewards are all equal. Null: all
    are kept."""
    max_refills: int = setting(10_000, POSITIVE)
    """Groups rejected in a row by `keep` or `algo.dynamic_sampling`, with none kept between, at which the run
    ends: then the prompts teach nothing."""
    pools: PoolsConfig = section(PoolsConfig)
    levels: LevelsConfig = section(LevelsConfig)

    def conditions(self) -> list[Condition]:
        keep = self.keep
        return [
            Condition(
                keep is None or (len(keep) == 2 and keep[0] < keep[1]),
                "curriculum.keep",
                "be two numbers, the lower one first",
                keep,
            ),
            *(
                Condition(
                    self.kind == kind or getattr(part, field.name) == field.default,
                    f"curriculum.{kind}.{field.name}",
                    f"not be set without curriculum.kind={kind}",
                    f"{show_value(getattr(part, field.name))} with curriculum.kind={self.kind}",
                )
                for kind, part in (("pools", self.pools), ("levels", self.levels))
                for field in fields(part)
            ),
        ]
