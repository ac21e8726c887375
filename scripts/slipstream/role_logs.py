"""The log file of a role: all that its process prints, why it ended, and its threads' stacks on request.

    kill -USR1 PID    prints the Python stacks of all threads of a role into logs/ROLE.log (logs/driver.log)

The role goes on meanwhile. The signal is answered by compiled code (`faulthandler`), so a role that hangs
inside a library, or whose main thread never returns to Python, answers too.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from buffers.files import naming_full_disk

NUM_LAST_LINES = 30
"""Lines of a dead role's log that the driver shows."""
log = logging.getLogger("slipstream")
ray_log = logging.getLogger("slipstream.ray")
"""Takes what Ray would print on the driver's console."""


def log_into_file(path: Path) -> None:
    """Appends all that this process prints to the file, also what compiled code prints, and stacks on
    request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    log.info(describe_process())
    show_stacks_on_request(file)


def describe_process() -> str:
    """Returns the first line of each life in a log: it names the process that a signal would be sent to."""
    return f"process {os.getpid()} on {socket.gethostname()} begins"


def show_stacks_of_driver(logs: Path) -> None:
    """Makes the driver answer as the roles do. Its file is not the terminal, where a live view may stand.
    Ray's words go into it too. Raises DiskFull."""
    with naming_full_disk(logs / "driver.log"):
        logs.mkdir(parents=True, exist_ok=True)
        file = os.open(logs / "driver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{describe_process()}\n".encode())
    show_stacks_on_request(file)
    handler = logging.FileHandler(logs / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s Ray: %(message)s"))
    ray_log.handlers, ray_log.propagate = [handler], False
    ray_log.setLevel(logging.INFO)


def show_stacks_on_request(file: int) -> None:
    """Makes SIGUSR1 print the stacks of all threads into the file, which stays open.

    A handler that stands already is called afterwards. The default action is not: it would end the process.
    """
    is_handled = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=is_handled)


@contextlib.contextmanager
def log_what_ends_role() -> Iterator[None]:
    """Writes the traceback of an exception into the role's log too: the driver may show its message alone."""
    try:
        yield
    except ValueError as error:
        log.exception("this role ends")
        # The driver shows a ValueError as one sentence. It may not be able to import the class of this one.
        raise ValueError(str(error)) from None
    except Exception:
        log.exception("this role ends")
        raise


def read_log_end(name: str, logs: Path) -> str:
    """Returns the last lines of a role's log; empty where it has none."""
    path = logs / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return "".join(lines[-NUM_LAST_LINES:])
