"""The buffer's socket: requests in, answers out, in one thread, around one `Buffer`.

Each turn of the loop handles what has arrived, answers what can be answered, starts one commit of the journal
for all of it, and sends the answers of earlier turns whose commits are done. While the disk works on one turn
the next begins:

    inbox ─▶ check, carry out or let wait ─▶ tick: expire, cancel ─▶ waiting room ─▶ outbox: commit, send ─┐
      ▲────────────────────────────────────────────────────────────────────────────────────────────────────┘

    inbox.py               messages that are not handled yet
    immediate_answers.py   requests that are carried out in their turn
    waiting_room.py        requests that wait for work, a batch, a probe or news
    outbox.py              answers that wait for the disk
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from buffers import messages as m
from buffers.announcements import Announcer, name_run
from buffers.buffer import Buffer
from buffers.connections import Connections, find_descriptor
from buffers.immediate_answers import ImmediateAnswers
from buffers.inbox import MAX_FRAMES, Inbox
from buffers.keys import Authenticator, may_send, start_authenticator
from buffers.learner_connections import LearnerConnections, LearnerRequest
from buffers.limits import check_bounds
from buffers.metrics import Metrics
from buffers.outbox import SEND_HIGH_WATER_MARK, Outbox
from buffers.parcels import PackedParcels
from buffers.parity_probe import ParityProbes
from buffers.process import keep_freed_memory
from buffers.refusal import Refusal
from buffers.run_status import RunStatus
from buffers.waiting_room import WaitingRoom
from buffers.watchdog import Stuck
from configs.addresses import is_beyond_loopback
from configs.buffer import Durability
from configs.schema import Config
from configs.sockets import randomize_peer_names

__all__ = ["BufferServer", "Stuck"]

log = logging.getLogger("slipstream.buffer")

MAX_UNFINISHED_BYTES = 1 << 30
"""Bytes of messages that have not come whole, over all connections."""
MAX_UNREAD_BYTES = 256 << 20
"""Bytes of answers that a client does not take. Beyond them the server ends the connection."""
MAX_TOTAL_UNREAD_BYTES = 1 << 30
"""Bytes of answers that clients do not take, over all connections. Beyond them the server ends those of the
connections with most."""
RECEIVE_HIGH_WATER_MARK = 4
"""Messages of one connection that wait in ZeroMQ. Few: a message that waits for long has left the processor's
cache."""
TICK_S = 0.05
AWAY_S = 5.0
"""Seconds without a tick after which the server was away itself: its process was stopped, or it has waited
for the disk."""
METRICS_S = 1.0
"""Seconds after which Prometheus is shown another status. It describes each of perhaps a thousand roles."""


class BufferServer:
    """Serves one `Buffer` over one socket."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        address: str | None = None,
        config_text: str = "",
        parcels: Path | None = None,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds `address`, or else `config.buffer.address` (the attribute `address` names the port), and
        opens the journal in `folder`. `parcels`: the list of the files that hosts may fetch.

        With `resume_step`, goes on at the checkpoint of that step. Raises ValueError when the address is
        taken, another process writes the journal, the keys are missing, or there is no such step.
        """
        self._config, self._clock = config, clock
        self._learners = LearnerConnections()
        self._ticked_at = self._shown_at = float("-inf")
        self._present_at = float("inf")
        """When the server last came round, in seconds of the host's monotonic clock."""
        self._deadlines_due = False
        """True when the waiting room must look for overdue requests: a tick has come, or a request that does
        not wait for the next one."""
        self._running = True
        keep_freed_memory()
        randomize_peer_names()
        # The server has a context of its own, because a context has one authenticator only.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._authenticator: Authenticator | None = None
        self._connections = Connections(
            self._socket,
            encrypted=config.buffer.keys is not None,
            max_message=m.MAX_PAYLOAD_BYTES + m.MAX_BODY_BYTES,
            max_waiting=RECEIVE_HIGH_WATER_MARK,
            max_total=MAX_UNFINISHED_BYTES,
            max_unread=MAX_UNREAD_BYTES,
            max_total_unread=MAX_TOTAL_UNREAD_BYTES,
        )
        try:
            self._bind_socket(address or config.buffer.address)
            self.buffer = Buffer(config, folder, resume_step=resume_step, clock=clock)
            self._metrics = Metrics(config.buffer.metrics_port)
            probes = ParityProbes(config, folder)
            announcer = Announcer(self.buffer, name_run(self.buffer.journal.folder, config))
        except BaseException:
            self._connections.close()
            self._socket.close(linger=0)
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.term()
            raise
        waits_for_disk = config.buffer.durability is not Durability.none
        self._inbox = Inbox(self._socket, self._connections)
        self._outbox = Outbox(self._socket, self._connections, self.buffer, waits_for_disk=waits_for_disk)
        self._waiting_room = WaitingRoom(self.buffer, probes, announcer, self._outbox)
        self._immediate_answers = ImmediateAnswers(
            self.buffer, probes, announcer, self._waiting_room, config_text, PackedParcels(parcels), clock
        )
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("the buffer answers at %s", self.address)

    def _bind_socket(self, address: str) -> None:
        self._socket.setsockopt(zmq.LINGER, 500)
        # Without ROUTER_MANDATORY, ZeroMQ would drop answers that cannot be delivered, and the leases in
        # them.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_PAYLOAD_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        settings = self._config.buffer
        if settings.keys is not None:
            self._authenticator = start_authenticator(self._socket, Path(settings.keys))
        elif is_beyond_loopback(settings.address):
            raise ValueError(
                "buffer.keys must name a folder of keys where buffer.address is beyond the loopback "
                f"interface, got none with {settings.address!r}"
            )
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"buffer.address must be free, got {address}: {error.strerror}") from error

    def run(self) -> None:
        """Consumes every role's requests, produces their answers, the journal and the ledger.

        Waits for messages only, at most `TICK_S`. Ends when `stop` has been called, or with `Stuck` when
        nothing has moved for twice `buffer.watchdog_s`.
        """
        try:
            while self._running:
                self._handle_messages()
                self._tick()
                self._waiting_room.answer_ready_requests(self._clock(), look_at_deadlines=self._deadlines_due)
                self._deadlines_due = False
                self._outbox.end_turn()
        except BaseException:
            self.close(in_good_order=False)
            raise
        self.close()

    def stop(self) -> None:
        """Ends `run` after the turn under way. May be called from another thread."""
        self._running = False

    def close(self, *, in_good_order: bool = True) -> None:
        """Makes durable what is not yet, and releases address and journal."""
        try:
            self.buffer.close(in_good_order=in_good_order)
        finally:
            # All sockets must be closed: a context with open sockets holds its process up for ever.
            self._connections.close()
            self._socket.close()
            self._metrics.close()
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.term()

    def status(self) -> RunStatus:
        return self._waiting_room.make_status()

    # ---- the turn

    def _handle_messages(self) -> None:
        wait_s = 0.0 if self._outbox.is_committing else TICK_S
        for frames in self._inbox.take_messages(wait_s, lambda: self._outbox.is_full):
            if 3 <= len(frames) <= MAX_FRAMES:
                self._handle_message(frames)
            else:
                self.buffer.refuse_message(
                    "malformed message", f"a message must have 3 or {MAX_FRAMES} frames"
                )

    def _handle_message(self, frames: list[zmq.Frame]) -> None:
        """Answers a request, or lets it wait for its answer."""
        sender, number = frames[0].bytes, frames[1].bytes
        try:
            request, user = self._read_request(sender, frames)
            if isinstance(request, m.WaitingRequest):
                self._waiting_room.add_request(sender, number, request, user, self._clock())
                self._deadlines_due |= request.wait_s < TICK_S
                return
            payload = [frame.buffer for frame in frames[3:]]
            self._outbox.add_answer(sender, number, *self._immediate_answers.carry_out(request, payload))
        except m.UndecodableRequest as error:
            refused = self.buffer.refuse_message("malformed message", str(error))
            self._outbox.add_answer(sender, number[: m.MAX_NUMBER_BYTES], refused)
            return
        except Refusal as refusal:
            self._outbox.add_answer(sender, number, self.buffer.refuse_message(refusal.reason, str(refusal)))
            return
        if isinstance(request, m.RewindToStep):
            self._begin_learner_life(sender)

    def _read_request(self, sender: bytes, frames: list[zmq.Frame]) -> tuple[m.Request, str]:
        """Returns (request, its sender's public key). Raises UndecodableRequest or Refusal for one that is
        not let in."""
        number, body, user = frames[1].bytes, frames[2].buffer, ""
        if len(body) > m.MAX_BODY_BYTES or len(number) > m.MAX_NUMBER_BYTES:
            raise m.UndecodableRequest(
                f"a request must have at most {m.MAX_BODY_BYTES} bytes and its number {m.MAX_NUMBER_BYTES}, "
                f"got {len(body)} and {len(number)}"
            )
        request = m.decode_request(body)
        if self._authenticator is not None:
            user = str(frames[2].get("User-Id"))
            self._check_key(self._authenticator, user, request, frames[2])
        check_bounds(request, self.buffer, self._config)
        if isinstance(request, LearnerRequest):
            if self._learners.is_outdated(sender):
                raise Refusal("dead learner", f"{type(request).__name__} of a life before the rewind")
            self._learners.add_sender(sender)
        return request, user

    def _check_key(
        self, authenticator: Authenticator, user: str, request: m.Request, frame: zmq.Frame
    ) -> None:
        """Raises Refusal for a request that the key's owner may not send. A revoked key loses its
        connection."""
        name, roles = type(request).__name__, authenticator.find_roles(user)
        if not roles:
            self._connections.shut_down(find_descriptor(frame))
            raise Refusal("revoked key", f"{name} with key {user}, which is not allowed any more")
        if not may_send(roles, request):
            raise Refusal("forbidden", f"{name} must not be sent with the key of a {' and '.join(roles)}")

    def _begin_learner_life(self, sender: bytes) -> None:
        """Another life of the learner begins. Requests of the one before must not reach the rewound buffer,
        and answers to them must not consume anything: those that wait are dropped, those that come late are
        refused."""
        self._learners.begin_life(sender)
        self._waiting_room.drop_requests(
            lambda waiter: (
                isinstance(waiter.request, LearnerRequest) and self._learners.is_outdated(waiter.sender)
            )
        )

    def _tick(self) -> None:
        """Does every `TICK_S` what time alone brings about."""
        now = self._clock()
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        self._check_connections()
        self._note_presence()
        self.buffer.check_time()
        if self._metrics.is_served and now - self._shown_at >= METRICS_S:
            self._shown_at = now
            self._metrics.update(self.status())
        self._deadlines_due = True

    def _note_presence(self) -> None:
        """Lets leases run longer where this server was away itself, because it has not read all heartbeats
        that have come since."""
        now = time.monotonic()
        if (away_s := now - self._present_at) > AWAY_S:
            log.warning("the buffer stood still for %.0f s: leases run so much longer", away_s)
            self.buffer.extend_leases(away_s)
        self._present_at = now

    def _check_connections(self) -> None:
        """Ends connections that take more than their share, and forgets those that have ended."""
        drained = self._inbox.is_drained
        for num_bytes in self._connections.shut_down_unfinished(drained=drained):
            self.buffer.refuse_message(
                "unfinished message", f"{num_bytes:,} bytes of a message that does not end"
            )
        for num_bytes in self._connections.shut_down_deaf():
            detail = f"{num_bytes:,} bytes of answers that a client does not take"
            self.buffer.refuse_message("unread answers", detail)
        for _ in range(self._connections.shut_down_surplus()):
            detail = "half of the file descriptors that this process may have are taken"
            self.buffer.refuse_message("too many connections", detail)
        self._learners.forget_senders(self._connections.take_gone(drained=drained, busy=self._inbox.senders))
        if self._authenticator is not None:
            self._authenticator.check()
            find_roles = self._authenticator.find_roles
            self._waiting_room.drop_requests(lambda waiter: not find_roles(waiter.user))
