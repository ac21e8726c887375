"""The errors that the ranks of an engine of several GPUs meet, in a file that all of them append to.

vLLM tells the engine that a rank has failed to start, and not why. While it runs it hears of rank 0's errors
alone, and waits for the rank that has met one in vain. So each rank notes its error here first, and then
ends, unless it is rank 0, whose answer says the error itself.
"""

import contextlib
import logging
import os
import time
import traceback
from pathlib import Path

import msgspec

NAMES_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable of the folder that the engine's processes share."""
FILE = "errors"
MAX_CHARACTERS = 20_000
"""Longest message and report of an error. A report keeps its end."""
NOTICED_S = 1.0
"""Seconds after which a rank that has met an error ends: another that was killed, which may be the cause, is
found dead first."""


class RankError(msgspec.Struct):
    """An error that a rank has met."""

    rank: int
    pid: int
    kind: str
    """Name of its class."""
    message: str
    report: str
    """Its traceback."""

    def make_error(self) -> Exception:
        """Returns the error for the engine's process to raise. A ValueError stays one: the console tells its
        message alone, and the log the traceback too."""
        said = f"rank {self.rank} of the engine (pid {self.pid}) has failed: "
        if self.kind == ValueError.__name__:
            error = ValueError(said + self.message)
            error.add_note(self.report)
            return error
        return RuntimeError(f"{said}{self.kind}: {self.message}\n{self.report}")


class RankErrors:
    """The file, as the engine's process has it. It may lose its name meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / FILE).open("xb+")

    def read_first(self) -> RankError | None:
        """Returns the error that was met first, which may have caused the others. A note that was not written
        whole, because the disk was full, is passed over."""
        self._file.seek(0)
        for line in self._file.read().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(line, type=RankError)
        return None


class ErrorNote(logging.Handler):
    """Notes the errors that vLLM's loop in a rank logs."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(logging.ERROR)
        self._rank = rank
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Does not return on other ranks than 0."""
        if record.exc_info is None or not isinstance(error := record.exc_info[1], Exception):
            return
        report = "".join(traceback.format_exception(error))[-MAX_CHARACTERS:]
        message = str(error)[:MAX_CHARACTERS]
        # A name of a file may hold what cannot be encoded.
        message, report = (text.encode(errors="replace").decode() for text in (message, report))
        note = RankError(self._rank, os.getpid(), type(error).__name__, message, report)
        try:
            # It begins with an end, because the note before it may lack its own.
            os.write(self._file, b"\n" + msgspec.json.encode(note) + b"\n")
        except OSError:  # the disk is full: the rank's words in the log must do
            traceback.print_exception(error)
        if self._rank:
            time.sleep(NOTICED_S)
            os._exit(1)
