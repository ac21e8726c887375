"""The processes of a task's code as the generator sees them: a guard, a template, and workers.

    start_worker() ─▶ guard (GuardLink.open) ─▶ template (StartTemplate) ─▶ worker (StartWorker)
                      each is started when it is not there, and again when it has ended

For one event loop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import WorkerLimits

log = logging.getLogger("slipstream.generator")

_FORK_S = 30.0
"""Seconds that the template may take to fork a worker, or to end."""
_MAX_ATTEMPTS = 3
"""Templates that may end before a worker is given up."""
_MAX_FORKS = 8
"""Workers that are ordered at a time. More would fill the socket to the template."""

_CLOSED = "a worker must be started in an open pool, got a closed one"


class LostTemplate(WorkerDied):
    """A worker was not started because the template had ended. Another template can start it."""


@dataclass(slots=True)
class ProcessCounts:
    """Counts since the first process was started."""

    forks: int = 0
    """Workers that were started."""
    kills: int = 0
    """Workers that were killed: past a deadline, in a cancelled call, or beyond a limit."""
    deaths: int = 0
    """Workers that ended otherwise."""
    template_starts: int = 0
    """Times that the task was imported. Each one after the first is for a template that has ended."""


class ProcessTree:
    """Starts workers and kills them. Holds those that have not ended."""

    def __init__(
        self,
        target: str,
        args: Mapping[str, Any],
        limits: WorkerLimits,
        lose_worker: Callable[[UserWorker], None],
    ) -> None:
        """`target` and `args` are `task.name` and `task.args`. `lose_worker` is called with a worker that
        may not be called any more, and again when it has ended."""
        self._target, self._args, self._limits = target, dict(args), limits
        self._lose_worker = lose_worker
        self.counts = ProcessCounts()
        self._is_closed = False
        self._link: GuardLink | None = None
        self._template: TemplateProcess | None = None
        """The newest template, which may have ended."""
        self._template_lock = asyncio.Lock()
        self._refusal: TaskRefused | None = None
        """The error of the last attempt to start the template."""
        self._fork_slots = asyncio.Semaphore(_MAX_FORKS)
        self._next_number = 0
        self._forks: dict[int, tuple[asyncio.Future[str | None], UserWorker]] = {}
        """Workers that were ordered, by number. The future holds None once one is forked, or the error."""
        self._workers: dict[int, UserWorker] = {}
        """Workers that have not ended, by pid."""

    @property
    def num_workers(self) -> int:
        """Workers that have not ended."""
        return len(self._workers)

    @property
    def has_template(self) -> bool:
        """True as long as workers can be forked without importing the task again."""
        return self._template is not None and self._template.is_ready

    async def start_worker(self) -> UserWorker:
        """Raises TaskRefused when the task cannot be imported (again), and UserCodeError for all else."""
        async with self._fork_slots:
            for _ in range(_MAX_ATTEMPTS - 1):
                with contextlib.suppress(LostTemplate):
                    return await self._fork_worker(await self._ensure_template())
            return await self._fork_worker(await self._ensure_template())

    async def close(self) -> None:
        """Kills all processes, and waits until they are gone."""
        self._is_closed = True
        if self._link is not None:
            await self._link.close()

    async def _fork_worker(self, link: GuardLink) -> UserWorker:
        connection, worker_end = socket.socketpair()
        output = OutputPipe(self._limits.output_mb << 20, lambda: worker.begin_kill())
        worker = UserWorker(connection, output, self._order_kill, self._limits)
        with worker_end:
            try:
                await worker.open_streams()
                if not link.is_open:
                    raise LostTemplate("a worker could not be started: the guard has ended")
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
        except asyncio.CancelledError:
            if worker.pid is not None:  # it was forked at the very moment
                worker.begin_kill()
            raise
        except TimeoutError:
            self._kill_template()
            raise WorkerDied(
                f"a worker could not be started: it must be forked within {_FORK_S:g} s, got no end"
            ) from None
        if error is not None:
            kind = WorkerDied if self.has_template else LostTemplate
            raise kind(f"a worker could not be started: {error}")
        return worker

    async def _ensure_template(self) -> GuardLink:
        """Starts the template, and the guard, where there is none. Those who have waited for an attempt that
        failed share its error, so that they do not wait for one after another."""
        num_starts = self.counts.template_starts
        async with self._template_lock:
            if self._is_closed:
                raise UserCodeError(_CLOSED)
            if not self.has_template:
                if self._refusal is not None and self.counts.template_starts > num_starts:
                    raise TaskRefused(str(self._refusal), self._refusal.detail)
                if self._link is None or not self._link.is_open:
                    self._link = await self._open_link()
                try:
                    self._refusal = None
                    await self._start_template(self._link)
                except TaskRefused as refusal:
                    self._refusal = refusal
                    raise
            assert self._link is not None, "a template has a guard"
            return self._link

    async def _open_link(self) -> GuardLink:
        link = await GuardLink.open(self._take_notice)
        if self._is_closed:
            await link.close()
            raise UserCodeError(_CLOSED)
        return link

    async def _start_template(self, link: GuardLink) -> None:
        if self._template is not None:  # the guard holds one template at a time
            await asyncio.wait({self._template.ended}, timeout=_FORK_S)
            if not self._template.ended.done():
                raise UserCodeError(f"the template must end within {_FORK_S:g} s, got no end")
        self.counts.template_starts += 1
        limits = self._limits
        self._template = template = TemplateProcess(OutputPipe(limits.output_mb << 20, self._kill_template))
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
                self.counts.forks += 1
                worker.pid = pid
                self._workers[pid] = worker
                if not forked.done():
                    forked.set_result(None)
                elif worker.is_alive:  # nobody waits for it any more
                    worker.begin_kill()
                if not worker.is_alive:
                    self._send_kill(pid)
            case WorkerNotStarted(number=number, error=error, needs_template=needs_template):
                if needs_template and self._template is not None:
                    self._template.is_ready = False
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
        was_imported = template.imported.done() and template.imported.result() is None
        template.mark_ended()
        what = f"its process {how}"
        if template.output.is_beyond_limit:
            what = f"it printed more than {self._limits.output_mb} MB (episodes.worker_output_mb)"
        self._settle_import(
            TaskRefused(f"task.name must name a class that can be imported, got {self._target!r}: {what}")
        )
        if was_imported and not self._is_closed:
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

    def _forget_worker(self, worker: UserWorker, status: int | None) -> None:
        self.counts.deaths += worker.is_alive
        worker.mark_ended(status)
        self._lose_worker(worker)

    def _order_kill(self, worker: UserWorker) -> None:
        self.counts.kills += 1
        self._lose_worker(worker)
        if worker.pid is not None:
            self._send_kill(worker.pid)

    def _send_kill(self, pid: int) -> None:
        if self._link is not None:
            self._link.send_order(KillWorker(pid=pid))


class TemplateProcess:
    """The template process as the generator sees it."""

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
