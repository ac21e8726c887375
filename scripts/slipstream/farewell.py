"""Tells the buffer that a command's generators leave, however the command ends.

    driver ── pipe ──▶ this process ── LeaveRun for each generator ──▶ buffer

It outlives a driver that was killed by a moment. The generators cannot say it themselves then: a Ray cluster
kills them within milliseconds of their driver.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, KeysRefused, RefusedByBuffer

SAID_S, WAITED_S = 5.0, 1.0
"""Seconds that the buffer has to hear it, and for which a command waits for that. A host that is taken away
leaves a command little time, and what says farewell goes on without it."""


@contextmanager
def say_farewell(address: str, keys: str | None, names: Sequence[str]) -> Iterator[None]:
    """Says that the generators have left when the block ends, or this process does."""
    command = [sys.executable, "-P", "-m", "slipstream.farewell", address, keys or "", *names]
    # It holds no output open: a reader of the driver's has its end when the driver ends.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAITED_S)


def leave_run(address: str, keys: str | None, names: Sequence[str]) -> None:
    client = BufferClient(address, timeout_s=SAID_S, keys=keys)
    with suppress(BufferGone, RefusedByBuffer, KeysRefused):
        for name in names:
            client.call(m.LeaveRun(generator=name), m.Acknowledged)
    client.close()


def main(address: str, keys: str, *names: str) -> None:
    # Whoever ends a whole job by signals ends this process last, through the driver.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()  # nothing comes: the pipe closes
    leave_run(address, keys or None, names)


if __name__ == "__main__":
    main(*sys.argv[1:])
