"""A reward made of parts: the sum of their numbers, each times its weight.

    rate_reply(row, reply) ─▶ the async parts, all at once ─▶ the plain parts, one after the other ─▶ Score

The record has, as components, each part's number by its name, its seconds as `seconds/NAME`, and its details
as `NAME/DETAIL`.
"""

import asyncio
import importlib
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from generators.environment import Row
from generators.rewards.arguments import check_names, check_number
from generators.rewards.functions import FunctionPart
from generators.rewards.part import Rating, RewardPart
from generators.score_checks import MAX_COMPONENTS, check_score, describe_error
from generators.task import Score

PARTS = {
    "code": "generators.rewards.code_tests:CodePart",
    "judge": "generators.rewards.judge:JudgePart",
    "math": "generators.rewards.mathematics:MathPart",
    "reward_model": "generators.rewards.reward_model:RewardModelPart",
}
"""The parts that come with Slipstream. Any other is `module:function` or `path.py:function`."""
MAX_PARTS = MAX_COMPONENTS // 2
"""Each part takes two components: its number and its seconds."""
TAKEN_NAMES = ("mean", "std", "seconds")
"""Names that have a meaning in the figures `reward/...`."""
PART_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
Result = TypeVar("Result")


class PartFailed(Exception):
    """A part could not rate a reply. The message names it."""


@dataclass(frozen=True, slots=True)
class WeightedPart:
    name: str
    weight: float
    part: RewardPart


class WeightedParts:
    """The parts of a reward."""

    def __init__(self, parts: Sequence[WeightedPart]) -> None:
        self.parts = tuple(parts)
        bounds = [one.part.max_concurrent for one in parts if hasattr(one.part, "max_concurrent")]
        self.max_concurrent: int | None = min(bounds, default=None)
        """Replies that may be rated at a time in one generator; None: any number."""

    def rate_reply(self, row: Row, reply: str) -> Score:
        """Returns the reward of a reply and its components. Raises PartFailed where a part fails."""
        ratings: dict[str, tuple[Rating, float]] = {}
        if any(one.part.is_async for one in self.parts):
            ratings.update(run_coroutine(self._await_parts(row, reply)))
        for one in self.parts:
            if not one.part.is_async:
                began = time.perf_counter()
                try:
                    rating = one.part.rate_reply(row, reply)
                    assert isinstance(rating, Rating), rating
                except Exception as error:
                    raise PartFailed(f"reward part {one.name!r}: {describe_error(error)}") from error
                ratings[one.name] = rating, time.perf_counter() - began
        return self._add_up(ratings)

    async def _await_parts(self, row: Row, reply: str) -> dict[str, tuple[Rating, float]]:
        async def rate(one: WeightedPart) -> tuple[Rating, float]:
            began = time.perf_counter()
            try:
                rating = one.part.rate_reply(row, reply)
                assert not isinstance(rating, Rating), "an async part must return an awaitable"
                return await rating, time.perf_counter() - began
            except Exception as error:
                raise PartFailed(f"reward part {one.name!r}: {describe_error(error)}") from error

        parts = [one for one in self.parts if one.part.is_async]
        # One that fails fails all: the others are canceled when the loop ends.
        ratings = await asyncio.gather(*(rate(one) for one in parts))
        return {one.name: rating for one, rating in zip(parts, ratings, strict=True)}

    def _add_up(self, ratings: Mapping[str, tuple[Rating, float]]) -> Score:
        reward, components = 0.0, dict[str, float]()
        for one in self.parts:
            rating, seconds = ratings[one.name]
            details = {f"{one.name}/{name}": value for name, value in rating.details.items()}
            try:
                checked = check_score(Score(rating.value, details))
            except ValueError as error:
                raise PartFailed(f"reward part {one.name!r}: {error}") from error
            reward += one.weight * checked.reward
            components |= {one.name: checked.reward, f"seconds/{one.name}": seconds} | checked.components
        if len(components) > MAX_COMPONENTS:
            raise PartFailed(
                f"reward parts must have at most {MAX_COMPONENTS} components together, their seconds and "
                f"details included, got {len(components)}"
            )
        return check_score(Score(reward, components))


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end, beside the loop of this thread where it has one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def make_parts(
    rewards: Any, field: str = "task.args.rewards", further: Mapping[str, RewardPart] | None = None
) -> WeightedParts:
    """Makes the parts of a list of `{name, use, weight, ...}`; the further keys are the part's arguments.

    `further` are parts that the caller has made, which `use` may name. Raises ValueError with the field, the
    rule and the value.
    """
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or not 1 <= len(rewards) <= MAX_PARTS:
        raise ValueError(f"{field} must be a list of 1 to {MAX_PARTS} parts, got {rewards!r}")
    parts = [_make_part(f"{field}[{i}]", entry, further or {}) for i, entry in enumerate(rewards)]
    names = [one.name for one in parts]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{field}[{i}].name must be another than those before, got {name!r}")
    return WeightedParts(parts)


def _make_part(field: str, entry: Any, further: Mapping[str, RewardPart]) -> WeightedPart:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{field} must have the keys name, use and weight, got {entry!r}")
    arguments = {str(key): value for key, value in entry.items()}
    use = arguments.pop("use", None)
    name = arguments.pop("name", use)
    weight = check_number(f"{field}.weight", arguments.pop("weight", 1.0))
    known = sorted([*PARTS, *further])
    if not isinstance(use, str) or (use not in known and ":" not in use):
        raise ValueError(
            f"{field}.use must be one of {known}, module:function or path.py:function, got {use!r}"
        )
    if not isinstance(name, str) or not PART_NAME.fullmatch(name) or name in TAKEN_NAMES:
        raise ValueError(
            f"{field}.name must be up to 60 letters, digits, '_', '.' or '-' other than "
            f"{', '.join(TAKEN_NAMES)}, got {name!r}"
        )
    return WeightedPart(name, weight, _find_part(field, use, arguments, further))


def _find_part(
    field: str, use: str, arguments: dict[str, Any], further: Mapping[str, RewardPart]
) -> RewardPart:
    if use in further:
        if arguments:
            raise ValueError(f"{field} must have no arguments for {use}, got {sorted(arguments)}")
        return further[use]
    if use not in PARTS:
        return FunctionPart(field, use, arguments)
    module, _, class_name = PARTS[use].partition(":")
    try:
        part_class = getattr(importlib.import_module(module), class_name)
    except ImportError as error:
        raise ValueError(
            f"{field}.use must name a part whose packages are installed, got {use!r}: {error}"
        ) from error
    check_names(field, arguments, part_class, use)
    try:
        part: RewardPart = part_class(**arguments)
    except ValueError as error:
        # A part names its argument first.
        raise ValueError(f"{field}.{error}") from error
    return part
