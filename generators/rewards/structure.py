"""The form of a reply: sections in tags, and regular expressions."""

import re
from collections.abc import Sequence
from typing import Any

from generators.environment import Row
from generators.rewards.arguments import check_count, check_flag, check_text
from generators.rewards.part import Rating

TAG_NAME = re.compile(r"[A-Za-z][\w-]*")


class FormatPart:
    """Asks for sections in tags: `<think>…</think><answer>…</answer>`."""

    is_async = False

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        rest: bool = False,
        opened: bool = False,
        partial: bool = False,
    ) -> None:
        """`tags`: names of the sections, in their order. `rest`: text may follow behind the last one.
        `opened`: the prompt has opened the first one already. `partial`: the number is the share of the tags
        that stand in the reply once.

        Raises ValueError for an argument that breaks its rule.
        """
        names = list(tags) if isinstance(tags, list | tuple) else []
        are_names = all(isinstance(name, str) and TAG_NAME.fullmatch(name) for name in names)
        if not names or not are_names or len(set(names)) < len(names):
            raise ValueError(f"tags must be a list of different names of tags, got {tags!r}")
        opens = [f"<{name}>" for name in names]
        is_opened, has_rest = check_flag("opened", opened), check_flag("rest", rest)
        self._is_partial = check_flag("partial", partial)
        self._marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")][is_opened:]
        gaps = [r"\s*" if mark in opens else ".*" for mark in self._marks]
        middle = "".join(gap + re.escape(mark) for gap, mark in zip(gaps, self._marks, strict=True))
        self._pattern = re.compile(middle + (".*" if has_rest else r"\s*"), re.DOTALL)

    def rate_reply(self, row: Row, reply: str) -> Rating:
        once = sum(reply.count(mark) == 1 for mark in self._marks)
        if self._is_partial:
            return Rating(once / len(self._marks))
        # With each tag there once, the pattern matches in one way or in none.
        return Rating(float(once == len(self._marks) and self._pattern.fullmatch(reply) is not None))


class RegexPart:
    """Looks for a regular expression in a reply."""

    is_async = False

    def __init__(self, pattern: str, full: bool = False, count: int | None = None) -> None:
        """`full`: the whole reply must match. `count`: so many matches give 1, fewer their share.

        Raises ValueError for an argument that breaks its rule.
        """
        try:
            self._pattern = re.compile(check_text("pattern", pattern))
        except re.error as error:
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from error
        self._is_full = check_flag("full", full)
        self._count = None if count is None else check_count("count", count)
        if self._is_full and self._count is not None:
            raise ValueError(f"count must be null with full=true, got {count}")

    def rate_reply(self, row: Row, reply: str) -> Rating:
        if self._count is not None:
            num_matches = sum(1 for _ in self._pattern.finditer(reply))
            return Rating(min(1.0, num_matches / self._count))
        found: Any = self._pattern.fullmatch(reply) if self._is_full else self._pattern.search(reply)
        return Rating(float(found is not None))
