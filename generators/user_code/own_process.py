"""The beginning of a process for the task's code: a session and standard streams of its own."""

import io
import os
import signal
import sys
import time

from generators.user_code.process_control import die_with_parent, name_process

_PATIENCE_S = 60.0
"""Seconds in which a worker's parent must have become the guard."""


def begin_process(name: str, guard: int, output: int) -> None:
    """Gives this process a session, a name and standard streams of its own, and lets it end with the guard.

    `guard` is the guard's pid, and `output` the descriptor that takes what the process prints.
    """
    os.setsid()
    _wait_for_parent(guard)
    name_process(name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
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
