"""Processes for Ray's workers, forked from ones that have imported already what the workers need. Importing
torch and vLLM takes longer than all the rest of a start, so it happens once a run, and beside the start of
Ray.

    driver ──▶ stage `buffer` ──fork──▶ stage `learner` ──fork──▶ stage `generator`
                   │ forks              + torch │ forks            + vLLM │ forks
    raylet ──▶ newborn.py asks the stage of its role for a worker, and ends when the worker does

A stage has one thread, for a fork copies no other: one that has more after its imports ends. `newborn.py`
starts Ray's own worker where no stage answers, so the nursery makes a run start faster, and decides nothing
else.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FOLDER = "SLIPSTREAM_NURSERY"
"""Environment variable with the folder of the sockets on which the stages listen."""

LINGER_S = 3.0
"""Seconds after its raylet's end in which a role ends by itself, in good order (`roles.end_with_driver`)."""
HARMLESS = {"jemalloc_bg_thd"}
"""Names of threads whose libraries survive a fork."""


class Stage(NamedTuple):
    ahead: Sequence[str]
    """Modules to import at once."""
    asked: Sequence[str]
    """Modules to import when the first worker is asked for: Ray reads the environment that the raylet gives
    to workers when it is imported."""


@contextmanager
def run_nursery(stages: Mapping[str, Stage]) -> Iterator[None]:
    """Forks workers from the stages while the block lasts. Each stage has the modules of those before it
    too."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        listeners = {stage: socket.socket(socket.AF_UNIX) for stage in stages}
        for stage, listener in listeners.items():
            listener.bind(f"{folder}/{stage}")
            listener.listen()
        plan = [(listeners[name].fileno(), *stage) for name, stage in stages.items()]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.nursery", json.dumps(plan)],
            stdin=subprocess.PIPE,  # it ends with the driver
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno() for listener in listeners.values()],
            start_new_session=True,  # Ctrl-C is for the driver
            env={"OMP_NUM_THREADS": "1", **os.environ},  # as Ray sets it for actors with one processor
        )
        for listener in listeners.values():
            listener.close()
        outer = os.environ.get(FOLDER)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]
            if outer is not None:
                os.environ[FOLDER] = outer
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def serve_workers(plan: Sequence[tuple[int, Sequence[str], Sequence[str]]], start: Mapping[str, str]) -> str:
    """Imports, and forks workers for whoever asks, until the driver has ended. Returns in a worker: the
    script to run.

    `plan`: of each stage the socket's number, and the modules. `start`: the environment before any import.
    """
    (number, ahead, asked_for), *later = plan
    listener = socket.socket(fileno=number)
    import_all(ahead)
    if later and os.fork() == 0:
        listener.close()
        return serve_workers(later, start)
    for other, *_ in later:
        os.close(other)
    is_first, by_imports = True, find_changes(start)
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while message and not message.endswith(b"\n") and (more := connection.recv(1 << 16)):
            message += more
        if message.endswith(b"\n"):
            asked = json.loads(message)
            if is_first:
                replace_environment(asked["environment"] | by_imports)
                import_all(asked_for)
                is_first, by_imports = False, find_changes(asked["environment"])
            if os.fork() == 0:
                listener.close()
                os.setpgid(0, 0)  # a raylet ends a worker that has died with all of its group
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                replace_environment(asked["environment"] | by_imports)
                os.chdir(asked["folder"])
                sys.argv = asked["arguments"]
                connection.sendall(str(os.getpid()).encode())
                connection.detach()  # it closes with this process
                end_with_raylet()
                return str(sys.argv[0])
        for file in files:
            os.close(file)
        connection.close()


def end_with_raylet() -> None:
    """Ends this process some seconds after the raylet that has asked for it, whatever it does then. One that
    is not a role yet would look for its raylet for a minute."""
    if (pid := os.environ.get("RAY_RAYLET_PID")) is None:
        return
    try:
        raylet = os.pidfd_open(int(pid))
    except ProcessLookupError:
        os._exit(1)

    def wait_for_end() -> None:
        select.select([raylet], [], [])
        time.sleep(LINGER_S)
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True, name="raylet-watch").start()


def import_all(modules: Sequence[str]) -> None:
    """Imports the modules. Ends the process where they start threads, which a fork would lack."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # no collection of a worker looks at these objects, or copies their pages
    threads = {
        Path(f"/proc/self/task/{thread}/comm").read_text().strip()
        for thread in os.listdir("/proc/self/task")[1:]
    }
    if not threads <= HARMLESS:
        print(f"{modules[-1]} starts threads {threads}: each worker imports for itself", file=sys.stderr)
        os._exit(1)


def find_changes(before: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for the workers
    script = serve_workers(json.loads(sys.argv[1]), dict(os.environ))
    runpy.run_path(script, run_name="__main__")
