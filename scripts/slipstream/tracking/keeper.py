"""The keeper of a tracker's process: it forks the process, keeps the beginning of its output, and lets
nothing below itself outlive the run.

    the driver writes to the keeper's input ──▶ everything is killed at once
    the driver ends, however it ends       ──▶ the process has SECONDS to close the run; then it is killed
    the process ends                       ──▶ what it has left is killed

`python -P -m slipstream.tracking.keeper LINK DRIVER LOG SECONDS`: the descriptor of the socket to the driver,
the driver's pid, and the file that takes the output. Imports no library of a tracker itself.
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from typing import NoReturn

from generators.user_code.own_process import GUARD_IGNORES
from generators.user_code.process_control import (
    become_subreaper,
    die_with_parent,
    kill_all_children,
    name_process,
)

MAX_LOG_BYTES = 1 << 20
"""Bytes of output that the log takes from one life of a process. What follows is read and dropped, so that no
process waits for its output."""
_CHUNK_BYTES = 1 << 16
_OOM_SCORE = 1000
"""Makes the kernel take the tracker before any part of the run when memory runs out."""


def main(link: int, driver: int, log: str, leave_s: float) -> None:
    become_subreaper()
    for number in GUARD_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    output, inner_output = os.pipe()
    keeper = os.getpid()
    if (pid := os.fork()) == 0:
        os.close(output)
        _run_host(link, inner_output, keeper)
    name_process("slip-keeper")
    os.close(inner_output)
    os.close(link)
    os.set_blocking(output, False)
    try:
        _keep_process(pid, driver, output, OutputLog(log), leave_s)
    finally:
        kill_all_children()


def _run_host(link: int, output: int, keeper: int) -> NoReturn:
    """Runs the tracker in the process that has just been forked."""
    status = 1
    try:
        die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        name_process("slip-tracker")
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(_OOM_SCORE))
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(output)
        for number in GUARD_IGNORES:
            signal.signal(number, signal.SIG_DFL)
        from slipstream.tracking.host import run_host

        run_host(link)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not the interpreter's own end: hooks and threads of libraries may hang.
        os._exit(status)


def _keep_process(pid: int, driver: int, output: int, log: "OutputLog", leave_s: float) -> None:
    """Returns when the process has ended or must end."""
    selector = selectors.DefaultSelector()
    selector.register(output, selectors.EVENT_READ, "output")
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, "ended")
    selector.register(0, selectors.EVENT_READ, "driver")
    deadline = float("inf")
    # The input alone does not tell: a process that the driver has forked may hold the other end open.
    try:
        selector.register(os.pidfd_open(driver), selectors.EVENT_READ, "driver is gone")
    except ProcessLookupError:
        deadline = time.monotonic() + leave_s
    while (left := deadline - time.monotonic()) > 0:
        ready = {key.data: key.fd for key, _ in selector.select(None if left == float("inf") else left)}
        if "output" in ready and not log.take_output(output):
            selector.unregister(output)
        if "ended" in ready:
            log.take_output(output)
            return
        if "driver" in ready and os.read(0, 1):
            return
        for gone in ready.keys() & {"driver", "driver is gone"}:
            selector.unregister(ready[gone])
            deadline = min(deadline, time.monotonic() + leave_s)


class OutputLog:
    """The file that takes the beginning of what a process prints."""

    def __init__(self, path: str) -> None:
        self._left = MAX_LOG_BYTES
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def take_output(self, output: int) -> bool:
        """Takes what is there, a megabyte at most. Returns False when nothing more can come."""
        for _ in range(16):
            try:
                data = os.read(output, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self._left > 0:
                self._write(data[: self._left])
                self._left -= len(data)
                if self._left <= 0:
                    self._write(b"\n... the rest of the output is left out\n")
        return True

    def _write(self, data: bytes) -> None:
        # A full disk is named by the run, which writes more than this.
        with contextlib.suppress(OSError):
            os.write(self._file, data)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
