"""The console of a command that may go away before the command ends: a terminal that is closed, a reader that
has died, a file on a full disk. None of them ends a run."""

import os
import sys
from typing import Any

from configs.disk import is_disk_full


class OutlastedStream:
    """Writes to a stream as long as somebody reads it. What is written afterwards is lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A disk may have room again; a reader does not come back."""
        if not is_disk_full(error):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlast_console() -> None:
    """Lets this process go on when nobody takes what it prints."""
    sys.stdout = OutlastedStream(sys.stdout)
    sys.stderr = OutlastedStream(sys.stderr)
