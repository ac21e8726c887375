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

TOLD_S = 2.0
"""Seconds in which the death of a worker is noticed, after another error that it may have caused."""


class WorkerProcesses(MultiprocExecutor):
    """vLLM's executor, with an end of its own."""

    death = ""
    """The sentence about the worker that has died first."""

    def _init_executor(self) -> None:
        self._died = threading.Event()
        # Before multiprocessing waits for its children at the end of this process.
        atexit.register(_shut_down, weakref.ref(self))
        self._names = WorkerNames()
        inherited = {
            "VLLM_RPC_BASE_PATH": str(self._names.folder),
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
            worker = next(worker for worker in workers if worker.proc.sentinel in dead)
            worker.proc.join()
            executor.is_failed = True
            executor.death = (
                f"the worker process of rank {worker.rank} of the engine (pid {worker.proc.pid}) has died: "
                f"{describe_exit(worker.proc.exitcode)}"
            )
            executor.shutdown()
            executor._died.set()

        threading.Thread(target=watch_workers, daemon=True, name="worker-watch").start()

    @staticmethod
    def _ensure_worker_termination(worker_procs: list[BaseProcess]) -> None:
        for process in worker_procs:
            process.kill()
        for process in worker_procs:
            process.join()

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

    def ask_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `sync.vllm_ranks.RankSync` on every rank, and returns the values by rank. Raises
        the gravest error that any rank has met, with its rank."""
        with self.naming_dead():
            answers = self.collective_rpc("answer", args=(method, *arguments))
        return read_answers(answers)

    @contextlib.contextmanager
    def naming_dead(self) -> Iterator[None]:
        """Raises EngineDied in the place of an error that the death of a worker has caused."""
        try:
            yield
        except Exception as error:
            if self._died.wait(TOLD_S):
                raise EngineDied(self.death) from error
            raise


def _shut_down(executor: "weakref.ref[WorkerProcesses]") -> None:
    if (found := executor()) is not None:
        found.shutdown()


def describe_exit(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
