"""Reward functions of a user's own, as `module:function` or `path.py:function` (`signatures.py` says how each
is called).

A number is a reward, and so is a dict with a number at `score` or `reward`, whose other numbers are details
for the record. A function that rates a whole group returns a list of those.
"""

import difflib
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.plugins import import_file
from configs.reward import RewardConfig
from generators.environment import Row
from generators.plain_values import show_value
from generators.rewards.part import GroupPart, GroupReply, Rating, RewardPart
from generators.rewards.signatures import GroupNotes, Signature, read_signature


def make_function_part(field: str, use: str, arguments: Mapping[str, Any]) -> RewardPart | GroupPart:
    """Returns the part of the function that `use` names. `arguments` are keyword arguments for each call.

    Raises ValueError that names `field`, the key of `use`.
    """
    function = load_function(field, use)
    try:
        signature = read_signature(function, arguments)
    except TypeError as error:
        raise ValueError(
            f"{field} must name a function of (row, reply), of verl's (data_source, solution_str, "
            "ground_truth, extra_info) or of TRL's (prompts, completions, **columns) that takes the "
            f"arguments {sorted(arguments)}, got {use!r} with {inspect.signature(function)}: {error}"
        ) from error
    part_class = GroupFunction if signature.rates_groups else ReplyFunction
    return part_class(function, signature, arguments)


class ReplyFunction:
    """Rates each reply alone."""

    def __init__(
        self, function: Callable[..., Any], signature: Signature, arguments: Mapping[str, Any]
    ) -> None:
        self._function, self._signature, self._arguments = function, signature, dict(arguments)
        self.is_async = is_coroutine_function(function)

    def rate_reply(self, row: Row, reply: str) -> Rating | Awaitable[Rating]:
        words, names = self._signature.make_call(copy_value(row), [GroupReply(reply)], GroupNotes(1))
        result = self._function(*words, **{**names, **self._arguments})
        return _await_rating(result) if self.is_async else read_rating(result)


class GroupFunction:
    """Rates the replies of a group beside one another."""

    def __init__(
        self, function: Callable[..., Any], signature: Signature, arguments: Mapping[str, Any]
    ) -> None:
        self._function, self._signature, self._arguments = function, signature, dict(arguments)
        self.is_async = is_coroutine_function(function)
        self.needs_tokens = signature.needs_tokens

    def rate_group(
        self, row: Row, replies: Sequence[GroupReply]
    ) -> list[Rating | None] | Awaitable[list[Rating | None]]:
        notes = GroupNotes(len(replies))
        words, names = self._signature.make_call(copy_value(row), replies, notes)
        result = self._function(*words, **{**names, **self._arguments})
        if self.is_async:
            return self._await_ratings(result, notes, len(replies))
        return self._read_ratings(result, notes, len(replies))

    async def _await_ratings(
        self, result: Awaitable[Any], notes: GroupNotes, count: int
    ) -> list[Rating | None]:
        return self._read_ratings(await result, notes, count)

    def _read_ratings(self, result: Any, notes: GroupNotes, count: int) -> list[Rating | None]:
        values = read_list(result, count)
        return [
            None
            if value is None and self._signature.may_abstain
            else read_rating(value, notes.list_details(index))
            for index, value in enumerate(values)
        ]


def copy_value(value: Any) -> Any:
    """Returns a copy of a row, of the lists and dicts within it too: a function may change what it gets, and
    the row serves the next reply."""
    if isinstance(value, dict):
        return {key: copy_value(one) for key, one in value.items()}
    return [copy_value(one) for one in value] if isinstance(value, list) else value


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    # An object whose method `__call__` is async is called as an async function is.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def read_list(result: Any, count: int) -> list[Any]:
    """Reads what a function of a whole group returned: a list, or an array of numpy or torch.

    Raises ValueError for anything else, and for another number of values than replies.
    """
    try:
        values = None if isinstance(result, str | bytes | Mapping) else list(result)
    except TypeError:
        values = None
    if values is None or len(values) != count:
        found = "" if values is None else f" of length {len(values)}"
        raise ValueError(
            f"a function that rates a group must return a list of {count} rewards, one for each reply, got "
            f"{show_value(result)}{found}"
        )
    return values


async def _await_rating(result: Awaitable[Any]) -> Rating:
    return read_rating(await result)


def read_rating(result: Any, further: Mapping[str, Any] | None = None) -> Rating:
    """Reads what a function returned for a reply, and `further` details. Text among the details (verl's
    `pred`) is no figure, and is left out.

    Raises ValueError for a dict without `score` and `reward`.
    """
    details = dict(further or {})
    value = result
    if isinstance(result, Mapping):
        names = [name for name in ("score", "reward") if name in result]
        if not names:
            raise ValueError(
                f"a reward's dict must have a number at score or reward, got {sorted(map(str, result))}"
            )
        value = result[names[0]]
        details |= {key: one for key, one in result.items() if key != names[0]}
    return Rating(value, {key: one for key, one in details.items() if _is_figure(one)})


def _is_figure(value: Any) -> bool:
    return not isinstance(value, str | bytes) and (hasattr(value, "__float__") or hasattr(value, "__index__"))


def load_function(field: str, name: str) -> Callable[..., Any]:
    """Returns the function that `module:function` or `path.py:function` names. Raises ValueError that names
    `field`, the rule and the value."""
    place, _, function_name = name.rpartition(":")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    # The user's file may raise anything while it is imported, and a script ends there.
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{field} must name a function that can be imported, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, function_name):
        nearest = difflib.get_close_matches(function_name, vars(module), n=3)
        hint = f" (nearest: {', '.join(nearest)})" if nearest else ""
        raise ValueError(f"{field} must name a function of {place}{hint}, got {function_name!r}")
    function = getattr(module, function_name)
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{field} must name a function, got {name!r}, which is a {type(function).__name__}")
    loaded: Callable[..., Any] = function
    return loaded


def place_functions(reward: RewardConfig) -> RewardConfig:
    """Returns the reward with absolute paths of its functions, for other folders to work in."""
    parts = [
        {**part, "use": _make_absolute(part["use"])} if isinstance(part, Mapping) and "use" in part else part
        for part in reward.parts
    ]
    return replace(reward, function=_make_absolute(reward.function), parts=parts)


def _make_absolute(use: Any) -> Any:
    place, _, function_name = use.rpartition(":") if isinstance(use, str) else ("", "", "")
    return f"{Path(place).expanduser().absolute()}:{function_name}" if place.endswith(".py") else use
