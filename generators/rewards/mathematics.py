"""Mathematics: 1 where a reply's answer equals the row's, as numbers, LaTeX, sets or intervals; else 0.

`math-verify` parses both and compares them with sympy. Its own time limits are signals, which work in the
main thread only and hide a failure as a wrong answer, so they are off: an expression that takes for ever
meets the deadline of the worker process.
"""

import logging
from functools import lru_cache
from typing import Any

import math_verify

from generators.environment import Row
from generators.rewards.arguments import check_text
from generators.rewards.part import Rating
from generators.rewards.rows import read_reference

# It warns that there is no time limit; there is one, outside.
for module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

WARM_UP = ("1", "-1.5", r"\frac{1}{2}", r"\{1, 2\}", "(0, 1]", r"\sqrt{2}", "x^2+2x+1", "x=3")
"""Answers of usual forms."""


class MathPart:
    """Compares a reply's answer with the row's right one."""

    is_async = False

    def __init__(self, reference: str | None = None) -> None:
        """`reference`: column of the right answer, with dots for columns within columns."""
        self._reference = None if reference is None else check_text("reference", reference)
        # The parser learns its grammar as it goes; workers are forked from here, and need not learn it again.
        for answer in WARM_UP:
            compare_answers(answer, f"It is ${answer}$.")

    def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises ValueError where the row's right answer is no mathematics."""
        return Rating(compare_answers(str(read_reference(row, self._reference)), reply))


def compare_answers(wanted: str, reply: str) -> float:
    """Returns 1 where the reply's answer equals the right one, else 0."""
    right, given = list(parse_answer(wanted)), math_verify.parse(reply, parsing_timeout=None)
    return float(math_verify.verify(right, given, timeout_seconds=None))


@lru_cache(maxsize=1024)
def parse_answer(text: str) -> tuple[Any, ...]:
    """Returns what math-verify reads in a right answer; it is the part behind `####` where there is one
    (GSM8K). Raises ValueError for text that is no mathematics."""
    answer = text.rpartition("####")[2].strip()
    marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    parsed = tuple(math_verify.parse(marked, parsing_timeout=None))
    if not parsed:
        raise ValueError(f"the right answer must be a number, an expression or a set, got {text[:200]!r}")
    return parsed
