"""The answer within a reply: what a part compares with the row's right answer."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from generators.data.rows import read_reference
from generators.environment import Row
from generators.rewards.arguments import check_flag, check_text

THINKING_ENDS = "</think>"
OPENS, CLOSES = "<answer>", "</answer>"
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
Finder = Callable[[str], str | None]


class AnswerFinder:
    """Finds the answer of a reply."""

    def __init__(self, find: Any = "all", after_thinking: Any = False) -> None:
        """`find`: one of `FINDERS`, or a regular expression with one group, whose last match counts.
        `after_thinking`: only the text behind the last `</think>` counts. Raises ValueError for another
        argument."""
        self._after_thinking = check_flag("after_thinking", after_thinking)
        self._find = FINDERS.get(check_text("find", find)) or _make_finder(find)

    def find_answer(self, reply: str) -> str | None:
        """Returns the answer without white space around it; None where there is none."""
        if self._after_thinking:
            reply = find_conclusion(reply)
        answer = self._find(reply)
        return None if answer is None else answer.strip()

    def find_reference(self, right: str) -> str:
        """Returns the answer within a right answer, which may be a whole solution; all of it where nothing is
        found."""
        answer = self._find(right)
        return (right if answer is None else answer).strip()


def list_references(row: Row, place: str | None) -> list[Any]:
    """Returns the right answers of a row, one or several. Raises ValueError for none, and for a column of
    columns."""
    value = read_reference(row, place)
    rights = list(value) if isinstance(value, list | tuple) else [value]
    if not rights or any(isinstance(one, Mapping | list | tuple) for one in rights):
        raise ValueError(
            "a right answer must be a text or a number, or a list of them (the argument `reference` names "
            f"the column), got {str(value)[:200]}"
        )
    return rights


def find_conclusion(reply: str) -> str:
    """Returns the text behind the last `</think>`; nothing where the thinking has not ended."""
    return reply.rpartition(THINKING_ENDS)[2] if THINKING_ENDS in reply else ""


def find_boxed(text: str) -> str | None:
    """Returns what stands in the last `\\boxed{...}`, whose braces are balanced."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len(r"\boxed{")
    for place in range(begin - 1, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin:place]
    return None


def find_tagged(text: str) -> str | None:
    """Returns what stands in the last `<answer>…</answer>`, read from the front. A regular expression takes
    seconds for a reply of tags that are never closed."""
    found, start = None, text.find(OPENS)
    while start >= 0 and (end := text.find(CLOSES, start)) >= 0:
        found, start = text[start + len(OPENS) : end], text.find(OPENS, end)
    return found


def find_last(pattern: re.Pattern[str]) -> Finder:
    """Returns a finder of the last match: its group where it has one, or else all of it."""

    def find(text: str) -> str | None:
        matches = list(pattern.finditer(text))
        return matches[-1][1 if pattern.groups else 0] if matches else None

    return find


FINDERS: dict[str, Finder] = {
    "all": lambda text: text,
    "boxed": find_boxed,
    "answer_tag": find_tagged,
    "hashes": find_last(re.compile(r"####([^\n]*)")),
    "number": find_last(NUMBER),
}


def _make_finder(find: str) -> Finder:
    try:
        pattern = re.compile(find)
    except re.error as error:
        raise ValueError(f"find must be a regular expression, got {find!r}: {error}") from error
    if pattern.groups != 1:
        raise ValueError(
            f"find must be one of {', '.join(FINDERS)}, or a regular expression with one group, got {find!r}"
        )
    return find_last(pattern)
