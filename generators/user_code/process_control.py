"""Linux's means of keeping hold of processes: subreapers, death signals, and lists of children."""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

PATIENCE = 3
"""Rounds in which orphans are only killed. After those they are stopped first, whoever is below them too."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)


def stop_reaping() -> None:
    """Undoes `become_subreaper`."""
    _control_process(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Sets the name that `ps -o comm` and `top` show, of at most 15 characters."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _control_process(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def list_children() -> list[int]:
    """Returns the children of this thread's process, those that have ended and are not reaped included."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return find_children()


def count_children() -> int:
    """Returns the number of this process's children, whichever of its threads has started them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    try:
        return len(_read_children(os.getpid()))
    except (FileNotFoundError, ProcessLookupError):
        return len(find_children())


def find_children() -> list[int]:
    """Returns the children of this process, from all processes of the host."""
    own = os.getpid()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _read_parent(pid) == own]


def stop_descendants(children: Iterable[int]) -> None:
    """Stops children that have not been reaped and all below them, until none is found that goes on.

    A process that is killed makes room for another, and one that is stopped does not. So code that forks as
    fast as it is killed comes to an end too.
    """
    stopped = set[int]()
    while running := _find_below(children) - stopped:
        for pid in running:
            _stop_process(pid, running | stopped | {os.getpid()})
        stopped |= running


def _find_below(children: Iterable[int]) -> set[int]:
    found, new = set[int](), set(children)
    while new:
        found |= new
        below = set[int]()
        for pid in new:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                below.update(_read_children(pid))
        new = below - found
    return found


def _read_children(pid: int) -> list[int]:
    """Raises FileNotFoundError or ProcessLookupError for a process, or one of its threads, that has just
    ended, and on a kernel without CONFIG_PROC_CHILDREN."""
    threads = os.listdir(f"/proc/{pid}/task")
    lists = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    return [int(word) for one in lists for word in one.split()]


def _stop_process(pid: int, parents: set[int]) -> None:
    """Stops a process if its parent is one of `parents`. Another process may have its number by now."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _read_parent(pid) in parents:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(process)


def _read_parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in parentheses, may hold anything; its parent comes after it.
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def kill_child(pid: int) -> None:
    """Kills a child that has not been reaped, and with it the process group that it leads.

    The number of a process that has not been reaped is given to no other process.
    """
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def kill_all_children() -> None:
    """Kills and reaps until no child is left, those that become children meanwhile included."""
    for num_rounds in itertools.count():
        children = list_children()
        if num_rounds > PATIENCE:
            stop_descendants(children)
        for pid in children:
            kill_child(pid)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def describe_status(status: int) -> str:
    """Says how a process has ended."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
