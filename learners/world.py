"""The ranks of a learner: whatever engine each of them holds, they exchange small messages over gloo.

Engines have process groups of their own (torch's default group and its subgroups). This one stands beside
them, so that ranks of different pools (the policy's, the critic's) can meet, and so that a thread can write a
checkpoint while training goes on.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for the other ranks before it fails."""
LONG_TIMEOUT = timedelta(days=7)
"""The same for collectives that wait while files are read or written, which takes as long as it takes. A rank
that dies closes its connections, which ends every wait for it at once."""
LOOK_S = 10.0
"""How often a rank that waits outside of collectives checks that the store is still there."""
POLL_S = 0.1
"""How often a rank that reports while it waits in a collective looks whether that is done."""

Sums = dict[str, Tensor]


class World:
    """One rank among `size`.

    Every method is collective: all ranks call it in the same order. With one rank each returns at once.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: dist.Store | None = None, timeout: timedelta | None = None
    ) -> None:
        """`timeout`: how long a collective waits for the other ranks; None: `TIMEOUT`."""
        self.rank, self.size = rank, size
        self._group = None
        self._num_sent: Counter[str] = Counter()
        """Messages that the first rank has broadcast, by topic."""
        if size > 1:
            assert store is not None, "several ranks need a store to meet at"
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout or TIMEOUT)
            # A connection of its own: a wait blocks its connection, and must not block another thread's
            # requests.
            self._store = store.clone()

    def add_tensor(self, tensor: Tensor, while_waiting: Callable[[], None] | None = None) -> Tensor:
        """Replaces the tensor [any shape, CPU] by its sum over all ranks, and returns it.

        `while_waiting` is called now and then until all ranks are there.
        """
        if self._group is not None:
            work = self._group.allreduce([tensor])
            while while_waiting is not None and not work.is_completed():
                while_waiting()
                time.sleep(POLL_S)
            work.wait()
        return tensor

    def add_named_tensors(self, sums: Sums) -> Sums:
        """Returns the sums over all ranks, float64, of every name that any rank has.

        Ranks may have different names.
        """
        if self._group is None:
            return sums
        shapes: dict[str, list[int]] = {}
        for told in self.gather_messages(
            msgspec.json.encode({name: list(value.shape) for name, value in sums.items()})
        ):
            shapes |= msgspec.json.decode(told, type=dict[str, list[int]])
        names = sorted(shapes)
        own = [sums[name].double() if name in sums else torch.zeros(shapes[name]).double() for name in names]
        flat = self.add_tensor(torch.cat([value.reshape(-1) for value in own]))
        parts = flat.split([value.numel() for value in own])
        return {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}

    def gather_messages(self, message: bytes, while_waiting: Callable[[], None] | None = None) -> list[bytes]:
        """Returns the messages of all ranks, by rank; `while_waiting` as in `add_tensor`."""
        if self._group is None:
            return [message]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(message)
        ends = [0, *self.add_tensor(sizes, while_waiting).cumsum(0).tolist()]
        # Each rank fills its own span of one row of bytes, and the sum of the rows holds all messages.
        text = torch.zeros(ends[-1], dtype=torch.uint8)
        if message:
            text[ends[self.rank] : ends[self.rank + 1]] = torch.frombuffer(
                bytearray(message), dtype=torch.uint8
            )
        whole = self.add_tensor(text).numpy().tobytes()
        return [whole[start:end] for start, end in zip(ends, ends[1:], strict=False)]

    def exchange_messages(self, messages: Sequence[bytes]) -> list[bytes]:
        """Sends a message to each rank; returns those that the ranks have sent to this one, by rank."""
        if self._group is None:
            return list(messages)
        sent = torch.tensor([len(message) for message in messages])
        came = torch.empty_like(sent)
        self._group.alltoall_base(came, sent, [], [], dist.AllToAllOptions()).wait()
        data = torch.frombuffer(bytearray(b"".join(messages)) or bytearray(1), dtype=torch.uint8)
        arrived = torch.empty(int(came.sum()), dtype=torch.uint8)
        counts = came.tolist(), sent.tolist()
        self._group.alltoall_base(arrived, data[: int(sent.sum())], *counts, dist.AllToAllOptions()).wait()
        return [bytes(part.numpy()) for part in arrived.split(counts[0])]

    def broadcast_message(
        self,
        topic: str,
        make_message: Callable[[], bytes],
        *,
        look_s: float = LOOK_S,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Returns the message that the first rank makes, on every rank, however long the first one takes to
        make it.

        A collective has a time-out, which the wait for a batch or the check of a large checkpoint outlasts.
        So this message goes through the store that the ranks met at: the others look for it for `look_s`
        seconds at a time, and call `while_waiting` in between. A message replaces the one before it of the
        same topic, so a collective must lie between the two. Raises RuntimeError when the rank that keeps the
        store is gone.
        """
        if self._group is None:
            return make_message()
        number = self._num_sent[topic]
        self._num_sent[topic] += 1
        key = f"{topic} {number}"
        if self.rank == 0:
            message = make_message()
            self._store.set(key, message)
            if number:
                self._store.delete_key(f"{topic} {number - 1}")
            return message
        while not _wait_for_key(self._store, key, look_s):
            while_waiting()
        return bytes(self._store.get(key))

    def barrier(self) -> None:
        self.add_tensor(torch.zeros(1))


def _wait_for_key(store: dist.Store, key: str, wait_s: float) -> bool:
    """Returns whether the store has the key within `wait_s`.

    Raises RuntimeError when the rank that keeps the store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=wait_s))
    except RuntimeError:
        # Only some stores have a class of its own for the time-out, so the store is asked which of the two it
        # was.
        return store.check([key])
    return True


_num_meetings = itertools.count()


def wait_for_first_rank() -> None:
    """Returns on each rank of torch's default group once the first rank has called this too, however long
    that takes.

    A collective has a time-out, which the load of a large model outlasts.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"first rank {next(_num_meetings)}"
    if dist.get_rank() == 0:
        store.set(key, b"there")
    while not _wait_for_key(store, key, LOOK_S):
        pass
