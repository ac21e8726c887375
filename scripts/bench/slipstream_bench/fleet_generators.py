"""Generators that only talk: the connections, heartbeats, requests and submissions of `generators.worker`,
with forged rows and no engine. Several hundred share a process."""

import heapq
import logging
import random
import resource
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import pyarrow as pa
import zmq

from buffers import messages as m
from buffers.client import BufferClient
from buffers.heartbeat import HEARTBEAT_S, MAX_UNANSWERED
from buffers.run_status import GeneratorReport
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, encode_batch
from slipstream_bench.carried_groups import SAMPLES, GroupSize, make_template

WAIT_S = 5.0
"""Seconds that a request for leases waits, as a real generator's does."""


@dataclass(frozen=True, kw_only=True)
class FleetWork:
    """The work of the generators of one process."""

    address: str
    keys: str | None
    size: GroupSize
    names: list[str]
    groups_at_once: int
    """Groups that each generator plays at a time."""
    play_s: float
    """Seconds that a group takes. 0: as fast as the buffer takes them."""


@dataclass
class FleetCount:
    """Figures of the generators of one process since they were last asked."""

    num_joined: int = 0
    """Generators that the buffer has welcomed, since the beginning."""
    connected_at: float = float("inf")
    """When the first of them connected, on the host's monotonic clock."""
    num_accepted: int = 0
    """Groups."""
    num_revoked: int = 0
    """Leases that the buffer has taken back."""
    latencies_s: dict[str, list[float]] = field(
        default_factory=lambda: {"heartbeat": [], "lease": [], "submission": []}
    )


class GroupForge:
    """Makes groups for leases by writing a few numbers into rows made beforehand."""

    def __init__(self, size: GroupSize) -> None:
        template = make_template(size)
        self._columns = [template.column(i) for i in range(template.num_columns)]
        self._versions = template.column("versions")
        self._version = 0

    def encode_group(self, lease: m.Lease, version: int) -> pa.Buffer:
        if version != self._version:
            before, self._version = self._versions, version
            values = before.values.to_numpy()
            fresh = np.where(values < 0, values, version).astype(values.dtype)
            self._versions = type(before).from_arrays(before.offsets, pa.array(fresh), type=before.type)
            self._columns[SCHEMA.get_field_index("versions")] = self._versions
        for name, value in (("group", lease.group), ("due", lease.due), ("prompt_id", lease.index)):
            place = SCHEMA.get_field_index(name)
            self._columns[place] = pa.array([value] * SAMPLES, SCHEMA.field(place).type)
        return encode_batch(pa.RecordBatch.from_arrays(self._columns, schema=SCHEMA))


class FleetGenerator:
    def __init__(
        self, name: str, work: FleetWork, forge: GroupForge, count: FleetCount, phase: float
    ) -> None:
        """`phase` in 0..1 says how far its first groups are when they are leased."""
        self._name, self._work, self._forge, self._count, self._phase = name, work, forge, count, phase
        self._client = BufferClient(work.address, timeout_s=60.0, keys=work.keys)
        self._heart = self._client.open_another()
        self.clients = [self._client, self._heart]
        self._playing: dict[int, tuple[m.Lease, float]] = {}
        """Leases by id, and when their groups end."""
        self._sent_at: dict[tuple[str, int], float] = {}
        """When each request without an answer was sent, by its kind and number."""
        self._version, self._asked, self._asked_with = -1, -1, -1
        self._began_at = time.monotonic()
        self._is_silent = self.has_ended = False
        self._send("join", m.JoinRun(generator=name))

    def _send(self, kind: str, request: m.Request, payload: pa.Buffer | None = None) -> int:
        client = self._heart if kind == "heartbeat" else self._client
        number = client.send_request(request, payload)
        self._sent_at[kind, number] = time.monotonic()
        return number

    def beat(self) -> None:
        """Sends a heartbeat."""
        now = time.monotonic()
        if self._is_silent or sum(kind == "heartbeat" for kind, _ in self._sent_at) >= MAX_UNANSWERED:
            return
        tokens = SAMPLES * self._work.size.num_tokens
        progress = {
            number: int(tokens * min(1.0, max(0.0, 1 - (ends_at - now) / max(1e-9, self._work.play_s))))
            for number, (_, ends_at) in self._playing.items()
        }
        report = GeneratorReport(version=self._version, alive_s=now - self._began_at)
        doing = "sampling" if self._playing else "waiting for leases"
        request = m.GeneratorHeartbeat(generator=self._name, progress=progress, report=report, activity=doing)
        self._send("heartbeat", request)

    def take_turn(self) -> float | None:
        """Reads the answers that have come, and sends all that is due. Returns when its next group ends."""
        self._read_answers()
        now = time.monotonic()
        for number, (lease, ends_at) in list(self._playing.items()):
            if ends_at <= now and self._version >= lease.min_version:
                del self._playing[number]
                request = m.SubmitGroups(
                    generator=self._name, leases=[lease.id], rows=[SAMPLES], schema=SCHEMA_VERSION
                )
                self._send("submission", request, self._forge.encode_group(lease, self._version))
        self._ask_for_leases()
        self._read_answers()  # an answer that came while a request was sent wakes nobody up
        return min((ends_at for _, ends_at in self._playing.values()), default=None)

    def _read_answers(self) -> None:
        for client, kinds in ((self._heart, ("heartbeat",)), (self._client, ("lease", "submission", "join"))):
            for answer in client.receive_answers(0.0):
                kind = next((kind for kind in kinds if (kind, answer.number) in self._sent_at), None)
                if kind is not None:
                    waited_s = time.monotonic() - self._sent_at.pop((kind, answer.number))
                    self._take_reply(kind, answer.number, answer.reply, waited_s)

    def _take_reply(self, kind: str, number: int, reply: m.Reply, waited_s: float) -> None:
        if isinstance(reply, m.LeaseGrant | m.GeneratorStanding):
            self._version = max(self._version, reply.version)
            self.has_ended = self.has_ended or reply.ended
        match reply:
            case m.JoinedRun():
                self._count.num_joined += 1
                return
            case m.LeaseGrant(leases=leases):
                self._asked = -1 if number == self._asked else self._asked
                if not leases:
                    return
                for lease in leases:
                    self._playing[lease.id] = lease, time.monotonic() + self._work.play_s * (1 - self._phase)
                self._phase = 0.0
            case m.GeneratorStanding(revoked=revoked):
                self._count.num_revoked += sum(self._playing.pop(one, None) is not None for one in revoked)
            case m.LeaseReceipt(verdicts=verdicts):
                self._count.num_accepted += verdicts.count("accepted")
        self._count.latencies_s[kind].append(waited_s)

    def _ask_for_leases(self) -> None:
        under_way = len(self._playing) + sum(kind == "submission" for kind, _ in self._sent_at)
        room = self._work.groups_at_once - under_way
        replaces = self._asked >= 0 and self._asked_with < self._version
        if self._is_silent or room <= 0 or (self._asked >= 0 and not replaces):
            return
        self._asked_with = self._version
        request = m.RequestLeases(
            generator=self._name,
            count=room,
            wait_s=WAIT_S,
            room=room * SAMPLES,
            version=self._version,
            replaces=replaces,
        )
        self._asked = self._send("lease", request)

    def leave(self) -> None:
        self._is_silent = True
        self._playing.clear()
        self._send("leave", m.LeaveRun(generator=self._name))

    def close(self) -> None:
        for client in self.clients:
            client.close()


def run_fleet(work: FleetWork, orders: Connection) -> None:
    """Runs the generators of one process. An order is answered with a `FleetCount`; the order `leave` makes
    all of them leave first. Ends when the other end of the pipe has gone, or the run has ended."""
    logging.disable()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 20_000)
    forge, rng = GroupForge(work.size), random.Random(work.names[0])
    count = FleetCount(connected_at=time.monotonic())
    generators = [FleetGenerator(name, work, forge, count, rng.random()) for name in work.names]
    try:
        FleetLoop(generators, count, orders).run()
    except (EOFError, BrokenPipeError):
        pass
    finally:
        for generator in generators:
            generator.close()


class FleetLoop:
    """Waits for the sockets of all generators, for the clock, and for orders."""

    def __init__(self, generators: list[FleetGenerator], count: FleetCount, orders: Connection) -> None:
        self._generators, self._count, self._orders = generators, count, orders
        self._epoll = select.epoll()
        self._owners = {
            int(socket.getsockopt(zmq.FD)): number
            for number, generator in enumerate(generators)
            for client in generator.clients
            for socket in client.sockets
        }
        for descriptor in (*self._owners, orders.fileno()):
            self._epoll.register(descriptor, select.EPOLLIN)
        now = time.monotonic()
        # Heartbeats are spread evenly, as those of hosts that know nothing of one another.
        self._beats = [
            (now + HEARTBEAT_S * number / len(generators), number) for number in range(len(generators))
        ]
        self._ends: list[tuple[float, int]] = []
        """Heap of (when the next group of a generator ends, its number)."""
        self._next_ends: dict[int, float] = {}

    def run(self) -> None:
        self._take_turns(range(len(self._generators)))
        while not all(generator.has_ended for generator in self._generators):
            due = min([self._beats[0][0], *(at for at, _ in self._ends[:1])])
            ready = [fd for fd, _ in self._epoll.poll(max(0.0, due - time.monotonic()))]
            now, numbers = time.monotonic(), {self._owners[fd] for fd in ready if fd in self._owners}
            while self._ends and self._ends[0][0] <= now:
                numbers.add(heapq.heappop(self._ends)[1])
            while self._beats[0][0] <= now:
                at, number = self._beats[0]
                self._generators[number].beat()
                heapq.heapreplace(self._beats, (max(at + HEARTBEAT_S, now), number))
                numbers.add(number)
            self._take_turns(numbers)
            if self._orders.fileno() in ready:
                self._obey(self._orders.recv())

    def _take_turns(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            ends_at = self._generators[number].take_turn()
            if ends_at is not None and ends_at != self._next_ends.get(number):
                self._next_ends[number] = ends_at
                heapq.heappush(self._ends, (ends_at, number))

    def _obey(self, order: str) -> None:
        if order == "leave":
            for generator in self._generators:
                generator.leave()
        self._orders.send(self._count)
        self._count.num_accepted = self._count.num_revoked = 0
        for latencies in self._count.latencies_s.values():
            latencies.clear()
