"""Brings a step's batch to every rank.

One rank of each host asks the buffer, and writes the batch into memory that the ranks of its host share.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from buffers import messages as m
from buffers.client import TakenBatch
from learners.packing import Batch, batch_from_arrow
from learners.rank_hosts import identify_host
from learners.world import World

LARGEST_OFFSET = 2**31 - 1
"""Largest offset of a list, of 32 bits. The experts of a large step outgrow it."""
PATIENCE_S = 30.0
"""Seconds that one request to the buffer may stay open before it is sent again and the log names the wait."""
LOOK_S = 1.0
"""The same for a rank that has work beside the wait, of which it tells each time."""


class FeedSource(Protocol):
    """The part of a `BatchSource` (`learners.learner`) that a feed needs."""

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped: ...


class SharedBatch(msgspec.Struct):
    """Message of each rank to all: the place of the batch in its host's memory."""

    host: str
    """Name that the ranks of one host have in common"""
    path: str = ""
    """File of the batch; empty: this rank has not fetched it"""
    groups: list[int] = []
    """Group numbers of the batch"""
    group_weights: list[float] = []
    """Importance weight of each group; empty: all weigh 1"""


class Feed:
    """One rank's end. The first rank of all learns whether there is a next step; then the first rank of each
    host fetches the batch."""

    def __init__(
        self,
        source: FeedSource,
        world: World,
        log: Callable[[str], None],
        host: str = "",
        is_at_work: Callable[[], bool] = lambda: False,
    ) -> None:
        """Collective. `host` is a name that the ranks of one host have in common; empty: see `identify_host`.

        `log` is called every now and then while there is no batch, with what is waited for; once a second
        while `is_at_work`: the rank has work beside the wait.
        """
        self._source, self._world, self._log, self._is_at_work = source, world, log, is_at_work
        self._host = host or identify_host()
        hosts = [message.decode() for message in world.gather_messages(self._host.encode())]
        self._fetches = hosts.index(self._host) == world.rank
        self.waited_s = 0.0
        """Seconds spent waiting for batches. The learner adds its other waits for the buffer"""

    def take_batch(self, step: int) -> Batch | m.RunStopped:
        """Waits for the batch of the step. Returns why there is none where the run is stopped. Collective."""
        began = time.monotonic()
        try:
            return self._take_batch(step)
        finally:
            self.waited_s += time.monotonic() - began

    def _take_batch(self, step: int) -> Batch | m.RunStopped:
        taken = self._ask_buffer(step) if self._world.rank == 0 else None
        if self._world.size == 1:
            assert taken is not None
            if isinstance(taken, m.RunStopped):
                return taken
            return batch_from_arrow(taken.table, taken.group_weights)
        if (reason := self._share_decision(taken)) is not None:
            return m.RunStopped(reason=reason)
        if self._fetches and taken is None:
            taken = self._ask_buffer(step)
            if isinstance(taken, m.RunStopped):
                raise RuntimeError(
                    f"the buffer stopped after it gave the batch to another host: {taken.reason}"
                )
        return self._share_batch(step, taken)

    def _share_batch(self, step: int, taken: TakenBatch | m.RunStopped | None) -> Batch:
        """Returns the batch from the memory of this host, into which the rank that fetched it writes it
        first."""
        own_message, memory = SharedBatch(self._host), None
        if self._fetches:
            assert isinstance(taken, TakenBatch)
            memory = _write_to_memory(taken.table)
            path = f"/proc/{os.getpid()}/fd/{memory}"
            own_message = SharedBatch(self._host, path, taken.groups, taken.group_weights)
        told = self._world.gather_messages(msgspec.json.encode(own_message))
        fetched = [one for one in (msgspec.json.decode(each, type=SharedBatch) for each in told) if one.path]
        if len({tuple(one.groups) for one in fetched}) > 1:
            raise RuntimeError(
                f"a damaged group of step {step} was replaced after one of the hosts had fetched it: the "
                "step begins anew"
            )
        of_this_host = next(one for one in fetched if one.host == self._host)
        with pa.memory_map(of_this_host.path) as file:
            table = pa.ipc.open_file(file).read_all()
        batch = batch_from_arrow(table, of_this_host.group_weights)
        # All ranks have mapped the memory by now, and mapped memory outlives its file.
        self._world.barrier()
        if memory is not None:
            os.close(memory)
        return batch

    def _share_decision(self, taken: TakenBatch | m.RunStopped | None) -> str | None:
        """Returns on every rank why there is no further step, as the buffer told the first rank; None when
        there is one.

        A batch may take longer than a collective waits.
        """
        reason = self._world.broadcast_message(
            "reason to stop",
            lambda: msgspec.json.encode(taken.reason if isinstance(taken, m.RunStopped) else None),
            look_s=PATIENCE_S,
            while_waiting=lambda: self._log("waiting: for the first rank, which waits for the batch"),
        )
        return msgspec.json.decode(reason, type=str | None)

    def _ask_buffer(self, step: int) -> TakenBatch | m.RunStopped:
        while isinstance(taken := self._source.take_batch(step, self._choose_patience_s()), m.NotReadyYet):
            self._log(f"waiting: {taken.waiting_for}")
        return taken

    def _choose_patience_s(self) -> float:
        return LOOK_S if self._is_at_work() else PATIENCE_S


def _write_to_memory(table: pa.Table) -> int:
    """Writes the table into memory without a name, which its last user frees.

    It is written in one piece, which the ranks need not copy, unless some lists are too long together for
    Arrow's offsets. Returns the number of the open file.
    """
    lists = [column for column in table.columns if pa.types.is_list(column.type)]
    longest = max(pc.sum(pc.list_value_length(column), min_count=0).as_py() for column in lists)
    table = table.combine_chunks() if longest <= LARGEST_OFFSET else table
    memory = os.memfd_create("slipstream-batch")
    with pa.OSFile(f"/proc/self/fd/{memory}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return memory
