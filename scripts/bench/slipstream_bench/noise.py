"""Finds what commands and roles must not print, whatever is done to them: tracebacks on a console, and lines
in a busy loop."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MAX_LINES_A_SECOND = 200
"""Lines of one log that begin with the same second. A role that says what it does writes a few."""
SECOND = len("2026-01-01 00:00:00")
SHOWN = 160
"""Characters of a line that a report shows."""


def find_noise(consoles: Iterable[Path], logs: Iterable[Path]) -> list[str]:
    """Returns what is wrong with the consoles of commands and with the logs of roles, in words."""
    found = []
    for path in consoles:
        if "Traceback (most recent call last)" in path.read_text(errors="replace"):
            found.append(f"a traceback on the console {path.name}, where a sentence belongs")
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        seconds = Counter(line[:SECOND] for line in lines if line[:4].isdecimal())
        second, most = max(seconds.items(), key=lambda item: item[1], default=("", 0))
        if most > MAX_LINES_A_SECOND:
            line = next(line for line in lines if line.startswith(second))
            found.append(f"{path.name} has {most} lines of one second, the first is: {line[:SHOWN]}")
    return found
