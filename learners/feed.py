"""How a step's batch comes to every rank: one rank of each host asks the buffer, and lays it in memory that the host's ranks share."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import pyarrow as pa

from buffers import messages as m
from buffers.client import TakenBatch
from configs.host import boot_id
from learners.packing import Batch, batch_from_arrow
from learners.world import World

PATIENCE_S = 30.0
"""How long one question to the buffer may stay open before it is asked again (and the wait is named in the log)."""


class Source(Protocol):
    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped: ...


class Laid(msgspec.Struct):
    """What the first rank of a host tells the others: where the batch lies, or why there is none."""

    host: str
    path: str = ""
    groups: list[int] = []
    weights: list[float] = []
    over: str | None = None


class Feed:
    """One rank's end. The first rank of all decides whether there is a next step; then the first of each host fetches it."""

    def __init__(self, source: Source, world: World, log: Callable[[str], None], host: str = "") -> None:
        """`host`: what ranks of one host have in common. Collective."""
        self._source, self._world, self._log = source, world, log
        self._host = host or boot_id()
        hosts = [told.decode() for told in world.gather_messages(self._host.encode())]
        self._leads = hosts.index(self._host) == world.rank
        self.waited_s = 0.0
        """For the buffer, and for the rank that waits for it; the learner adds what else it waits for of the buffer"""

    def next(self, step: int) -> Batch | m.RunStopped:
        began = time.monotonic()
        try:
            return self._next(step)
        finally:
            self.waited_s += time.monotonic() - began

    def _next(self, step: int) -> Batch | m.RunStopped:
        world = self._world
        taken = self._ask(step) if world.rank == 0 else None
        if world.size == 1:
            assert taken is not None
            return (
                taken
                if isinstance(taken, m.RunStopped)
                else batch_from_arrow(taken.table, taken.group_weights)
            )
        if (reason := self._decide(taken)) is not None:
            return m.RunStopped(reason=reason)
        if self._leads and taken is None:
            taken = self._ask(step)
            if isinstance(taken, m.RunStopped):
                raise RuntimeError(f"the buffer has stopped between the ranks of two hosts: {taken.reason}")
        laid, memory = Laid(self._host), None
        if self._leads:
            assert isinstance(taken, TakenBatch)
            memory = _lay(taken.table)
            laid = Laid(self._host, f"/proc/{os.getpid()}/fd/{memory}", taken.groups, taken.group_weights)
        told = [
            msgspec.json.decode(one, type=Laid) for one in world.gather_messages(msgspec.json.encode(laid))
        ]
        if len({tuple(one.groups) for one in told if one.path}) > 1:
            raise RuntimeError(
                f"a damaged group of step {step} was replaced between the ranks of two hosts: the step begins anew"
            )
        mine = next(one for one in told if one.host == self._host and one.path)
        with pa.memory_map(mine.path) as file:
            table = pa.ipc.open_file(file).read_all()
        batch = batch_from_arrow(table, mine.weights)
        world.barrier()
        if memory is not None:
            os.close(memory)  # what is mapped stays
        return batch

    def _decide(self, taken: TakenBatch | m.RunStopped | None) -> str | None:
        """Returns on every rank why there is no further step, as the buffer told the first rank; None when there is one.

        A batch may take longer than a collective waits.
        """
        reason = self._world.broadcast_message(
            "reason to stop",
            lambda: msgspec.json.encode(taken.reason if isinstance(taken, m.RunStopped) else None),
            look_s=PATIENCE_S,
            while_waiting=lambda: self._log("waiting: for the first rank, which waits for the batch"),
        )
        return msgspec.json.decode(reason, type=str | None)

    def _ask(self, step: int) -> TakenBatch | m.RunStopped:
        while isinstance(taken := self._source.take_batch(step, PATIENCE_S), m.NotReadyYet):
            self._log(f"waiting: {taken.waiting_for}")
        return taken


def _lay(table: pa.Table) -> int:
    """The table, in one piece, in memory that has no name and is gone with its last user; returns the file's number."""
    memory = os.memfd_create("slipstream-batch")
    with pa.OSFile(f"/proc/self/fd/{memory}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return memory
