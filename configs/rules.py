"""Rules for the value of one key. `text` completes the sentence "KEY must be ..."; NaN breaks every rule over
numbers."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one value."""

    text: str
    holds: Callable[[Any], bool]
    """True for a value that keeps the rule. Never asked about None, which stands for "not set"."""


POSITIVE = Rule("a finite number above 0", lambda value: math.isfinite(value) and value > 0)
NOT_NEGATIVE = Rule("a finite number of at least 0", lambda value: math.isfinite(value) and value >= 0)
FINITE = Rule("a finite number", math.isfinite)
SHARE = Rule("in [0, 1]", lambda value: 0 <= value <= 1)
"""A part of a whole, both ends included."""


def above(low: float, note: str) -> Rule:
    """Returns the rule of finite numbers above `low`. The note says what is usual, or why."""
    return Rule(f"a finite number above {low:g} ({note})", lambda value: math.isfinite(value) and value > low)


def at_least(low: int, note: str) -> Rule:
    return Rule(f"at least {low} ({note})", lambda value: value >= low)


def above_up_to(low: float, high: float, note: str = "") -> Rule:
    """Returns the rule of the half-open interval (low, high]."""
    return Rule(f"in ({low:g}, {high:g}]{_in_brackets(note)}", lambda value: low < value <= high)


def strictly_between(low: float, high: float, note: str = "") -> Rule:
    """Returns the rule of the open interval (low, high)."""
    return Rule(f"in ({low:g}, {high:g}){_in_brackets(note)}", lambda value: low < value < high)


def one_of(names: Collection[str]) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: value in names)


LEAST_GPU_SHARE = 0.05
"""The smallest part of a GPU that is worth a process."""


def gpu_share(*, most: float) -> Rule:
    """Returns the rule of GPUs for one process: none, a part of one, or several whole ones up to `most`."""
    several = "" if most <= 1 else " or a whole number"
    return Rule(
        f"0, in [{LEAST_GPU_SHARE}, 1]{several}",
        lambda gpus: gpus == 0 or LEAST_GPU_SHARE <= gpus <= 1 or (1 < gpus <= most and gpus % 1 == 0),
    )


def _in_brackets(note: str) -> str:
    return f" ({note})" if note else ""
