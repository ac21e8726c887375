"""A role's end of the conversation with the buffer: numbered requests out, answers in, in any order.

When the buffer is started again, what has no answer yet is sent again: all requests may be repeated without harm.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers import messages as m
from buffers.journal import is_on_this_host
from buffers.keys import KeyRole, show_key
from buffers.message_fields import WireRecord
from buffers.segments import DamagedGroup, Reader
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, encode_batch, flatten_column

R = TypeVar("R", bound=WireRecord)
log = logging.getLogger("slipstream.client")

CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The buffer has said that it does not know the key."""
BROKEN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""The other side has ended the handshake without a word: keys that do not fit, or a process that dies."""
BROKEN_S = 2.0
"""For so long every handshake must have broken, with somebody there each time, before it is put down to the keys."""
ABSENT = zmq.EVENT_CLOSED
"""Nobody listens."""


WINDOW = 4
"""Parts of a record batch asked for and not come yet."""
MAX_UNSEEN = 3
"""Times in a row that a client finds damage and the buffer does not, until that is an error."""


class TooLarge(ValueError):
    """A message that the buffer would refuse for its size. It has not been sent."""


def check_size(request: m.Request, num_body: int, num_payload: int) -> None:
    """Raises TooLarge for a message that no buffer takes in."""
    name = type(request).__name__
    if num_body > m.MAX_BODY_BYTES:
        raise TooLarge(f"{name} must have at most {m.MAX_BODY_BYTES:,} bytes, got {num_body:,}")
    if num_payload > m.MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the groups of one {name} must have at most {m.MAX_PAYLOAD_BYTES:,} bytes together, got {num_payload:,}"
        )


class BufferGone(RuntimeError):
    """The buffer has not answered in time."""


class RefusedByBuffer(RuntimeError):
    """The buffer would not do what was asked."""


class KeysRefused(ValueError):
    """The buffer does not know this client's key (any more), or one side has keys and the other has none."""


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    reply: m.Reply
    payload: list[memoryview]


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A step's groups."""

    step: int
    groups: list[int]
    group_weights: list[float]
    """Importance weight of each group; empty: all 1."""
    table: pa.Table
    """The rows of all groups, in order, with the columns of `buffers.trajectory`."""


class RemoteReader:
    """Reads groups over the socket, as `segments.Reader` does from the journal."""

    def __init__(self, fetch: Callable[[m.GroupSlice], bytearray]) -> None:
        self._fetch = fetch
        self._fetched: dict[tuple[int, int], pa.RecordBatch] = {}

    def read(self, place: m.GroupSlice) -> pa.RecordBatch:
        """Raises DamagedGroup when the bytes are not those that were written, also when they come a second time."""
        where = (place.segment, place.offset)
        if where not in self._fetched:
            data = self._fetch(place)
            if xxhash.xxh3_64_intdigest(data) != place.xxh3:
                data = self._fetch(place)
            if xxhash.xxh3_64_intdigest(data) != place.xxh3:
                raise DamagedGroup(
                    f"{place.size} bytes of segment {place.segment} must have checksum {place.xxh3:016x}"
                )
            self._fetched[where] = pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA)
        return self._fetched[where].slice(place.row, place.rows)

    def drop_last(self) -> None:
        """Lets go of what was fetched: a step is read once."""
        self._fetched.clear()


class BufferClient:
    """Not thread-safe: one client a thread."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        keys: str | None = None,
        role: KeyRole = KeyRole.generator,
    ) -> None:
        """`keys` is the folder that `buffer.keys` names, and `role` says whose key it is to show. Raises ValueError when the
        folder does not hold what is needed."""
        self.address = address
        self._timeout_s, self._keys, self._role = timeout_s, keys, role
        self._heard_at = time.monotonic()
        self._numbers = itertools.count()
        self._unanswered: dict[int, list[bytes | pa.Buffer]] = {}
        self._connected = False
        self._reader: Reader | RemoteReader | None = None
        self._num_unseen = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        if keys is not None:
            show_key(self._socket, Path(keys), role)
        self._broken_since: float | None = None
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            CONNECTED | REFUSED | BROKEN | ABSENT
        )
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def another(self) -> "BufferClient":
        """A client of the same buffer, for another thread."""
        return BufferClient(self.address, timeout_s=self._timeout_s, keys=self._keys, role=self._role)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """For a poller of one's own, over several clients: when one of them can be read, `receive` has something to do."""
        return [self._socket, self._monitor]

    @property
    def silent_s(self) -> float:
        """Seconds for which the buffer has said nothing while there was something to say: a question was open."""
        return time.monotonic() - self._heard_at if self._unanswered else 0.0

    def post(self, request: m.Request, payload: pa.Buffer | None = None) -> int:
        """Sends without waiting; `receive` gives the answer, under the number returned.

        Raises TooLarge for a message that no buffer takes in, without sending it.
        """
        body = m.encoder.encode(request)
        check_size(request, len(body), 0 if payload is None else payload.size)
        if not self._unanswered:
            self._heard_at = time.monotonic()
        number = next(self._numbers)
        frames = [number.to_bytes(8, "little"), body]
        self._unanswered[number] = frames if payload is None else [*frames, payload]
        self._send(number)
        return number

    def _send(self, number: int) -> None:
        frames = self._unanswered[number]
        try:
            self._socket.send_multipart(frames, copy=len(frames) < 3)
        except zmq.Again as error:
            raise BufferGone(
                f"the buffer at {self.address} takes no more messages for {self._timeout_s} s"
            ) from error

    def receive(self, wait_s: float) -> Iterator[Answer]:
        """Answers that are there; waits up to `wait_s` for the first."""
        if wait_s > 0:
            self._poller.poll(int(wait_s * 1000))
        self._notice_connection()
        while True:
            try:
                number, body, *payload = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            answered = int.from_bytes(number.bytes, "little")
            self._unanswered.pop(answered, None)
            yield Answer(answered, m.reply_decoder.decode(body.buffer), [frame.buffer for frame in payload])

    def _notice_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & REFUSED:
                raise KeysRefused(
                    f"buffer.keys must hold a key that the buffer at {self.address} lets in (see scripts/keys.sh): it has "
                    "refused this client's"
                )
            if event & BROKEN:
                self._notice_broken_handshake()
                continue
            self._broken_since = None
            if event & ABSENT:
                continue
            if (
                self._connected
            ):  # again: another life of the buffer, which knows nothing of what was under way
                for number in list(self._unanswered):
                    self._send(number)
            self._connected = True

    def _notice_broken_handshake(self) -> None:
        """A buffer that dies or is started again breaks a few; keys that do not fit break all."""
        now = time.monotonic()
        self._broken_since = now if self._broken_since is None else self._broken_since
        if now - self._broken_since > BROKEN_S:
            raise KeysRefused(
                f"buffer.keys must hold keys that fit the buffer at {self.address}, or none if it has none (see "
                f"scripts/keys.sh): for {BROKEN_S:.0f} s it has broken off every handshake"
            )

    def call(self, request: m.Request, expect: type[R], *, wait_s: float = 0.0) -> R:
        """Sends and waits for the answer, `wait_s` longer than usual where the buffer may take that long to answer."""
        reply, _ = self.exchange(request, wait_s=wait_s)
        assert isinstance(reply, expect), reply
        return reply

    def exchange(
        self, request: m.Request, *, wait_s: float = 0.0, payload: pa.Buffer | None = None
    ) -> tuple[m.Reply, list[memoryview]]:
        """As `call`, with the frames that came with the answer. Other answers that come meanwhile are let go.

        Raises BufferGone when there is no answer in time, RefusedByBuffer when the buffer refuses, TooLarge as `post`.
        """
        number = self.post(request, payload)
        deadline = time.monotonic() + self._timeout_s + wait_s
        while (left := deadline - time.monotonic()) > 0:
            for answer in self.receive(left):
                if answer.number == number:
                    if isinstance(answer.reply, m.RefusedRequest):
                        raise RefusedByBuffer(answer.reply.reason)
                    return answer.reply, answer.payload
        raise BufferGone(
            f"no answer from the buffer at {self.address} to {type(request).__name__} in {self._timeout_s + wait_s:.0f} s"
        )

    def submit(self, generator: str, leases: list[int], groups: pa.RecordBatch) -> list[str]:
        """Hands in the rows of some leases' groups, in this order, and waits until they are durable. One verdict each."""
        request = m.SubmitGroups(generator=generator, leases=leases, schema=SCHEMA_VERSION)
        reply, _ = self.exchange(request, payload=encode_batch(groups))
        assert isinstance(reply, m.LeaseReceipt), reply
        return reply.verdicts

    def next(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped:
        """What step `step` trains, mapped from the journal where it is on this host, else fetched in parts.

        A group whose bytes have changed is told to the buffer, which has a fresh one made: until then the answer is
        NotYet. Raises DamagedGroup when the buffer cannot see the damage, though it is there again and again.
        """
        reader = self._find_reader()
        reply, _ = self.exchange(m.RequestBatch(step=step, wait_s=wait_s), wait_s=wait_s)
        if not isinstance(reply, m.BatchOffer):
            assert isinstance(reply, m.NotReadyYet | m.RunStopped), reply
            return reply
        try:
            batches = [reader.read(place) for place in reply.slices]
        except DamagedGroup as error:
            replaced = self.call(m.ReportDamagedGroups(groups=reply.groups), m.ReplacedGroups).count
            self._num_unseen = 0 if replaced else self._num_unseen + 1
            if self._num_unseen == MAX_UNSEEN:
                raise
            return m.NotReadyYet(
                waiting_for=f"step {step} waits for {replaced} fresh groups in the place of damaged ones: {error}"
            )
        finally:
            reader.drop_last()
        self._num_unseen = 0
        return TakenBatch(step, reply.groups, reply.group_weights, pa.Table.from_batches(batches, SCHEMA))

    def _find_reader(self) -> "Reader | RemoteReader":
        if self._reader is None:
            where = self.call(m.LocateJournal(), m.JournalLocation)
            here = is_on_this_host(Path(where.folder), where.mark)
            self._reader = Reader(Path(where.folder)) if here else RemoteReader(self._fetch)
        return self._reader

    def _fetch(self, place: m.GroupSlice) -> bytearray:
        """The bytes of a record batch, several parts under way at once. Others are answered between them.

        Raises BufferGone when no part comes for `timeout_s`, DamagedGroup when the journal has fewer bytes.
        """
        data = bytearray(place.size)
        left = list(range(0, place.size, m.MAX_PART_BYTES))[::-1]
        under_way: dict[int, int] = {}
        heard_at = time.monotonic()
        while left or under_way:
            while left and len(under_way) < WINDOW:
                begin = left.pop()
                size = min(m.MAX_PART_BYTES, place.size - begin)
                request = m.ReadBatchPart(segment=place.segment, offset=place.offset + begin, size=size)
                under_way[self.post(request)] = begin
            for answer in self.receive(0.1):
                if answer.number not in under_way:
                    continue
                heard_at, begin = time.monotonic(), under_way.pop(answer.number)
                if isinstance(answer.reply, m.RefusedRequest):
                    raise RefusedByBuffer(answer.reply.reason)
                part = answer.payload[0] if answer.payload else memoryview(b"")
                if len(part) != min(m.MAX_PART_BYTES, place.size - begin):
                    raise DamagedGroup(
                        f"{len(part)} bytes came of a part at {place.offset + begin} of segment {place.segment}"
                    )
                data[begin : begin + len(part)] = part
            if time.monotonic() - heard_at > self._timeout_s:
                raise BufferGone(
                    f"no part of a batch from the buffer at {self.address} in {self._timeout_s:.0f} s"
                )
        return data

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


def hand_in(client: BufferClient, generator: str, leases: list[int], groups: pa.RecordBatch) -> None:
    """Sends the rows of some leases' groups, in this order, without waiting: in one message, or in more where one would be
    too large. A group that is too large by itself fails, with its size."""
    try:
        client.post(
            m.SubmitGroups(generator=generator, leases=leases, schema=SCHEMA_VERSION), encode_batch(groups)
        )
    except TooLarge as error:
        half, rows = len(leases) // 2, groups.num_rows // len(leases)
        if half:
            first = groups.take(
                pa.array(range(half * rows))
            )  # a copy: a slice would travel with bytes of the others
            hand_in(client, generator, leases[:half], first)
            hand_in(
                client, generator, leases[half:], groups.take(pa.array(range(half * rows, groups.num_rows)))
            )
            return
        log.error("lease %d: %s", leases[0], error)
        sampled = int(np.count_nonzero(flatten_column(groups, "sampled")))
        client.post(m.FailLease(generator=generator, lease=leases[0], num_tokens=sampled, error=str(error)))
