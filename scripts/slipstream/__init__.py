"""The programs that start, watch and inspect a run."""

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows no traceback of a Ctrl-C during a program's imports, which take seconds."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# As Python says, so while the package of `python -m slipstream.NAME` is looked up.
if sys.argv[0] == "-m":
    sys.excepthook = _end_quietly
