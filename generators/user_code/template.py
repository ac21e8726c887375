"""The template process: it imports the task once, and forks the workers that run the task's code.

StartTemplate ─▶ limits ─▶ import ─▶ TemplateStarted ─▶ StartWorker ─▶ fork ─▶ fork ─▶ worker
                             └─▶ TemplateFailed            WorkerStarted ◀─ pid ─┘ └─▶ ends, so that the
                                                                            guard is the worker's parent
"""

import contextlib
import gc
import os
import resource
import socket
import traceback
from typing import NoReturn

from generators.plain_values import describe_error, keep_text
from generators.user_code.own_process import begin_process, flush_output, move_descriptors
from generators.user_code.process_control import stop_reaping
from generators.user_code.process_orders import (
    StartTemplate,
    StartWorker,
    TemplateFailed,
    TemplateStarted,
    WorkerNotStarted,
    WorkerStarted,
    receive_order,
    send_order,
)
from generators.user_code.task_host import TaskHost, UnsuitableTask
from generators.user_code.worker_process import run_worker

MAX_DETAIL = 4000
"""Characters of a sentence, and of a traceback."""
_OOM_SCORE = 500
"""Makes the kernel take the task's processes before the generator when memory runs out."""


def run_template(link: socket.socket, order: StartTemplate, output: int, guard: int) -> NoReturn:
    """Imports the task, and forks a worker whenever the guard orders one. `output` receives what the task's
    code prints; `guard` is the guard's pid."""
    status = 1
    try:
        begin_process("slip-template", guard, output)
        _limit_process(order.memory_mb)
        host = _make_host(link, order)
        # Objects that exist now stay out of garbage collection, which would write to their memory and so end
        # its sharing.
        gc.collect()
        gc.freeze()
        while True:
            request, descriptors = receive_order(link)
            if not isinstance(request, StartWorker):
                break
            _start_worker(link, host, request, descriptors, guard)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit_process(memory_mb: int) -> None:
    limit = memory_mb << 20
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    # Not RLIMIT_AS: libraries and threads reserve addresses that they never use, by tens of gigabytes.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))


def _make_host(link: socket.socket, order: StartTemplate) -> TaskHost:
    try:
        host = TaskHost(order.target, order.args)
    # The task's code may raise anything, `SystemExit` too.
    except BaseException as error:
        sentence = f"task.name must name a class that can be imported, got {order.target!r}: "
        sentence = str(error) if isinstance(error, UnsuitableTask) else sentence + describe_error(error)
        detail = "".join(traceback.format_exception(error))[-MAX_DETAIL:]
        send_order(link, TemplateFailed(error=keep_text(sentence[:MAX_DETAIL]), detail=keep_text(detail)))
        os._exit(1)
    send_order(link, TemplateStarted())
    return host


def _start_worker(
    link: socket.socket, host: TaskHost, request: StartWorker, descriptors: list[int], guard: int
) -> None:
    """Forks twice. The process in between ends at once, so the worker becomes the guard's child."""
    stop_reaping()  # the task's module may have asked for orphans
    connection, output = move_descriptors(descriptors)
    flush_output()
    told, tells = os.pipe()
    try:
        if (between := os.fork()) == 0:
            link.close()
            os.close(told)
            _fork_worker(tells, socket.socket(fileno=connection), host, output, guard)
        os.close(tells)
        pid = os.read(told, 20)
        _reap_child(between)
        if not pid:
            raise ChildProcessError("it could not be forked")
        send_order(link, WorkerStarted(number=request.number, pid=int(pid)))
    except OSError as error:
        send_order(link, WorkerNotStarted(number=request.number, error=describe_error(error)))
    finally:
        for descriptor in (told, connection, output):
            os.close(descriptor)


def _fork_worker(tells: int, connection: socket.socket, host: TaskHost, output: int, guard: int) -> NoReturn:
    """Forks the worker, writes its pid to `tells`, and ends."""
    try:
        if (pid := os.fork()) == 0:
            os.close(tells)
            run_worker(connection, output, host, guard)
        os.write(tells, str(pid).encode())
    finally:
        os._exit(0)


def _reap_child(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # the task's module has told the kernel to reap
        os.waitpid(pid, 0)
