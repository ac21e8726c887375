"""A process that compares mathematics, so that an expression without end ends it and not the worker.

    right answers, reply ─▶ reads the right answers ─▶ what is wrong with them ─▶ reads the reply ─▶ 1 or 0

Each of the two has so much processor time; the kernel ends the process that takes more, in a loop of C's too.
It is forked at the first reply, with the grammar that the parser has learned, and again after each end. Time
of the clock would punish replies on a busy machine, and math-verify's own limits are signals, which work in
the main thread only and hide a failure as a wrong answer.
"""

import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import math_verify

# It warns that there is no time limit; there is one, outside.
for module in ("parser", "grader"):
    logging.getLogger(f"math_verify.{module}").setLevel(logging.CRITICAL)

FORK = multiprocessing.get_context("fork")


class OutOfTime(Exception):
    """A reply has taken more than its processor time."""


class MathProcess:
    """Compares one reply at a time, in a process of its own."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: processor time for a reply, and as much for its row's right answers."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: ForkProcess | None = None
        self._owner = 0
        """The process that has forked it. One that is forked from there needs another."""

    def compare_reply(self, wanted: Sequence[str], reply: str) -> float:
        """Returns 1 where the reply's answer equals one of the right ones, else 0.

        Raises OutOfTime, ValueError for right answers that are no mathematics, or too long, and
        ChildProcessError when something else has ended the process.
        """
        request = json.dumps([wanted, reply]).encode()
        with self._lock:
            try:
                self._open_process().send_bytes(request)
            except BrokenPipeError:  # something has killed it between two replies
                self._open_process(again=True).send_bytes(request)
            try:
                trouble = self._receive_text()
            except OutOfTime:
                raise ValueError(
                    f"a right answer must be compared within {self._timeout_s:g} s of processor time "
                    f"(timeout_s), got no end for {str(wanted)[:200]}"
                ) from None
            if trouble:
                raise ValueError(trouble)
            return float(self._receive_text())

    def _open_process(self, again: bool = False) -> Connection:
        if again or self._connection is None or self._owner != os.getpid():
            self._connection, other = FORK.Pipe()
            ends = other, self._connection
            self._process = FORK.Process(
                target=serve_comparisons, args=(*ends, self._timeout_s), name="math", daemon=True
            )
            self._process.start()
            other.close()
            self._owner = os.getpid()
        return self._connection

    def _receive_text(self) -> str:
        """Returns what the process says. Raises OutOfTime or ChildProcessError where it has ended."""
        assert self._connection is not None and self._process is not None
        try:
            return self._connection.recv_bytes().decode()
        except (EOFError, ConnectionResetError):
            self._connection.close()
            self._connection = None
            self._process.join()
            if self._process.exitcode == -signal.SIGPROF:
                raise OutOfTime from None
            # A failure of the machine, such as too little memory, is no wrong answer.
            raise ChildProcessError(
                f"the process that compares mathematics must live, got status {self._process.exitcode}"
            ) from None


def serve_comparisons(connection: Connection, parents_end: Connection, timeout_s: float) -> None:
    """Answers requests until the parent is gone."""
    parents_end.close()
    # Without a handler, the timer ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        try:
            wanted, reply = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        try:
            rights = [parse_answer(right) for right in wanted]
        except ValueError as error:
            connection.send_bytes(str(error).encode(errors="replace"))
        else:
            connection.send_bytes(b"")
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            connection.send_bytes(b"%d" % is_right(rights, reply))
        signal.setitimer(signal.ITIMER_PROF, 0)


def is_right(rights: Sequence[tuple[Any, ...]], reply: str) -> bool:
    """True when the reply's answer equals one of the right ones, which `parse_answer` has read."""
    given = read_text(reply)
    return any(math_verify.verify(list(right), given, timeout_seconds=None) for right in rights)


@lru_cache(maxsize=1024)
def parse_answer(text: str) -> tuple[Any, ...]:
    """Returns what math-verify reads in a right answer; it is the part behind `####` where there is one
    (GSM8K). Raises ValueError for text that is no mathematics."""
    answer = text.rpartition("####")[2].strip()
    if "$" in answer or "\\boxed" in answer:
        # The dollar sign may be a price's, escaped too.
        parsed = read_text(answer) or read_text(f"\\boxed{{{answer}}}")
    elif "%" in answer:
        # A box with a percent sign is no expression to math-verify, and the sign is written in two ways.
        bare = answer.replace("\\%", "%")
        ways = [bare, bare.replace("%", "\\%")]
        parsed = [
            one for way in ways for form in (f"\\boxed{{{way}}}", f"${way}$") for one in read_text(form)
        ]
    else:
        parsed = read_text(f"\\boxed{{{answer}}}")
    if not parsed:
        raise ValueError(f"the right answer must be a number, an expression or a set, got {text[:200]!r}")
    # One that cannot be compared in time would make every reply a wrong one.
    math_verify.verify(parsed, read_text("1"), timeout_seconds=None)
    return tuple(parsed)


def read_text(text: str) -> list[Any]:
    """Returns the expressions that math-verify reads in a text, and the text that it takes for the answer."""
    return list(math_verify.parse(text, parsing_timeout=None))
