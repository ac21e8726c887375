"""The signatures of reward functions, told apart by the names of their parameters:

    (row, reply)                                                each reply alone
    (row, replies)                                              a group at once
    (data_source, solution_str, ground_truth, extra_info)       verl's compute_score, each reply alone
    (data_sources, solution_strs, ground_truths, extra_infos)   verl's batches, a group at once
    (prompts, completions, **columns)                           TRL's, a group at once

A function may take fewer of the names of verl's and TRL's, and further arguments of its own.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generators.data.rows import read_reference
from generators.environment import Row
from generators.rewards.part import GroupReply

VERL_REPLIES = ("solution_str", "predict_str", "model_output")
"""The reply's name in the functions that verl ships."""
VERL_NAMES = ("data_source", "ground_truth", "extra_info")
VERL_BATCH_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_REPLIES = ("completions", "completion_ids")
TRL_NAMES = ("prompts", *TRL_REPLIES, "log_metric", "log_extra")
TRL_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL keeps from its functions."""
TRAINERS_NAMES = ("trainer_state", "environments")
"""Keywords that only a trainer has."""


class GroupNotes:
    """The figures that a function of TRL's logs beside its rewards."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics = defaultdict[str, list[float]](list)
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self._metrics[name].append(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self._columns[column] = list(values)

    def list_details(self, index: int) -> dict[str, Any]:
        """Returns the notes about one reply: its own values, and the mean of each metric."""
        means = {name: sum(map(float, values)) / len(values) for name, values in self._metrics.items()}
        own = {name: values[index] for name, values in self._columns.items() if len(values) == self._count}
        return {**own, **means}


CallMaker = Callable[[Row, Sequence[GroupReply], GroupNotes], tuple[Sequence[Any], Mapping[str, Any]]]
"""Makes the positional and the keyword arguments of a call."""


@dataclass(frozen=True, slots=True)
class Signature:
    """How a function is called."""

    make_call: CallMaker
    rates_groups: bool = False
    """True when one call rates all replies of a group."""
    needs_tokens: bool = False
    may_abstain: bool = False
    """True when None means that the function has nothing to say about a reply."""


def read_signature(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Signature:
    """Returns how a function is called. Raises TypeError, with the reason, where it cannot be called with
    `arguments` beside."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some functions written in C tell nothing about their parameters.
        return Signature(_pass_row_and_reply)
    takes = _Names(signature.parameters.values())
    if takes.names & {"prompts", *TRL_REPLIES}:
        return _read_trl_signature(signature, takes, arguments)
    if "solution_strs" in takes.names:
        names = takes.choose_names(VERL_BATCH_NAMES)
        signature.bind(**dict.fromkeys(names), **arguments)
        return Signature(lambda *call: ((), _make_verl_batch(names, *call)), rates_groups=True)
    if replies := [name for name in VERL_REPLIES if name in takes.names]:
        names = takes.choose_names(VERL_NAMES)
        signature.bind(**dict.fromkeys([*names, replies[0]]), **arguments)
        return Signature(lambda *call: ((), _make_verl_call(replies[0], names, *call)))
    if {"row", "reply"} <= takes.names:
        signature.bind(row=None, reply=None, **arguments)
        return Signature(lambda row, replies, notes: ((), {"row": row, "reply": replies[0].text}))
    signature.bind(None, None, **arguments)
    if list(signature.parameters)[1:2] == ["replies"]:
        return Signature(_pass_row_and_replies, rates_groups=True)
    return Signature(_pass_row_and_reply)


class _Names:
    """The names that a function takes as keywords."""

    def __init__(self, parameters: Collection[inspect.Parameter]) -> None:
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self.names = {one.name for one in named}
        self.required = {one.name for one in named if one.default is one.empty}
        self.takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    def choose_names(self, offered: Sequence[str]) -> list[str]:
        return [name for name in offered if self.takes_any or name in self.names]


def _read_trl_signature(
    signature: inspect.Signature, takes: _Names, arguments: Mapping[str, Any]
) -> Signature:
    if lacking := sorted(takes.required & set(TRAINERS_NAMES) - set(arguments)):
        raise TypeError(f"{lacking[0]} must have a default (rewards are made without a trainer)")
    signature.bind(**dict.fromkeys({*takes.choose_names(TRL_NAMES), *takes.required, *arguments}))
    columns = takes.required - {*TRL_NAMES, *arguments}
    # Every function of TRL's takes **kwargs: tokens are many, so only the name asks for them.
    needs_tokens = "completion_ids" in takes.names

    def make_call(row: Row, replies: Sequence[GroupReply], notes: GroupNotes) -> tuple[Any, dict[str, Any]]:
        if missing := sorted(columns - row.keys()):
            raise ValueError(f"rows must have a column {missing[0]!r}, got the columns {sorted(row)}")
        given = {
            name: [value] * len(replies)
            for name, value in row.items()
            if name not in TRL_NO_COLUMNS and (takes.takes_any or name in takes.names)
        }
        is_text = isinstance(row.get("prompt"), str)
        own = {
            "prompts": [row.get("prompt")] * len(replies),
            "completions": [
                one.text if is_text else [{"role": "assistant", "content": one.text}] for one in replies
            ],
            "completion_ids": [list(one.tokens) for one in replies],
            "log_metric": notes.log_metric,
            "log_extra": notes.log_extra,
        }
        return (), given | {name: own[name] for name in takes.choose_names(TRL_NAMES)}

    return Signature(make_call, rates_groups=True, needs_tokens=needs_tokens, may_abstain=True)


def _pass_row_and_reply(row: Row, replies: Sequence[GroupReply], notes: GroupNotes) -> Any:
    return (row, replies[0].text), {}


def _pass_row_and_replies(row: Row, replies: Sequence[GroupReply], notes: GroupNotes) -> Any:
    return (row, [one.text for one in replies]), {}


def _make_verl_call(
    reply: str, names: Sequence[str], row: Row, replies: Sequence[GroupReply], notes: GroupNotes
) -> dict[str, Any]:
    values = {name: read_verl_value(row, name) for name in names}
    return values | {reply: replies[0].text}


def _make_verl_batch(
    names: Sequence[str], row: Row, replies: Sequence[GroupReply], notes: GroupNotes
) -> dict[str, Any]:
    return {
        name: [one.text for one in replies]
        if name == "solution_strs"
        else [read_verl_value(row, name.removesuffix("s")) for _ in replies]
        for name in names
    }


def read_verl_value(row: Row, name: str) -> Any:
    """Returns what verl's functions get of a row: `data_source`, `ground_truth` or `extra_info`."""
    if name == "data_source":
        return row.get("data_source", "")
    if name == "extra_info":
        info = row.get("extra_info")
        return {} if info is None else info
    try:
        return read_reference(row)
    except ValueError:
        # verl has rows that are graded without a right answer.
        model = row.get("reward_model")
        if isinstance(model, Mapping) and "ground_truth" in model:
            return None
        raise
