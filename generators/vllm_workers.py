"""The worker processes of an engine of several GPUs, one a GPU.

The engine's core schedules in the generator's process; each worker computes its part of every layer. vLLM's
executor talks with them through shared memory. Workers hold nothing that must be saved, so they are killed
when the engine ends, and all of them when one has died. They end by themselves when the engine's process has
(`sync.vllm_ranks`). Written against vLLM 0.32.
"""

import atexit
import contextlib
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from generators.engine import EngineDied
from generators.worker_names import WorkerNames
from sync.rank_answers import read_answers
from sync.rank_errors import NAMES_VARIABLE, RankErrors

TOLD_S = 2.0
"""Seconds in which the death of a worker is noticed, after another error that it may have caused."""
ENDED_S = 0.5
"""Seconds in which a worker that was killed has ended, after it has closed its connections."""
UPDATE_S = 600.0
"""Seconds that the ranks may take to answer a question of ours, the longest of which is to take up a
version. vLLM has a limit of its own for a step."""


class WorkerProcesses(MultiprocExecutor):
    """vLLM's executor, with an end of its own."""

    death = ""
    """The sentence about the worker that has died first, or about workers that do not answer."""
    was_killed = False
    """True when that worker has not ended by itself."""

    def _init_executor(self) -> None:
        self._died = threading.Event()
        # Before multiprocessing waits for its children at the end of this process.
        atexit.register(_shut_down, weakref.ref(self))
        self._names = WorkerNames()
        self._errors = RankErrors(self._names.folder)
        inherited = {
            NAMES_VARIABLE: str(self._names.folder),
            # All ranks are on this host, whatever its name leads to.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            # Ray sets it by the processors of the whole engine.
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
        before, environment = tempfile.tempdir, dict(os.environ)
        tempfile.tempdir = str(self._names.folder)
        os.environ |= inherited
        try:
            super()._init_executor()
        except BaseException as error:
            self._names.remove()
            if isinstance(error, Exception) and (cause := self._find_cause()):
                raise cause from error
            raise
        finally:
            tempfile.tempdir = before
            for name in inherited:
                os.environ.pop(name)
                os.environ |= {name: environment[name]} if name in environment else {}

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watches the workers, in a thread: when one dies, the others are killed, and whoever waits for an
        answer hears of it."""
        workers, this = list(self.workers), weakref.ref(self)

        def watch_workers() -> None:
            dead = multiprocessing.connection.wait([worker.proc.sentinel for worker in workers])
            executor = this()
            if executor is None or getattr(executor, "shutting_down", False):
                return
            ended = [worker for worker in workers if worker.proc.sentinel in dead]
            for worker in ended:
                worker.proc.join()
            # Others may have ended by now because of one that was killed.
            worker = min(ended, key=lambda one: (one.proc.exitcode or 0) >= 0)
            # Before the others are killed: what they hold of their GPUs may take long to be freed.
            executor._note_death(worker.rank, worker.proc)
            executor.is_failed = True
            executor.shutdown()
            executor._died.set()

        threading.Thread(target=watch_workers, daemon=True, name="worker-watch").start()

    def _ensure_worker_termination(self, worker_procs: list[BaseProcess]) -> None:
        """Kills the workers, by rank. Where their start has failed, it notes first who was killed by
        others."""
        if not getattr(self, "shutting_down", False):
            ended = multiprocessing.connection.wait([one.sentinel for one in worker_procs], ENDED_S)
            for process in worker_procs:
                # Its files are closed a moment before its exit status is there.
                process.join(ENDED_S if process.sentinel in ended else 0)
            killed = [rank for rank, process in enumerate(worker_procs) if (process.exitcode or 0) < 0]
            if killed:
                self._note_death(killed[0], worker_procs[killed[0]])
        for process in worker_procs:
            process.kill()
        for process in worker_procs:
            process.join()

    def _note_death(self, rank: int, process: BaseProcess) -> None:
        """Notes the worker that has died first."""
        if not self.death:
            self.was_killed = (process.exitcode or 0) < 0
            self.death = describe_death(rank, process)

    def _find_cause(self) -> Exception | None:
        """Returns the error that explains any other: a worker was killed, or one has met an error, or has
        ended all the same. None where nothing has happened to any."""
        if not self.was_killed and (first := self._errors.read_first()) is not None:
            return first.make_error()
        return EngineDied(self.death) if self.death else None

    def shutdown(self) -> None:
        super().shutdown()
        self._names.remove()

    def forget_names(self) -> None:
        """Removes the names of what the processes share. Call it when all of them have used it."""
        assert self.rpc_broadcast_mq is not None
        self.ask_ranks("forget_names")
        for queue in (self.rpc_broadcast_mq, *self.response_mqs):
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False
        self._names.remove()

    def collective_rpc(self, *arguments: Any, **named: Any) -> Any:
        """Raises EngineDied besides what vLLM raises."""
        with self.naming_dead():
            return super().collective_rpc(*arguments, **named)

    def ask_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `sync.vllm_ranks.RankSync` on every rank, and returns the values by rank. Raises
        the gravest error that any rank has met, with its rank, and EngineDied when one does not answer."""
        answers = self.collective_rpc("answer", timeout=UPDATE_S, args=(method, *arguments))
        return read_answers(answers)

    @contextlib.contextmanager
    def naming_dead(self) -> Iterator[None]:
        """Raises EngineDied in the place of an error that the death of a worker has caused, or its silence:
        the workers are killed then. Where a worker has met an error before, it raises that."""
        try:
            yield
        except EngineDied:
            raise
        except TimeoutError as error:
            pids = " and ".join(str(worker.proc.pid) for worker in self.workers)
            self.death = self.death or f"the worker processes of the engine (pids {pids}) hang: {error}"
            self.is_failed = True
            self.shutdown()
            self._died.set()
            raise EngineDied(self.death) from error
        except Exception as error:
            self._died.wait(TOLD_S)
            if cause := self._find_cause():
                raise cause from error
            raise


def _shut_down(executor: "weakref.ref[WorkerProcesses]") -> None:
    if (found := executor()) is not None:
        found.shutdown()


def describe_death(rank: int, process: BaseProcess) -> str:
    return (
        f"the worker process of rank {rank} of the engine (pid {process.pid}) has died: "
        f"{describe_exit(process.exitcode)}"
    )


def describe_exit(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
