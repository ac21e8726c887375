"""Rates a text that was to be written backwards, as prime-rl's environment `reverse-text` does."""

import re
from difflib import SequenceMatcher

from generators.data.rows import read_messages
from generators.environment import Row

ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def rate_reversal(row: Row, reply: str) -> float:
    """Returns how similar the text within <reversed_text> is to the prompt's last message backwards,
    from 0 to 1."""
    found = ANSWER.search(reply)
    written = found.group(1).strip() if found else ""
    return SequenceMatcher(None, written, read_messages(row)[-1]["content"][::-1]).ratio()
