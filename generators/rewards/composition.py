"""A reward made of parts: the sum of their numbers, each times its weight.

    rate_reply(row, reply)   the parts that rate each reply alone ─▶ Score
    score_group(episodes)    the parts that rate a group ─▶ a Score for each, of all parts

Async parts run all at once, and then the plain ones one after the other. The record has, as components, each
part's number by its name, its seconds as `seconds/NAME`, and its details as `NAME/DETAIL`.
"""

import asyncio
import importlib
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from generators.environment import EpisodeRecord, Row
from generators.rewards.arguments import check_names, check_number
from generators.rewards.functions import make_function_part
from generators.rewards.part import GroupPart, GroupReply, Rating, RewardPart
from generators.score_checks import MAX_COMPONENTS, check_score, describe_error
from generators.task import Score

HERE = Path(__file__).parent
PARTS = {
    "code": "generators.rewards.code_tests:CodePart",
    "exact_match": "generators.rewards.exact_match:ExactMatchPart",
    "format": "generators.rewards.structure:FormatPart",
    "judge": "generators.rewards.judge:JudgePart",
    "length": "generators.rewards.length:LengthPart",
    "math": "generators.rewards.mathematics:MathPart",
    "regex": "generators.rewards.structure:RegexPart",
    "repetition": "generators.rewards.length:RepetitionPart",
    "reward_model": "generators.rewards.reward_model:RewardModelPart",
}
"""The parts that come with Slipstream. Any other is `module:function` or `path.py:function`."""
MAX_PARTS = MAX_COMPONENTS // 2
"""Each part takes two components: its number and its seconds."""
TAKEN_NAMES = ("mean", "std", "seconds")
"""Names that have a meaning in the figures `reward/...`."""
PART_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""Errors of a user's function. The last two would leave the loop of async functions in disorder."""
Result = TypeVar("Result")


class PartFailed(Exception):
    """A part could not rate a reply. The message names it."""


@dataclass(frozen=True, slots=True)
class WeightedPart:
    name: str
    weight: float
    part: RewardPart | GroupPart
    only_if: str | None = None
    """An earlier part. Where its number is not above 0, this one's counts nothing."""

    @property
    def rates_groups(self) -> bool:
        return hasattr(self.part, "rate_group")


class WeightedParts:
    """The parts of a reward."""

    def __init__(self, parts: Sequence[WeightedPart]) -> None:
        self.parts = tuple(parts)
        self._alone = [one for one in parts if not one.rates_groups]
        self._beside = [one for one in parts if one.rates_groups]
        bounds = [one.part.max_concurrent for one in parts if hasattr(one.part, "max_concurrent")]
        self.max_concurrent: int | None = min(bounds, default=None)
        """Replies that may be rated at a time in one generator; None: any number."""

    @property
    def rates_groups(self) -> bool:
        """True when a reply has its whole reward only from `score_group`."""
        return bool(self._beside)

    @property
    def needs_tokens(self) -> bool:
        """True when `score_group` reads the tokens of the replies."""
        return any(getattr(one.part, "needs_tokens", False) for one in self._beside)

    def rate_reply(self, row: Row, reply: str) -> Score:
        """Returns what the parts that rate a reply alone give it. Raises PartFailed where one fails."""
        ratings = run_parts(self._alone, lambda part: part.rate_reply(row, reply))
        return add_up(Score(0.0), self._alone, ratings)

    def score_group(self, episodes: Sequence[EpisodeRecord]) -> list[Score]:
        """Adds to the episodes' scores what the parts give that rate a group. Raises PartFailed where one
        fails, and where no part has anything to say about a reply."""
        replies = [
            GroupReply(str(one.messages[-1].get("content") or ""), one.num_tokens, one.tokens)
            for one in episodes
        ]
        ratings = run_parts(self._beside, lambda part: part.rate_group(episodes[0].row, replies))
        scores = []
        for index, episode in enumerate(episodes):
            own = {name: (given[index], seconds / len(replies)) for name, (given, seconds) in ratings.items()}
            if not self._alone and all(rating is None for rating, _ in own.values()):
                raise PartFailed(
                    "a reward part must have something to say about each reply, got None of "
                    f"{', '.join(own)} about {replies[index].text[:200]!r}"
                )
            scores.append(add_up(Score(episode.reward, dict(episode.components)), self._beside, own))
        return scores


def run_parts(parts: Sequence[WeightedPart], rate: Callable[[Any], Any]) -> dict[str, tuple[Any, float]]:
    """Returns what `rate` gives for each part, and its seconds, by the part's name."""
    results: dict[str, tuple[Any, float]] = {}
    if any(one.part.is_async for one in parts):
        results.update(run_coroutine(await_parts([one for one in parts if one.part.is_async], rate)))
    for one in parts:
        if not one.part.is_async:
            began = time.perf_counter()
            with name_failure(one.name):
                result = rate(one.part)
                assert isinstance(result, Rating | list), result
            results[one.name] = result, time.perf_counter() - began
    return results


async def await_parts(
    parts: Sequence[WeightedPart], rate: Callable[[Any], Any]
) -> dict[str, tuple[Any, float]]:
    async def await_part(one: WeightedPart) -> tuple[Any, float]:
        began = time.perf_counter()
        with name_failure(one.name):
            rating = rate(one.part)
            assert not isinstance(rating, Rating | list), "an async part must return an awaitable"
            return await rating, time.perf_counter() - began

    tasks = [asyncio.create_task(await_part(one)) for one in parts]
    try:
        ratings = await asyncio.gather(*tasks)
    finally:
        # One that fails fails all, and the loop goes on.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {one.name: rating for one, rating in zip(parts, ratings, strict=True)}


@contextmanager
def name_failure(name: str) -> Iterator[None]:
    """Raises PartFailed where the part fails."""
    try:
        yield
    # It is not the part alone that has no memory left: its worker ends.
    except MemoryError:
        raise
    except FAILURES as error:
        raise PartFailed(f"reward part {name!r}: {explain_error(error)}") from error


def explain_error(error: BaseException) -> str:
    """Returns the error, and the line of a user's function that it comes from."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{describe_error(error)}{place}"


def add_up(
    base: Score, parts: Sequence[WeightedPart], ratings: Mapping[str, tuple[Rating | None, float]]
) -> Score:
    """Returns `base` with the parts' numbers, each times its weight. A part without a rating counts nothing.

    Raises PartFailed for what is no number, and for too many components.
    """
    reward, components = base.reward, dict(base.components)
    for one in parts:
        rating, seconds = ratings[one.name]
        components[f"seconds/{one.name}"] = seconds
        if rating is None:
            continue
        details = {f"{one.name}/{name}": value for name, value in rating.details.items()}
        try:
            checked = check_score(Score(rating.value, details))
        except ValueError as error:
            raise PartFailed(f"reward part {one.name!r}: {error}") from error
        components |= {one.name: checked.reward} | checked.components
        if one.only_if is None or components.get(one.only_if, 0.0) > 0:
            reward += one.weight * checked.reward
    if len(components) > MAX_COMPONENTS:
        raise PartFailed(
            f"reward parts must have at most {MAX_COMPONENTS} components together, their seconds and "
            f"details included, got {len(components)}"
        )
    return check_score(Score(reward, components))


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end, in a kept thread where this one has a loop that runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return open_runner(os.getpid(), threading.get_ident()).run(coroutine)
    return open_thread(os.getpid()).submit(lambda: run_coroutine(coroutine)).result()


@cache
def open_runner(process: int, thread: int) -> asyncio.Runner:
    """Returns the event loop of a thread. It is kept, because functions keep clients and locks that belong to
    the loop of their first call."""
    return asyncio.Runner()


@cache
def open_thread(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "reward")


def make_reward(
    reward: Mapping[str, Any], field: str = "reward", further: Mapping[str, RewardPart] | None = None
) -> WeightedParts:
    """Makes the reward of a section `reward`: its function or its parts, or else the part `task` of
    `further`.

    Raises ValueError with the field, the rule and the value.
    """
    function, arguments, parts = (reward.get(key) for key in ("function", "args", "parts"))
    if function is not None and parts:
        raise ValueError(f"{field}.parts must be empty where {field}.function is set, got {parts!r}")
    if arguments and function is None:
        raise ValueError(f"{field}.args must be empty without {field}.function, got {arguments!r}")
    if parts:
        return make_parts(parts, f"{field}.parts", further)
    if function is None and "task" not in (further or {}):
        raise ValueError(
            f"{field}.function must name a reward for these rows: one of {sorted(PARTS)}, path.py:function "
            f"or module:function (or {field}.parts list several), got null"
        )
    use = "task" if function is None else function
    part = _find_part(f"{field}.function", f"{field}.args", use, dict(arguments or {}), further or {})
    name = name_part(use)
    return WeightedParts([WeightedPart(name if is_part_name(name) else "function", 1.0, part)])


def make_parts(
    rewards: Any, field: str = "reward.parts", further: Mapping[str, RewardPart] | None = None
) -> WeightedParts:
    """Makes the parts of a list of `{name, use, weight, ...}`; the further keys are the part's arguments.

    `further` are parts that the caller has made, which `use` may name. Raises ValueError with the field, the
    rule and the value.
    """
    if not isinstance(rewards, Sequence) or isinstance(rewards, str) or not 1 <= len(rewards) <= MAX_PARTS:
        raise ValueError(f"{field} must be a list of 1 to {MAX_PARTS} parts, got {rewards!r}")
    parts = [_make_part(f"{field}[{i}]", entry, further or {}) for i, entry in enumerate(rewards)]
    names = [one.name for one in parts]
    for i, one in enumerate(parts):
        if one.name in names[:i]:
            raise ValueError(f"{field}[{i}].name must be another than those before, got {one.name!r}")
        # Parts that rate a reply alone are rated before those that rate a group.
        before = [other.name for other in parts[:i] if one.rates_groups or not other.rates_groups]
        if one.only_if is not None and one.only_if not in before:
            raise ValueError(
                f"{field}[{i}].only_if must be the name of a part before it ({', '.join(before) or 'none'}), "
                f"got {one.only_if!r}"
            )
    return WeightedParts(parts)


def _make_part(field: str, entry: Any, further: Mapping[str, RewardPart]) -> WeightedPart:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{field} must have the keys name, use and weight, got {entry!r}")
    arguments = {str(key): value for key, value in entry.items()}
    use = arguments.pop("use", None)
    name = arguments.pop("name", name_part(str(use)))
    weight = check_number(f"{field}.weight", arguments.pop("weight", 1.0))
    only_if = arguments.pop("only_if", None)
    part = _find_part(f"{field}.use", field, use, arguments, further)
    if not is_part_name(name):
        raise ValueError(
            f"{field}.name must be up to 60 letters, digits, '_', '.' or '-' other than "
            f"{', '.join(TAKEN_NAMES)}, got {name!r}"
        )
    return WeightedPart(name, weight, part, only_if)


def name_part(use: str) -> str:
    """Returns the name that a part has on the record where none is given: that of its function."""
    return use.rpartition(":")[2]


def is_part_name(name: Any) -> bool:
    return isinstance(name, str) and PART_NAME.fullmatch(name) is not None and name not in TAKEN_NAMES


def _find_part(
    use_field: str, field: str, use: Any, arguments: dict[str, Any], further: Mapping[str, RewardPart]
) -> RewardPart | GroupPart:
    """`use_field` is the key that names the part, `field` the section of its arguments."""
    known = sorted([*PARTS, *further])
    if not isinstance(use, str) or (use not in known and ":" not in use):
        raise ValueError(
            f"{use_field} must be one of {known}, module:function or path.py:function, got {use!r}"
        )
    if use in further:
        if arguments:
            raise ValueError(f"{field} must have no arguments for {use}, got {sorted(arguments)}")
        return further[use]
    if use not in PARTS:
        return make_function_part(use_field, use, arguments)
    module, _, class_name = PARTS[use].partition(":")
    try:
        part_class = getattr(importlib.import_module(module), class_name)
    except ImportError as error:
        raise ValueError(
            f"{use_field} must name a part whose packages are installed, got {use!r}: {error}"
        ) from error
    check_names(field, arguments, part_class, use)
    try:
        part: RewardPart | GroupPart = part_class(**arguments)
    except ValueError as error:
        # A part names its argument first.
        raise ValueError(f"{field}.{error}") from error
    return part
