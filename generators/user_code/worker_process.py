"""A worker process: it answers one call of the task's methods after another, until it is killed."""

import contextlib
import faulthandler
import os
import socket
import sys
import traceback
from typing import NoReturn

import msgspec

from generators.plain_values import describe_error, keep_text
from generators.user_code.method_calls import (
    MethodAnswer,
    MethodCall,
    MethodError,
    MethodValue,
    encode_frame,
    read_call,
)
from generators.user_code.own_process import begin_process, flush_output
from generators.user_code.process_control import become_subreaper, count_children
from generators.user_code.task_host import TaskHost

MAX_DETAIL = 4000
"""Characters of a traceback."""
MAX_CHILDREN = 32
"""Children, dead ones included, that an episode or a score may leave in its worker. Some are wanted: a server
for all episodes, say. But code that forgets one each time would fill the host."""

NICENESS = 5
"""Added to a worker's niceness: it weighs a third of the generator's process."""


def run_worker(connection: socket.socket, output: int, host: TaskHost, guard: int) -> NoReturn:
    """Serves `connection` in a process that has just been forked, and ends it. `output` takes what the task's
    code prints; `guard` is the guard's pid."""
    status = 1
    try:
        begin_process("slip-worker", guard, output)
        # Descendants that lose their parent stay below this process, so they end with it and not before.
        become_subreaper()
        _give_way()
        faulthandler.enable(sys.stderr)
        _reseed_generators()
        pid = os.getpid()
        while (call := read_call(connection)) is not None:
            answer = answer_call(host, call)
            if isinstance(answer, MethodValue) and host.is_free and count_children() > MAX_CHILDREN:
                answer.is_spent = True
            frame = encode_answer(answer)
            if os.getpid() != pid:  # the task's code has forked, and the child has returned
                break
            flush_output()
            connection.sendall(frame)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _give_way() -> None:
    """Lets the engine's process go first where processors are busy. Linux weighs sessions (autogroups)
    against one another, and the processes of each among themselves, so both weights are lowered."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
        autogroup.write(str(NICENESS))


def answer_call(host: TaskHost, call: MethodCall) -> MethodAnswer:
    try:
        return MethodValue(call.number, host.answer_call(call.method, call.arguments))
    # The task's code may raise `SystemExit`, `KeyboardInterrupt` and `MemoryError` too.
    except BaseException as error:
        return _describe_failure(call.number, error)


def encode_answer(answer: MethodAnswer) -> bytes:
    """Returns the frame of the answer, or of the error that keeps it from being encoded."""
    try:
        return encode_frame(answer)
    except (ValueError, TypeError, OverflowError, MemoryError, msgspec.MsgspecError) as error:
        return encode_frame(_describe_failure(answer.number, error))


def _describe_failure(number: int, error: BaseException) -> MethodError:
    try:
        detail = "".join(traceback.format_exception(error))[-MAX_DETAIL:]
    except BaseException as another:
        detail = f"the traceback cannot be shown: {type(another).__name__}"
    try:
        text = describe_error(error)
    except BaseException:
        text = f"{type(error).__name__} (its text cannot be shown)"
    return MethodError(number, text, keep_text(detail), isinstance(error, MemoryError))


def _reseed_generators() -> None:
    """Gives this process random numbers of its own. Python does so for `random` itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4)))
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
