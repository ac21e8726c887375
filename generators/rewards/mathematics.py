"""Mathematics: 1 where a reply's answer equals the row's, as numbers, LaTeX, sets or intervals; else 0.

`math-verify` parses both and compares them with sympy, in a process that ends when a reply takes too long
(`math_process.py`). Such a reply is a bad one.
"""

from generators.environment import Row
from generators.rewards.answers import find_conclusion, list_references
from generators.rewards.arguments import check_flag, check_number, check_text
from generators.rewards.math_process import MathProcess, OutOfTime, is_right, parse_answer
from generators.rewards.part import Rating

WARM_UP = ("1", "-1.5", r"\frac{1}{2}", r"\{1, 2\}", "(0, 1]", r"\sqrt{2}", "x^2+2x+1", "x=3")
"""Answers of usual forms."""
BOX = r"\boxed"
LONGEST = 2000
"""Characters at the end of a reply that are read. The parser takes seconds for ten times as many."""


class MathPart:
    """Compares a reply's answer with the row's right one."""

    is_async = False

    def __init__(
        self, reference: str | None = None, after_thinking: bool = False, timeout_s: float = 5.0
    ) -> None:
        """`reference`: column of the right answer or of several, with dots for columns within columns.
        `after_thinking`: only the text behind the last `</think>` counts. `timeout_s`: processor time for a
        reply, which else counts as wrong."""
        self._reference = None if reference is None else check_text("reference", reference)
        self._after_thinking = check_flag("after_thinking", after_thinking)
        self._process = MathProcess(check_number("timeout_s", timeout_s, above=0))
        # The parser learns its grammar as it goes; processes that are forked from here know it.
        for answer in WARM_UP:
            is_right([parse_answer(answer)], f"It is ${answer}$.")

    def rate_reply(self, row: Row, reply: str) -> Rating:
        """Raises ValueError where the row's right answer is no mathematics."""
        text = find_conclusion(reply) if self._after_thinking else reply
        rights = [str(right) for right in list_references(row, self._reference)]
        try:
            return Rating(self._process.compare_reply(rights, cut_reply(text)), {"out_of_time": 0.0})
        except OutOfTime:
            return Rating(0.0, {"out_of_time": 1.0})


def cut_reply(reply: str) -> str:
    """Returns the end of a long reply, from the beginning of a line, below what stands around the last box
    before that."""
    if len(reply) <= LONGEST:
        return reply
    line = reply.find("\n", -LONGEST) + 1
    begin = line or len(reply) - LONGEST
    box = reply.rfind(BOX)
    if not 0 <= box < begin:
        return reply[begin:]
    first = max(reply.rfind("\n", 0, box) + 1, box - LONGEST // 4)
    return f"{reply[first : min(begin, box + LONGEST // 2)]}\n{reply[begin:]}"
