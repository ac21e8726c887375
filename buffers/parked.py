"""Requests that cannot be answered yet (no work, no batch, no news): each is kept with its deadline, and there is room for so many."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa

from buffers import messages as m

MAX_PARKED = 20_000
MAX_PARKED_OF_ONE = 200
"""Of one sender."""
MAX_WAIT_S = 60.0

Waits = m.RequestLeases | m.RequestBatch | m.RequestParityProbe | m.AwaitEvaluations | m.WatchRun
"""Requests that may have to wait for their answers."""

R = TypeVar("R")


@dataclass(slots=True)
class Parked(Generic[R]):
    """A request that waits for its answer."""

    sender: bytes
    number: bytes
    request: R
    deadline: float
    user: str
    """The sender's public key; empty where there are no keys."""


@dataclass(slots=True)
class Reply:
    """An answer on its way to its client."""

    frames: list[bytes | pa.Buffer]
    leases: list[m.Lease]
    """The leases that it gives: they are taken back where it cannot be delivered."""


def deal(
    asks: Sequence[Parked[m.RequestLeases]], room: int, lease: Callable[[str], m.Lease | None]
) -> list[list[m.Lease]]:
    """Deals what may be leased (`room` at most) to all who ask, evenly; those who get nothing are the last. `lease` gives a lease
    to the generator of this name, or None when there is no more."""
    share = max(1, room // len(asks))  # in a row: groups that come together are stored and read together
    hands: list[list[m.Lease]] = [[] for _ in asks]
    hungry = deque(zip(asks, hands, strict=True))
    while hungry:
        parked, hand = hungry.popleft()
        wanted = max(1, parked.request.count)
        for _ in range(min(share, wanted - len(hand))):
            if (given := lease(parked.request.generator)) is None:
                return hands
            hand.append(given)
        if len(hand) < wanted:
            hungry.append((parked, hand))
    return hands


class ParkedRequests:
    def __init__(self) -> None:
        self.asks: deque[Parked[m.RequestLeases]] = deque()
        self.nexts: list[Parked[m.RequestBatch]] = []
        self.probes: list[Parked[m.RequestParityProbe]] = []
        self.finishes: list[Parked[m.AwaitEvaluations]] = []
        self.watches: list[Parked[m.WatchRun]] = []
        self._num_parked: Counter[bytes] = Counter()  # by sender

    def __iter__(self) -> Iterator[Parked[Any]]:
        return itertools.chain(self.asks, self.nexts, self.probes, self.finishes, self.watches)

    def has_room(self, sender: bytes) -> bool:
        return self._num_parked[sender] < MAX_PARKED_OF_ONE and self._num_parked.total() < MAX_PARKED

    def park(self, sender: bytes, number: bytes, request: Waits, user: str, now: float) -> None:
        self._num_parked[sender] += 1
        deadline = now + min(request.wait_s, MAX_WAIT_S)
        match request:
            case m.RequestLeases():
                self.asks.append(Parked(sender, number, request, deadline, user))
            case m.RequestBatch():
                self.nexts.append(Parked(sender, number, request, deadline, user))
            case m.RequestParityProbe():
                self.probes.append(Parked(sender, number, request, deadline, user))
            case m.AwaitEvaluations():
                self.finishes.append(Parked(sender, number, request, deadline, user))
            case m.WatchRun():
                self.watches.append(Parked(sender, number, request, deadline, user))

    def let_go(self, parked: Parked[Any]) -> None:
        """One of them is answered: it counts no more. Whoever answers it takes it out of its queue."""
        self._num_parked[parked.sender] -= 1
        if not self._num_parked[parked.sender]:
            del self._num_parked[parked.sender]

    def forget(self, unwanted: Callable[[Parked[Any]], bool]) -> None:
        """Takes out requests that will have no answer."""
        gone = {id(parked): parked for parked in self if unwanted(parked)}
        for parked in gone.values():
            self.let_go(parked)
        if gone:
            self.asks = deque(parked for parked in self.asks if id(parked) not in gone)
            self.nexts = [parked for parked in self.nexts if id(parked) not in gone]
            self.probes = [parked for parked in self.probes if id(parked) not in gone]
            self.finishes = [parked for parked in self.finishes if id(parked) not in gone]
            self.watches = [parked for parked in self.watches if id(parked) not in gone]

    def take_asks(self, generator: str, but: bytes = b"") -> list[Parked[m.RequestLeases]]:
        """Takes out what a generator has asked, which has left or begun a new life, or asks over another connection (`but`)
        now: nobody waits for the leases."""
        taken = [one for one in self.asks if one.request.generator == generator and one.sender != but]
        if taken:
            gone = {id(one) for one in taken}
            self.forget(lambda parked: id(parked) in gone)
        return taken
