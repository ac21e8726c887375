"""The guard process: it starts the template, kills and reaps workers, and lets none outlive the generator.

    a worker ends ──▶ its process group is killed ──▶ its other descendants become the guard's children
                                                        └──▶ killed, and their children in turn
    the generator ends, or closes its socket ──▶ everything is killed ──▶ the guard ends

Each child of the guard is the template, a worker, or an orphan that one of them has left. Orphans are killed.
A pid that the guard signals is always that of a child it has not reaped, so it is never another process's.
The guard's parent, the keeper, does nothing but kill what is left when something kills the guard itself.
"""

import os
import selectors
import signal
import socket
import struct

from generators.user_code.own_process import GUARD_IGNORES
from generators.user_code.process_control import (
    PATIENCE,
    become_subreaper,
    kill_all_children,
    kill_child,
    list_children,
    name_process,
    stop_descendants,
)
from generators.user_code.process_orders import (
    GuardStarted,
    KillTemplate,
    KillWorker,
    Notice,
    Order,
    ProcessEnded,
    StartTemplate,
    StartWorker,
    TemplateEnded,
    WorkerNotStarted,
    WorkerStarted,
    receive_order,
    send_order,
)
from generators.user_code.template import run_template


class Guard:
    def __init__(self, control: socket.socket) -> None:
        """`control` is the socket to the generator, whose process made it."""
        self._control = control
        self._workers: set[int] = set()
        self._template: int | None = None
        self._template_link: socket.socket | None = None
        self._starting: set[int] = set()
        """Numbers of the workers that the template is to start. A child that nobody knows may be one of
        them, so orphans are not killed until the template has answered."""
        self._ended: list[Notice] = []
        """Ends that are told when no orphan is left."""
        self._num_rounds = 0
        """Rounds in a row after which orphans were left."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, "control")
        if (generator := _watch_peer(control)) is not None:
            self._selector.register(generator, selectors.EVENT_READ, "generator")
        self._wakeup, wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup.setblocking(False)
        self._inherited = [control, self._wakeup, wakeup]
        self._selector.register(self._wakeup, selectors.EVENT_READ, "child")
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in GUARD_IGNORES:
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> None:
        """Serves the generator until it is gone, or has closed the socket; then kills everything."""
        try:
            send_order(self._control, GuardStarted(pid=os.getpid()))
            while self._serve_once():
                pass
        except ConnectionError:
            pass
        finally:
            kill_all_children()

    def _serve_once(self) -> bool:
        """Waits for one round of events. Returns False when the generator is gone."""
        sources = {key.data for key, _ in self._selector.select()}
        if "generator" in sources:
            return False
        if "child" in sources:
            self._wakeup.recv(1 << 16)
        if "template" in sources:
            self._take_answers()
        if "control" in sources:
            order, descriptors = receive_order(self._control)
            try:
                if order is None:
                    return False
                self._obey_order(order, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._reap_children()
        return True

    def _obey_order(self, order: Order | Notice, descriptors: list[int]) -> None:
        match order:
            case StartTemplate():
                self._start_template(order, descriptors)
            case KillTemplate():
                if self._template is not None:
                    kill_child(self._template)
            case StartWorker(number=number):
                self._start_worker(order, number, descriptors)
            case KillWorker(pid=pid):
                if pid in self._workers:
                    kill_child(pid)

    def _start_template(self, order: StartTemplate, descriptors: list[int]) -> None:
        assert self._template is None, "there is one template at a time"
        link, template_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guard = os.getpid()
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for inherited in (*self._inherited, link):
                inherited.close()
            run_template(template_link, order, descriptors[0], guard)
        template_link.close()
        link.setblocking(False)
        self._template, self._template_link = pid, link
        self._selector.register(link, selectors.EVENT_READ, "template")

    def _start_worker(self, order: StartWorker, number: int, descriptors: list[int]) -> None:
        try:
            if self._template_link is None:
                raise ConnectionError("there is no template")
            send_order(self._template_link, order, descriptors)
            self._starting.add(number)
        except BlockingIOError as error:
            send_order(self._control, WorkerNotStarted(number=number, error=str(error)))
        except ConnectionError as error:
            self._refuse_worker(number, str(error))

    def _refuse_worker(self, number: int, error: str) -> None:
        """Says that a worker needs another template."""
        send_order(self._control, WorkerNotStarted(number=number, error=error, needs_template=True))

    def _take_answers(self) -> None:
        """Takes all answers that the template has sent."""
        while self._template_link is not None:
            try:
                answer, _ = receive_order(self._template_link)
            except BlockingIOError:
                return
            except (ConnectionError, ValueError):
                answer = None
            if answer is None:
                self._forget_template_link()
                assert self._template is not None, "the link belongs to the template"
                kill_child(self._template)
                return
            if isinstance(answer, WorkerStarted | WorkerNotStarted):
                self._starting.discard(answer.number)
            if isinstance(answer, WorkerStarted):
                self._workers.add(answer.pid)
            send_order(self._control, answer)

    def _forget_template_link(self) -> None:
        """Closes the socket to a template that is gone, or about to be: it starts no more workers."""
        if self._template_link is not None:
            self._selector.unregister(self._template_link)
            self._template_link.close()
            self._template_link = None
        for number in self._starting:
            self._refuse_worker(number, "the template has ended")
        self._starting.clear()

    def _reap_children(self) -> None:
        """Reaps what has ended, kills orphans, and tells the generator of ends when no orphan is left."""
        while True:
            num_reaped = num_orphans = 0
            if self._num_rounds > PATIENCE and not self._starting:
                known = {self._template, *self._workers}
                stop_descendants([pid for pid in list_children() if pid not in known])
            for pid in list_children():
                if pid in self._workers or pid == self._template:
                    num_reaped += self._reap_if_ended(pid)
                elif self._starting:
                    num_orphans += 1
                else:
                    kill_child(pid)
                    was_reaped = os.waitpid(pid, os.WNOHANG)[0] == pid
                    num_reaped += was_reaped
                    num_orphans += not was_reaped
            self._num_rounds = self._num_rounds + 1 if num_orphans else 0
            # The orphans of a process that has just ended may stand behind it in the list, or not yet in it.
            if not num_reaped:
                break
        if not num_orphans:
            for ended in self._ended:
                send_order(self._control, ended)
            self._ended.clear()

    def _reap_if_ended(self, pid: int) -> bool:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # Its group may have other members. Its number belongs to it until it is reaped.
        kill_child(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if pid == self._template:
            self._take_answers()
            self._forget_template_link()
            self._template = None
            self._ended.append(TemplateEnded(status=status))
        else:
            self._workers.discard(pid)
            self._ended.append(ProcessEnded(pid=pid, status=status))
        return True


def _watch_peer(control: socket.socket) -> int | None:
    """Returns a descriptor that is readable once the process that made the socket has ended.

    The socket alone does not tell: a child that the generator has forked may hold the other end open.
    """
    peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    try:
        return os.pidfd_open(struct.unpack("3i", peer)[0])
    except ProcessLookupError:  # it has ended, so the socket is closed
        return None


def main(control: int) -> None:
    """Runs the guard below a keeper, in a process that has just begun. `control` is the socket's
    descriptor."""
    become_subreaper()
    if (guard := os.fork()) != 0:
        os.close(control)
        keep_guard(guard)
        return
    name_process("slip-guard")
    become_subreaper()
    Guard(socket.socket(fileno=control)).run()


def keep_guard(guard: int) -> None:
    """Waits until the guard ends, and kills what it has left: everything, where something has killed it."""
    name_process("slip-keeper")
    for number in GUARD_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    os.waitpid(guard, 0)
    kill_all_children()
