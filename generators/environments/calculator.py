"""A calculator as a tool: the policy may compute with it, and then says the result in plain text."""

import json
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from generators.environment import Message, Row, ToolSpec, Turn
from generators.environments._arithmetic import compute_expression, write_number
from generators.environments._replies import read_text, say
from generators.splits import draw_for_split

CALCULATOR: ToolSpec = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression of numbers, + - * / // % ** and parentheses, exactly.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example: (3 + 4) * 12"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
MAX_SHOWN = 100
"""Characters of a wrong call that its answer repeats."""


class Task:
    """Sums of whole numbers, as "What is 37 * 12 - 5?"."""

    name = "calculator"

    def __init__(self, numbers: int = 3, largest: int = 99, turns: int = 4) -> None:
        """Asks for a result of `numbers` whole numbers from 1 to `largest`. An episode has at most `turns`
        replies."""
        for field, value, least in (("numbers", numbers, 2), ("largest", largest, 1), ("turns", turns, 1)):
            if value < least:
                raise ValueError(f"{field} must be at least {least}, got {value}")
        self._numbers, self._largest, self._turns = numbers, largest, turns

    def make_row(self, split: str, index: int, seed: int) -> Row:
        rng = random.Random(f"{seed}/{split}/{index}")
        return {"expression": draw_for_split(self._draw_expression, str, split, rng)}

    def make_environment(self, row: Row) -> "CalculatorEpisode":
        return CalculatorEpisode(self._turns)

    def _draw_expression(self, rng: random.Random) -> str:
        numbers = [str(rng.randint(1, self._largest)) for _ in range(self._numbers)]
        return numbers[0] + "".join(f" {rng.choice('+-*')} {number}" for number in numbers[1:])


class CalculatorEpisode:
    """One question. A reply with tool calls gets their results; a reply without any is the answer."""

    def __init__(self, turns: int) -> None:
        self._turns_left = turns
        self._expression = ""
        self._num_calls = 0

    def reset(self, row: Row, seed: int) -> Turn:
        self._expression = row["expression"]
        question = f"What is {self._expression}? Compute it with the calculator. Then reply with the number."
        return Turn(messages=say(question), tools=[CALCULATOR])

    def step(self, reply: Message) -> Turn:
        self._turns_left -= 1
        calls = reply.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            correct = float(_read_answer(read_text(reply)) == compute_expression(self._expression))
            return Turn(
                reward=correct, components={"correct": correct, "calls": float(self._num_calls)}, done=True
            )
        if not self._turns_left:
            return Turn(components={"correct": 0.0, "calls": float(self._num_calls)}, done=True)
        return Turn(messages=[self._answer_call(call) for call in calls])

    def close(self) -> None:
        """Does nothing: an episode holds nothing."""

    def _answer_call(self, call: Any) -> Message:
        self._num_calls += 1
        given = call if isinstance(call, Mapping) else {}
        named = given.get("id")
        call_id = named if isinstance(named, str) else f"call_{self._num_calls}"
        try:
            content = compute_expression(_read_expression(given.get("function")))
        except ValueError as error:
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": call_id, "name": "calculator", "content": content}


def _read_expression(function: Any) -> str:
    """Returns the expression of a call. Raises ValueError that says what is wrong with the call."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if name != "calculator":
        raise ValueError(f"there is no tool {_show(name)}, only calculator")
    arguments = function.get("arguments")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise ValueError(f"the arguments must be JSON, got {_show(arguments)}") from None
    if (
        not isinstance(read, Mapping)
        or set(read) != {"expression"}
        or not isinstance(read["expression"], str)
    ):
        raise ValueError(f'the arguments must read {{"expression": "..."}}, got {_show(arguments)}')
    return read["expression"]


def _read_answer(text: str) -> str:
    """Returns a number in the calculator's own writing, or nothing where the text is not a plain number."""
    number = text.strip().removesuffix(".").replace(",", "")
    if len(number) > MAX_SHOWN or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", number):
        return ""
    return write_number(Fraction(number))


def _show(value: Any) -> str:
    return repr(value)[:MAX_SHOWN]
