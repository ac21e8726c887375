"""The pool of worker processes that run a task's code. Its methods are for one event loop.

take_worker() ─▶ an idle one, or one that comes back within 20 ms, or a new one, or wait for one
    └─▶ UserWorker.call(...), as often as one likes ─▶ return_worker()
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from generators.user_code.errors import TaskRefused, UserCodeError, WorkerDied
from generators.user_code.guard_link import GuardLink
from generators.user_code.output_pipe import OutputPipe
from generators.user_code.process_control import describe_status
from generators.user_code.process_orders import (
    KillTemplate,
    KillWorker,
    Notice,
    ProcessEnded,
    StartTemplate,
    StartWorker,
    TemplateEnded,
    TemplateFailed,
    TemplateStarted,
    WorkerNotStarted,
    WorkerStarted,
)
from generators.user_code.task_kinds import TaskKind
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import WorkerLimits, raise_descriptor_limit

log = logging.getLogger("slipstream.generator")

_PATIENCE_S = 0.02
"""Seconds that a call waits for a worker to come back before another one is forked."""
_FORK_S = 30.0
"""Seconds that the template may take to fork a worker, or to end."""
_MAX_FORKS = 8
"""Workers that are ordered at a time. More would fill the socket to the template."""


class TaskDescription(msgspec.Struct, frozen=True):
    """Facts about a task, from one of its workers."""

    kind: TaskKind
    name: str
    num_prompts: int | None
    has_group_scores: bool
    """True when it has `score_group`."""


@dataclass(slots=True)
class PoolCounts:
    """Counts since the pool was opened."""

    forks: int = 0
    """Workers that were started."""
    kills: int = 0
    """Workers that were killed: past a deadline, in a cancelled call, or beyond the limit of output."""
    deaths: int = 0
    """Workers that ended otherwise."""
    template_starts: int = 0
    """Times that the task was imported. Each one after the first is for a template that has died."""


class UserCodePool:
    """Holds at most `max_workers` workers of one task. A worker that has died is replaced when needed."""

    def __init__(self, target: str, args: Mapping[str, Any], limits: WorkerLimits) -> None:
        """`open` makes a pool that is ready."""
        self._target, self._args, self._limits = target, dict(args), limits
        self.counts = PoolCounts()
        self.description: TaskDescription
        self._link: GuardLink | None = None
        self._is_closed = False
        self._template: _Template | None = None
        """The newest template, which may have ended."""
        self._template_lock = asyncio.Lock()
        self._fork_slots = asyncio.Semaphore(_MAX_FORKS)
        self._refusal: TaskRefused | None = None
        """The error of the last attempt to start the template."""
        self._next_number = self._num_starting = 0
        self._forks: dict[int, tuple[asyncio.Future[str | None], UserWorker]] = {}
        """Workers that were ordered, by number. The future holds None once one is forked, or the error."""
        self._workers: dict[int, UserWorker] = {}
        """Workers that have not ended, by pid."""
        self._idle: list[UserWorker] = []
        self._waiting: deque[asyncio.Future[UserWorker | None]] = deque()
        """Calls of `take_worker` that wait for a worker, or with None for room to start one."""

    @classmethod
    async def open(cls, target: str, args: Mapping[str, Any], limits: WorkerLimits) -> "UserCodePool":
        """Starts the processes and imports the task.

        Raises TaskRefused, which names `task.name` or `task.args`, when it cannot be imported or made or
        lacks a method; ValueError when the host allows too few open files for `episodes.max_workers`.
        """
        raise_descriptor_limit(limits.max_workers)
        pool = cls(target, args, limits)
        try:
            worker = await pool.take_worker()
            pool.description = await _describe_task(worker, target, limits.start_timeout_s)
            pool.return_worker(worker)
        except BaseException:
            await pool.close()
            raise
        return pool

    @property
    def has_template(self) -> bool:
        """True as long as workers can be forked without importing the task again."""
        return self._template is not None and self._template.is_ready

    @property
    def num_workers(self) -> int:
        """Workers that have not ended, and those being started."""
        return len(self._workers) + self._num_starting

    async def take_worker(self) -> UserWorker:
        """Returns a worker for one caller alone, until `return_worker`.

        Waits as long as `max_workers` workers are taken. Raises UserCodeError when none can be started.
        """
        has_waited = False
        while True:
            if self._is_closed:
                raise UserCodeError("a worker must be taken from an open pool, got a closed one")
            if self._idle:
                return self._idle.pop()
            has_room = self.num_workers < self._limits.max_workers
            if has_room and (has_waited or self.num_workers == 0):
                return await self._start_worker()
            worker = await self._await_worker(_PATIENCE_S if has_room else None)
            if worker is not None:
                return worker
            has_waited = True

    def return_worker(self, worker: UserWorker) -> None:
        """Takes a worker back. One that is dead is forgotten; one in the middle of a call is killed."""
        if worker.is_busy:
            worker.begin_kill()
        elif worker.is_alive and not self._is_closed:
            if (waiting := self._pop_waiting()) is not None:
                waiting.set_result(worker)
            else:
                self._idle.append(worker)

    async def close(self) -> None:
        """Kills all processes, and waits until they are gone."""
        self._is_closed = True
        if self._link is not None:
            await self._link.close()
        while (waiting := self._pop_waiting()) is not None:
            waiting.set_result(None)

    async def _await_worker(self, timeout_s: float | None) -> UserWorker | None:
        """Returns a worker that comes back; None past the time, and when a worker has ended."""
        waiting: asyncio.Future[UserWorker | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait({waiting}, timeout=timeout_s)
        except asyncio.CancelledError:
            if waiting.done() and (worker := waiting.result()) is not None:
                self.return_worker(worker)
            elif waiting.done():
                self._wake_waiting()
            raise
        finally:
            waiting.cancel()
        return None if waiting.cancelled() else waiting.result()

    def _pop_waiting(self) -> "asyncio.Future[UserWorker | None] | None":
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                return waiting
        return None

    def _wake_waiting(self) -> None:
        """Tells one that waits when there is room for another worker."""
        has_room = self.num_workers < self._limits.max_workers
        if has_room and (waiting := self._pop_waiting()) is not None:
            waiting.set_result(None)

    async def _start_worker(self) -> UserWorker:
        self._num_starting += 1
        try:
            async with self._fork_slots:
                link = await self._ensure_template()
                return await self._fork_worker(link)
        finally:
            self._num_starting -= 1
            self._wake_waiting()

    async def _fork_worker(self, link: GuardLink) -> UserWorker:
        connection, worker_end = socket.socketpair()
        output = OutputPipe(self._limits.output_mb << 20, lambda: worker.begin_kill())
        worker = UserWorker(connection, output, self._order_kill, self._limits)
        with worker_end:
            try:
                await worker.open_streams()
                if not link.is_open:
                    raise WorkerDied("a worker could not be started: the guard has ended")
            except BaseException:
                worker.mark_ended(None)
                raise
            forked: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._next_number += 1
            self._forks[self._next_number] = forked, worker
            order = StartWorker(number=self._next_number)
            link.send_order(order, [worker_end.fileno(), output.write_end])
        output.close_write_end()
        # When nobody waits for it any more, the worker is killed as soon as its pid is known.
        try:
            async with asyncio.timeout(_FORK_S):
                error = await forked
        except TimeoutError:
            self._kill_template()
            error = f"it must be forked within {_FORK_S:g} s, got no end"
        if error is not None:
            raise WorkerDied(f"a worker could not be started: {error}")
        self.counts.forks += 1
        return worker

    async def _ensure_template(self) -> GuardLink:
        """Starts the template, and the guard, where there is none. Those who have waited for an attempt that
        failed share its error, so that they do not wait for one after another."""
        num_starts = self.counts.template_starts
        async with self._template_lock:
            if self._is_closed:
                raise UserCodeError("a worker must be taken from an open pool, got a closed one")
            if not self.has_template:
                if self._refusal is not None and self.counts.template_starts > num_starts:
                    raise TaskRefused(str(self._refusal), self._refusal.detail)
                if self._link is None or not self._link.is_open:
                    self._link = await GuardLink.open(self._take_notice)
                try:
                    self._refusal = None
                    await self._start_template(self._link)
                except TaskRefused as refusal:
                    self._refusal = refusal
                    raise
            assert self._link is not None, "a template has a guard"
            return self._link

    async def _start_template(self, link: GuardLink) -> None:
        if self._template is not None:  # the guard holds one template at a time
            await asyncio.wait({self._template.ended}, timeout=_FORK_S)
        self.counts.template_starts += 1
        limits = self._limits
        self._template = template = _Template(OutputPipe(limits.output_mb << 20, self._kill_template))
        try:
            link.send_order(
                StartTemplate(target=self._target, args=self._args, memory_mb=limits.memory_mb),
                [template.output.write_end],
            )
            template.output.close_write_end()
            async with asyncio.timeout(limits.start_timeout_s):
                refusal = await asyncio.shield(template.imported)
        except TimeoutError:
            self._kill_template()
            raise TaskRefused(
                f"task.name must name a class that is imported and made within {limits.start_timeout_s:g} s "
                f"(episodes.start_timeout_s), got no end for {self._target!r}",
                template.output.show_end(),
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            template.mark_ended()
            raise TaskRefused(f"task.args must be of JSON's types and small, got {error}") from error
        except BaseException:
            self._kill_template()
            raise
        if refusal is not None:
            raise refusal

    def _take_notice(self, notice: Notice | None) -> None:
        """Takes a message of the guard, or None when the guard is gone, and everything with it."""
        match notice:
            case TemplateStarted():
                self._settle_import(None)
            case TemplateFailed(error=error, detail=detail):
                self._settle_import(TaskRefused(error, detail))
            case TemplateEnded(status=status):
                self._lose_template(describe_status(status))
            case WorkerStarted(number=number, pid=pid):
                forked, worker = self._forks.pop(number)
                worker.pid = pid
                self._workers[pid] = worker
                if forked.done():  # nobody waits for it any more
                    worker.begin_kill()
                elif not worker.is_alive:
                    self._send_kill(pid)
                else:
                    forked.set_result(None)
            case WorkerNotStarted(number=number, error=error):
                self._forget_fork(number, error)
            case ProcessEnded(pid=pid, status=status):
                self._forget_worker(self._workers.pop(pid), status)
            case None:
                self._lose_template("has ended with its guard")
                for number in list(self._forks):
                    self._forget_fork(number, "the guard has ended")
                for pid in list(self._workers):
                    self._forget_worker(self._workers.pop(pid), None)

    def _settle_import(self, refusal: TaskRefused | None) -> None:
        assert self._template is not None, "the message is the template's"
        if not self._template.imported.done():
            if refusal is not None:
                refusal.detail = f"{refusal.detail}\n{self._template.output.show_end()}".strip()
            self._template.imported.set_result(refusal)
            self._template.is_ready = refusal is None

    def _lose_template(self, how: str) -> None:
        if (template := self._template) is None or template.ended.done():
            return
        was_ready = template.is_ready
        template.mark_ended()
        what = f"its process {how}"
        if template.output.is_beyond_limit:
            what = f"it printed more than {self._limits.output_mb} MB (episodes.worker_output_mb)"
        self._settle_import(
            TaskRefused(f"task.name must name a class that can be imported, got {self._target!r}: {what}")
        )
        if was_ready and not self._is_closed:
            log.error(
                "the process that holds task %s %s; it is started again. %s",
                self._target, how, template.output.show_end(),
            )  # fmt: skip

    def _kill_template(self) -> None:
        if self._template is not None and self._link is not None:
            self._template.is_ready = False
            self._link.send_order(KillTemplate())

    def _forget_fork(self, number: int, error: str) -> None:
        """Forgets a worker that has not been started."""
        forked, worker = self._forks.pop(number)
        worker.mark_ended(None)
        if not forked.done():
            forked.set_result(error)
        self._wake_waiting()

    def _forget_worker(self, worker: UserWorker, status: int | None) -> None:
        self.counts.deaths += worker.is_alive
        worker.mark_ended(status)
        if worker in self._idle:
            self._idle.remove(worker)
        self._wake_waiting()

    def _order_kill(self, worker: UserWorker) -> None:
        self.counts.kills += 1
        if worker in self._idle:
            self._idle.remove(worker)
        if worker.pid is not None:
            self._send_kill(worker.pid)

    def _send_kill(self, pid: int) -> None:
        if self._link is not None:
            self._link.send_order(KillWorker(pid=pid))


async def _describe_task(worker: UserWorker, target: str, timeout_s: float) -> TaskDescription:
    try:
        facts = await worker.call("describe", [], timeout_s, "episodes.start_timeout_s")
        return msgspec.convert(facts, TaskDescription)
    except msgspec.ValidationError as error:
        raise TaskRefused(
            f"task.name must name a class that describes itself, got {target!r}: {error}"
        ) from error
    except UserCodeError as error:
        _, found, sentence = str(error).partition("UnsuitableTask: ")
        if not found:
            sentence = f"task.name must name a class that can be made and closed, got {target!r}: {error}"
        raise TaskRefused(sentence, error.detail) from error


class _Template:
    """The template process as the pool sees it."""

    def __init__(self, output: OutputPipe) -> None:
        self.output = output
        loop = asyncio.get_running_loop()
        self.imported: asyncio.Future[TaskRefused | None] = loop.create_future()
        """None when the task is imported."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self.is_ready = False
        """True as long as it can fork workers."""

    def mark_ended(self) -> None:
        self.is_ready = False
        if not self.ended.done():
            self.ended.set_result(None)
            self.output.close()
