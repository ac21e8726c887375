"""All ranks of a learner, whatever engine each of them holds: what they tell each other is small and goes over gloo.

Engines have process groups of their own (torch's default group, and what they make of it); this one stands beside them, so that
ranks of different pools (the policy's, the critic's) can meet, and so that a thread can write a checkpoint meanwhile.
"""

import contextlib
import itertools
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=10)

Sums = dict[str, Tensor]


class World:
    """One rank among `size`. Every method but `tell` and `hear` is collective; with one rank each is done at once."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.size = rank, size
        self._group = None
        if size > 1:
            assert store is not None
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
            self._board = store.clone()  # a connection of its own: a wait holds up nobody else's questions

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in the place of the tensor [any shape, CPU]."""
        if self._group is not None:
            self._group.allreduce([tensor]).wait()
        return tensor

    def add_named_tensors(self, sums: Sums) -> Sums:
        """The sums over all ranks, of all names that any of them has; in float64."""
        if self._group is None:
            return sums
        shapes: dict[str, list[int]] = {}
        for told in self.gather_messages(
            msgspec.json.encode({name: list(value.shape) for name, value in sums.items()})
        ):
            shapes |= msgspec.json.decode(told, type=dict[str, list[int]])
        names = sorted(shapes)
        mine = [sums[name].double() if name in sums else torch.zeros(shapes[name]).double() for name in names]
        parts = self.add_tensor(torch.cat([value.reshape(-1) for value in mine])).split(
            [value.numel() for value in mine]
        )
        return {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}

    def gather_messages(self, message: bytes) -> list[bytes]:
        """What each rank says, by rank."""
        if self._group is None:
            return [message]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(message)
        ends = [0, *self.add_tensor(sizes).cumsum(0).tolist()]
        text = torch.zeros(ends[-1], dtype=torch.uint8)
        text[ends[self.rank] : ends[self.rank + 1]] = torch.tensor(list(message), dtype=torch.uint8)
        whole = self.add_tensor(text).numpy().tobytes()
        return [whole[start:end] for start, end in zip(ends, ends[1:], strict=False)]

    def tell(self, name: str, message: bytes, *, instead_of: str = "") -> None:
        """Leaves a message for the other ranks, in the place of an older one that all have read. Waits for nobody."""
        if self._group is not None:
            self._board.set(name, message)
            if instead_of:
                self._board.delete_key(instead_of)

    def hear(self, name: str, wait_s: float) -> bytes | None:
        """The message of this name; None when it has not come within `wait_s`. It may be waited for as long as it takes, which a
        collective, with its time-out, may not. Raises RuntimeError when the rank that keeps the messages is gone."""
        try:
            self._board.wait([name], timedelta(seconds=wait_s))
        except RuntimeError:  # the time-out has a class of its own in some stores only
            if not self._board.check([name]):
                return None
        return bytes(self._board.get(name))

    def barrier(self) -> None:
        self.add_tensor(torch.zeros(1))


_met = itertools.count()
LOOK_S = 10.0
"""How often a rank looks whether the first one is still there."""


def wait_for_first_rank() -> None:
    """Returns on each rank of torch's default group once its first one has called this, however long that takes: a collective has a
    time-out, which the load of a large model would outlast."""
    store, name = dist.distributed_c10d._get_default_store(), f"first rank {next(_met)}"
    if dist.get_rank() == 0:
        store.set(name, b"there")
    while not store.check([name]):
        with contextlib.suppress(RuntimeError):  # the time-out has a class of its own in some stores only
            store.wait([name], timedelta(seconds=LOOK_S))


def open_store(rendezvous: str, rank: int, size: int) -> dist.Store:
    """The ranks' store at `tcp://HOST:PORT`, which rank 0 keeps, or `file://PATH`."""
    at = urlsplit(rendezvous)
    if at.scheme == "file":
        return dist.FileStore(at.path, size)
    assert at.scheme == "tcp" and at.hostname is not None and at.port is not None, rendezvous
    return dist.TCPStore(at.hostname, at.port, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
