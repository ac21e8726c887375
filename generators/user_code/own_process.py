"""The beginning of a process for the task's code: a session and standard streams of its own."""

import fcntl
import io
import os
import signal
import sys
import time
from collections.abc import Sequence

from generators.user_code.process_control import die_with_parent, name_process

GUARD_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end no guard: it ends with the generator. The task's code may send them to its parent."""
_PATIENCE_S = 60.0
"""Seconds in which a worker's parent must have become the guard."""
_HIGH_DESCRIPTOR = 64


def begin_process(name: str, guard: int, output: int) -> None:
    """Gives this process a session, a name and standard streams of its own, and lets it end with the guard.

    `guard` is the guard's pid, and `output` the descriptor that takes what the process prints.
    """
    os.setsid()
    _wait_for_parent(guard)
    name_process(name)
    # A module that ignores SIGCHLD would make every child that fails look as if it had ended well.
    for number in (*GUARD_IGNORES, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray blocks some of them in its processes, and what the task starts could not be told to end.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARD_IGNORES)
    (nothing,) = move_descriptors([os.open(os.devnull, os.O_RDONLY)])
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = _open_output(1), _open_output(2)


def _open_output(descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, "utf-8", errors="backslashreplace", line_buffering=True)


def _wait_for_parent(guard: int) -> None:
    """Waits until the guard is this process's parent, and ends the process when the guard is gone."""
    deadline = time.monotonic() + _PATIENCE_S
    while os.getppid() != guard:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent()
    if os.getppid() != guard:
        os._exit(1)


def flush_output() -> None:
    """Writes what the process has printed and still holds."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # the task's code has closed or replaced it
        pass


def move_descriptors(descriptors: Sequence[int]) -> list[int]:
    """Returns the descriptors under high numbers. Low ones are the standard streams' where the task's code
    has closed those."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR) for one in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return moved
