"""A process that meets an error as a rank of an engine does. It imports next to nothing, so it starts at
once."""

import logging
import time
from pathlib import Path

from sync.rank_errors import ErrorNote


def fail_in_loop(folder: Path, rank: int, message: str) -> None:
    """Does with an error what vLLM's loop in a rank does: logs it, and goes on."""
    loop = logging.getLogger("loop")
    loop.addHandler(ErrorNote(folder, rank))
    try:
        raise RuntimeError(message)
    except RuntimeError:
        loop.exception("WorkerProc hit an exception.")
    time.sleep(600)
