"""Answers on their way to clients. An answer leaves after everything that it confirms is durable.

turn n    requests ─▶ answers ─▶ commit n ─┐ the disk works ...
turn n+1  requests ─▶ answers ─▶ commit n+1│
                                           └▶ ... and then the answers of turn n are sent
"""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa
import zmq

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.connections import Connections

log = logging.getLogger("slipstream.buffer")

SEND_HIGH_WATER_MARK = 1000
"""Answers that wait for a client to read them. ZeroMQ drops those beyond."""
MAX_OUTBOX_BYTES = 64 << 20
"""Answers of one turn in bytes. Requests beyond wait for the next turn."""
MAX_COMMITTING = 3
"""Turns whose answers wait for the disk, at most, while the next turn is under way."""


@dataclass(frozen=True, slots=True)
class OutgoingAnswer:
    """An answer as frames: sender, number, reply, and at most one binary frame."""

    frames: list[bytes | pa.Buffer]
    leases: list[m.Lease]
    """The leases that it gives. The buffer takes them back when the answer cannot be delivered."""


class Outbox:
    """Holds the answers of each turn until the turn is durable."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        connections: Connections,
        buffer: Buffer,
        *,
        waits_for_disk: bool,
    ) -> None:
        """`waits_for_disk` is false where `buffer.durability` promises nothing: then answers leave at
        once."""
        self._socket, self._connections, self._buffer = socket, connections, buffer
        self._waits_for_disk = waits_for_disk
        self._answers: list[OutgoingAnswer] = []
        self._num_bytes = 0
        self._committing: deque[tuple[Future[None], list[OutgoingAnswer]]] = deque()

    @property
    def is_full(self) -> bool:
        """True when the answers of this turn hold so many bytes that further ones had better wait."""
        return self._num_bytes > MAX_OUTBOX_BYTES

    @property
    def is_committing(self) -> bool:
        """True while answers of earlier turns wait for the disk."""
        return bool(self._committing)

    def add_answer(self, sender: bytes, number: bytes, reply: m.Reply, payload: Sequence[bytes] = ()) -> None:
        leases = reply.leases if isinstance(reply, m.LeaseGrant) else []
        frames = [sender, number, m.encoder.encode(reply), *payload]
        self._num_bytes += sum(map(len, frames))
        self._answers.append(OutgoingAnswer(frames, leases))

    def end_turn(self) -> None:
        """Commits what this turn has changed, and sends the answers of all turns that are durable by now.

        Waits for the disk when too many turns wait for it.
        """
        if not self._waits_for_disk:
            self._send_answers(self._answers)
            self._answers = []
        self._committing.append((self._buffer.start_commit(), self._answers))
        self._answers, self._num_bytes = [], 0
        while self._committing and (len(self._committing) > MAX_COMMITTING or self._committing[0][0].done()):
            committed, answers = self._committing.popleft()
            committed.result()
            self._send_answers(answers)

    def _send_answers(self, answers: list[OutgoingAnswer]) -> None:
        for answer in answers:
            try:
                # pyzmq keeps large frames alive by itself; copying is faster for small ones.
                self._socket.send_multipart(answer.frames, zmq.NOBLOCK, copy=len(answer.frames) < 4)
                self._connections.count_sent(answer.frames)
            except zmq.Again:
                detail = f"{SEND_HIGH_WATER_MARK} answers wait for a client to read them"
                self._buffer.refuse_message("unread answers", detail)
                self._take_back_leases(answer)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._take_back_leases(answer)  # the client has gone

    def _take_back_leases(self, answer: OutgoingAnswer) -> None:
        for lease in answer.leases:
            error = "its generator had gone before the lease could reach it"
            self._buffer.fail_lease(lease.id, 0, error, revoked=True)
