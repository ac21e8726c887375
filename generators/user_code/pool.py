"""The pool of worker processes that run a task's code.

    take_worker() ─▶ an idle one, or one that comes back within 20 ms, or a new one, or wait for one
        └─▶ UserWorker.call(...), as often as one likes ─▶ return_worker()

Its methods are for one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from generators.user_code.errors import TaskRefused, UserCodeError
from generators.user_code.process_tree import ProcessCounts, ProcessTree
from generators.user_code.task_kinds import TaskKind
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import WorkerLimits, raise_descriptor_limit

_PATIENCE_S = 0.02
"""Seconds that a call waits for a worker to come back before another one is forked."""


class TaskDescription(msgspec.Struct, frozen=True):
    """Facts about a task, from one of its workers."""

    kind: TaskKind
    name: str
    num_prompts: int | None
    max_scores: Annotated[int, msgspec.Meta(ge=1)] | None
    """Calls of `score_response`, `step` or `score_group` that may be under way at a time."""
    has_group_scores: bool
    """True when it has `score_group`."""
    needs_tokens: bool
    """True when `score_group` reads the tokens of the replies."""


class UserCodePool:
    """Holds at most `max_workers` workers of one task. A worker that has died is replaced when needed."""

    def __init__(self, target: str, args: Mapping[str, Any], limits: WorkerLimits) -> None:
        """`open` makes a pool that is ready."""
        self._max_workers = limits.max_workers
        self._tree = ProcessTree(target, args, limits, self._lose_worker)
        self.description: TaskDescription
        self._is_closed = False
        self._num_starting = 0
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
        return self._tree.has_template

    @property
    def counts(self) -> ProcessCounts:
        return self._tree.counts

    @property
    def num_workers(self) -> int:
        """Workers that have not ended, and those being started."""
        return self._tree.num_workers + self._num_starting

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
            has_room = self.num_workers < self._max_workers
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
        await self._tree.close()
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
        has_room = self.num_workers < self._max_workers
        if has_room and (waiting := self._pop_waiting()) is not None:
            waiting.set_result(None)

    async def _start_worker(self) -> UserWorker:
        self._num_starting += 1
        try:
            return await self._tree.start_worker()
        finally:
            self._num_starting -= 1
            self._wake_waiting()

    def _lose_worker(self, worker: UserWorker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        self._wake_waiting()


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
