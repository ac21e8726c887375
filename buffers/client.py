"""A role's end of the conversation with the buffer: numbered requests out, answers in, in any order.

When the buffer is started again, the client sends again whatever has no answer yet. All requests may be
repeated without harm.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from buffers import messages as m
from buffers.journal import is_on_this_host
from buffers.keys import KeyRole, show_key
from buffers.message_fields import WireRecord
from buffers.older_schemas import read_stored_batch
from buffers.segments import DamagedGroup, Reader
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, encode_batch, flatten_column
from buffers.wake_up import WakeUp

R = TypeVar("R", bound=WireRecord)
log = logging.getLogger("slipstream.client")

CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
KEY_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The buffer has said that it does not know the key."""
HANDSHAKE_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""The other side has ended the handshake without a word: the keys do not fit, or the process is dying."""
BROKEN_S = 2.0
"""Seconds in which every handshake must have broken, with somebody there each time, before the keys are
blamed."""
NOBODY_LISTENS = zmq.EVENT_CLOSED
UNACKNOWLEDGED_S = 15.0
"""Seconds in which the other host's kernel acknowledges nothing, after which a client connects anew. The
kernel of a process that is busy or stopped acknowledges."""
CONNECT_S = 5.0
"""Seconds of one attempt to connect."""
PROBES = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""Seconds without a byte after which the kernel asks whether the other side is still there. A client that
only waits for an answer would never notice that its connection has ended while the link was down."""
WINDOW = 4
"""Parts of a record batch that are asked for and have not come yet."""
MAX_UNSEEN = 3
"""Times in a row that a client finds damage and the buffer does not, until that is an error."""


class TooLarge(ValueError):
    """Raised for a message that the buffer would refuse for its size. It has not been sent."""


def check_size(request: m.Request, num_body: int, num_payload: int) -> None:
    """Raises TooLarge for a message with more bytes than any buffer takes in."""
    name = type(request).__name__
    if num_body > m.MAX_BODY_BYTES:
        raise TooLarge(f"{name} must have at most {m.MAX_BODY_BYTES:,} bytes, got {num_body:,}")
    if num_payload > m.MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the groups of one {name} must have at most {m.MAX_PAYLOAD_BYTES:,} bytes together, "
            f"got {num_payload:,}"
        )


class BufferGone(RuntimeError):
    """Raised when the buffer has not answered in time."""


class RefusedByBuffer(RuntimeError):
    """Raised when the buffer refuses a request, with its reason."""


class KeysRefused(ValueError):
    """Raised when the buffer does not know this client's key (any more), or one side has keys and the other
    has none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The buffer's answer to one request."""

    number: int
    """Number of the request, as `send_request` has returned it."""
    reply: m.Reply
    payload: list[memoryview]
    """The binary frames beside it: none or one."""


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """The groups of a step, with their rows."""

    step: int
    groups: list[int]
    """Group numbers."""
    group_weights: list[float]
    """Importance weight of each group; empty: all 1."""
    table: pa.Table
    """The rows of all groups, in order, with the columns of `buffers.trajectory`."""


class RemoteReader:
    """Reads groups over the socket, as `segments.Reader` does from the journal."""

    def __init__(self, fetch: Callable[[m.GroupSlice], bytearray]) -> None:
        """`fetch` returns the bytes of a record batch."""
        self._fetch = fetch
        self._fetched: dict[tuple[int, int], pa.RecordBatch] = {}

    def read(self, place: m.GroupSlice) -> pa.RecordBatch:
        """Returns the rows of a slice.

        Raises DamagedGroup when the bytes are not those that were written. They are fetched a second time
        before that, because a fault on the way differs from damage on the disk.
        """
        where = (place.segment, place.offset)
        if where not in self._fetched:
            data = self._fetch(place)
            if xxhash.xxh3_64_intdigest(data) != place.xxh3:
                data = self._fetch(place)
            if xxhash.xxh3_64_intdigest(data) != place.xxh3:
                raise DamagedGroup(
                    f"{place.size} bytes of segment {place.segment} must have checksum {place.xxh3:016x}"
                )
            self._fetched[where] = read_stored_batch(pa.py_buffer(data))
        return self._fetched[where].slice(place.row, place.rows)

    def drop_last(self) -> None:
        """Frees the record batches that were fetched: a step is read once."""
        self._fetched.clear()


class BufferClient:
    """One connection to the buffer. Not thread-safe: each thread needs a client of its own."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        keys: str | None = None,
        role: KeyRole = KeyRole.generator,
    ) -> None:
        """`timeout_s` is how long an answer may take. `keys` is the folder that `buffer.keys` names, and
        `role` says whose key to show. Raises ValueError when the folder does not hold what is needed."""
        self.address = address
        self._timeout_s, self._keys, self._role = timeout_s, keys, role
        self._heard_at = time.monotonic()
        self._numbers = itertools.count()
        self._unanswered: dict[int, list[bytes | pa.Buffer]] = {}
        """Frames of requests without an answer, by number."""
        self._connected = False
        self._reader: Reader | RemoteReader | None = None
        self._num_unseen = 0
        """Times in a row that this client has found damage and the buffer has not."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        # On a link that was cut the kernel would try again after ever longer waits.
        self._socket.setsockopt(zmq.TCP_MAXRT, int(UNACKNOWLEDGED_S * 1000))
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
        for option, value in PROBES.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            show_key(self._socket, Path(keys), role)
        self._broken_since: float | None = None
        self._broken_at = float("-inf")
        self._monitor = self._open_monitor()
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._wake_up: WakeUp | None = None

    def _open_monitor(self) -> zmq.Socket[bytes]:
        """As `get_monitor_socket`, without a bound: nobody reads the events of an idle client, and ZeroMQ's
        thread, which serves all sockets of the process, would wait for room for those of a buffer that is
        away for minutes."""
        place = f"inproc://monitor.s-{self._socket.FD}"
        self._socket.monitor(place, CONNECTED | KEY_REFUSED | HANDSHAKE_BROKEN | NOBODY_LISTENS)
        monitor: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(place)
        return monitor

    def open_another(self) -> "BufferClient":
        """Opens a client of the same buffer, for another thread."""
        return BufferClient(self.address, timeout_s=self._timeout_s, keys=self._keys, role=self._role)

    def open_wake_up(self) -> "WakeUp":
        """Returns a call with which any thread ends a wait of `receive_answers`."""
        self._wake_up = WakeUp()
        self._poller.register(self._wake_up.fileno(), zmq.POLLIN)
        return self._wake_up

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets for a poller over several clients: when one of them can be read, `receive_answers` has
        something to do."""
        return [self._socket, self._monitor]

    @property
    def silent_s(self) -> float:
        """Seconds for which the buffer has sent nothing while requests were open; 0 while none is."""
        return time.monotonic() - self._heard_at if self._unanswered else 0.0

    def awaits_answers(self, besides: int | None) -> bool:
        """True while requests have no answer yet, beside the one of this number."""
        return bool(self._unanswered.keys() - {besides})

    def send_request(self, request: m.Request, payload: pa.Buffer | None = None) -> int:
        """Sends a request without waiting; returns its number. `receive_answers` yields the answer under that
        number.

        Raises TooLarge for a message that no buffer takes in, without sending it; BufferGone when the buffer
        takes no more messages.
        """
        body = m.encoder.encode(request)
        check_size(request, len(body), 0 if payload is None else payload.size)
        if not self._unanswered:
            self._heard_at = time.monotonic()
        number = next(self._numbers)
        frames = [number.to_bytes(8, "little"), body]
        self._unanswered[number] = frames if payload is None else [*frames, payload]
        self._send_frames(number)
        return number

    def _send_frames(self, number: int) -> None:
        frames = self._unanswered[number]
        try:
            self._socket.send_multipart(frames, copy=len(frames) < 3)
        except zmq.Again as error:
            raise BufferGone(
                f"the buffer at {self.address} takes no more messages for {self._timeout_s} s"
            ) from error

    def receive_answers(self, wait_s: float) -> Iterator[Answer]:
        """Yields the answers that are there; waits up to `wait_s` for the first. Raises KeysRefused."""
        if wait_s > 0:
            self._poller.poll(int(wait_s * 1000))
        if self._wake_up is not None:
            self._wake_up.clear()
        self._read_connection_events()
        while True:
            try:
                number, body, *payload = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            answered = int.from_bytes(number.bytes, "little")
            self._unanswered.pop(answered, None)
            yield Answer(answered, m.reply_decoder.decode(body.buffer), [frame.buffer for frame in payload])

    def _read_connection_events(self) -> None:
        """Sends open requests again to a buffer that was started again. Raises KeysRefused."""
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event = message["event"]
            if event & HANDSHAKE_BROKEN and message["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                # ZeroMQ does not try again.
                raise KeysRefused(
                    f"buffer.keys must hold keys that fit the buffer at {self.address}, or none if it has "
                    "none (see scripts/keys.sh): one side has keys, and the other has none"
                )
            if event & KEY_REFUSED:
                raise KeysRefused(
                    f"buffer.keys must hold a key that the buffer at {self.address} lets in "
                    "(see scripts/keys.sh): it has refused this client's"
                )
            if event & HANDSHAKE_BROKEN:
                self._count_broken_handshake()
                continue
            self._broken_since = None
            if event & NOBODY_LISTENS:
                continue
            if self._connected:
                # Connected again: to another life of the buffer, which knows nothing of the requests under
                # way.
                for number in list(self._unanswered):
                    self._send_frames(number)
            self._connected = True

    def _count_broken_handshake(self) -> None:
        """Raises KeysRefused when every handshake has broken for `BROKEN_S`.

        A buffer that dies or is started again breaks a few handshakes, and one that stands still breaks one
        every half a minute. Keys that do not fit break all of them, at once.
        """
        now = time.monotonic()
        if self._broken_since is None or now - self._broken_at > BROKEN_S:
            self._broken_since = now
        self._broken_at = now
        if now - self._broken_since > BROKEN_S:
            raise KeysRefused(
                f"buffer.keys must hold keys that fit the buffer at {self.address}, or none if it has none "
                f"(see scripts/keys.sh): for {BROKEN_S:.0f} s it has broken off every handshake"
            )

    def call(self, request: m.Request, expect: type[R], *, wait_s: float = 0.0) -> R:
        """Sends a request and returns its answer, which is of type `expect`. Raises as `exchange` does.

        `wait_s` is how long the buffer may let the request wait: the client waits that much longer than
        usual.
        """
        reply, _ = self.exchange(request, wait_s=wait_s)
        assert isinstance(reply, expect), reply
        return reply

    def exchange(
        self, request: m.Request, *, wait_s: float = 0.0, payload: pa.Buffer | None = None
    ) -> tuple[m.Reply, list[memoryview]]:
        """Sends a request and returns (answer, binary frames beside it). Drops other answers that come
        meanwhile.

        Raises BufferGone when there is no answer in time, RefusedByBuffer when the buffer refuses, TooLarge
        as `send_request`.
        """
        number = self.send_request(request, payload)
        deadline = time.monotonic() + self._timeout_s + wait_s
        while (left := deadline - time.monotonic()) > 0:
            for answer in self.receive_answers(left):
                if answer.number == number:
                    if isinstance(answer.reply, m.RefusedRequest):
                        raise RefusedByBuffer(answer.reply.reason)
                    return answer.reply, answer.payload
        raise BufferGone(
            f"no answer from the buffer at {self.address} to {type(request).__name__} "
            f"in {self._timeout_s + wait_s:.0f} s"
        )

    def submit_groups(
        self, generator: str, leases: list[int], rows: list[int], groups: pa.RecordBatch
    ) -> list[str]:
        """Hands in the groups of some leases and waits until they are durable. Returns one verdict for each
        lease.

        `groups` holds the rows of all of them, in the order of `leases`. `rows` says how many are of each.
        """
        request = m.SubmitGroups(generator=generator, leases=leases, rows=rows, schema=SCHEMA_VERSION)
        reply, _ = self.exchange(request, payload=encode_batch(groups))
        assert isinstance(reply, m.LeaseReceipt), reply
        return reply.verdicts

    def take_batch(self, step: int, wait_s: float) -> TakenBatch | m.NotReadyYet | m.RunStopped:
        """Returns the groups that a step trains, mapped from the journal where it is on this host, else
        fetched in parts.

        Reports a group whose bytes have changed to the buffer, which has a fresh one made: until then the
        answer is NotReadyYet. Raises DamagedGroup when the buffer cannot see the damage, though it is there
        again and again.
        """
        reader = self._choose_reader()
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
                waiting_for=f"step {step} waits for {replaced} fresh groups in the place of damaged ones: "
                f"{error}"
            )
        finally:
            reader.drop_last()
        self._num_unseen = 0
        return TakenBatch(step, reply.groups, reply.group_weights, pa.Table.from_batches(batches, SCHEMA))

    def _choose_reader(self) -> "Reader | RemoteReader":
        if self._reader is None:
            where = self.call(m.LocateJournal(), m.JournalLocation)
            here = is_on_this_host(Path(where.folder), where.mark)
            self._reader = Reader(Path(where.folder)) if here else RemoteReader(self._fetch_batch)
        return self._reader

    def _fetch_batch(self, place: m.GroupSlice) -> bytearray:
        """Returns the bytes of a record batch. It comes in parts, so that the buffer answers others between
        them; several are under way at once, so that the buffer need not wait for this client.

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
                under_way[self.send_request(request)] = begin
            for answer in self.receive_answers(0.1):
                if answer.number not in under_way:
                    continue
                heard_at, begin = time.monotonic(), under_way.pop(answer.number)
                if isinstance(answer.reply, m.RefusedRequest):
                    raise RefusedByBuffer(answer.reply.reason)
                part = answer.payload[0] if answer.payload else memoryview(b"")
                if len(part) != min(m.MAX_PART_BYTES, place.size - begin):
                    raise DamagedGroup(
                        f"{len(part)} bytes came of a part at {place.offset + begin} "
                        f"of segment {place.segment}"
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
        if self._wake_up is not None:
            self._wake_up.close()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


def send_evaluation(client: BufferClient, answer: m.SubmitEvaluation, rows: pa.RecordBatch) -> None:
    """Sends the answer to an evaluation prompt without waiting for the receipt; without its rows where they
    are too large for a message."""
    whole = msgspec.structs.replace(answer, num_rows=rows.num_rows)
    try:
        client.send_request(whole, encode_batch(rows))
    except TooLarge as error:
        log.warning("the samples of lease %d are not kept: %s", answer.lease, error)
        client.send_request(answer)


def send_groups(
    client: BufferClient, generator: str, leases: list[int], rows: list[int], groups: pa.RecordBatch
) -> None:
    """Sends the groups of some leases without waiting for the receipt.

    `groups` holds the rows of all of them, in the order of `leases`, and `rows` says how many are of each.
    They travel in one message, or in several where one would be too large. A group that is too large by
    itself fails, with its size.
    """
    request = m.SubmitGroups(generator=generator, leases=leases, rows=rows, schema=SCHEMA_VERSION)
    try:
        client.send_request(request, encode_batch(groups))
    except TooLarge as error:
        middle = len(leases) // 2
        if middle:
            cut = sum(rows[:middle])
            # `take` copies the rows: a slice would travel with the bytes of all others.
            first = groups.take(pa.array(range(cut)))
            second = groups.take(pa.array(range(cut, groups.num_rows)))
            send_groups(client, generator, leases[:middle], rows[:middle], first)
            send_groups(client, generator, leases[middle:], rows[middle:], second)
            return
        log.error("lease %d: %s", leases[0], error)
        num_tokens = int(np.count_nonzero(flatten_column(groups, "sampled")))
        client.send_request(
            m.FailLease(generator=generator, lease=leases[0], num_tokens=num_tokens, error=str(error))
        )
