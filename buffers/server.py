"""The buffer's sockets: requests in, answers out, in one thread, around one `Buffer`.

Each turn of the loop takes in what has arrived, answers what can be answered, makes the journal durable once for all of it,
and only then sends the answers. While the disk works on one turn the next begins:

    wait for messages ─▶ handle each ─▶ expire, cancel ─▶ serve those who wait ─▶ commit ─▶ send ─┐
          ▲────────────────────────────────────────────────────────────────────────────────────┘

A request that cannot be answered yet (no work, no batch, no news) is kept with its deadline and answered by then at the latest.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.connections import Connections, descriptor_of
from buffers.keys import Door, may_say, open_door
from buffers.limits import check_bounds
from buffers.metrics import Metrics
from buffers.parked import MAX_PARKED, MAX_PARKED_OF_ONE, Parked, ParkedRequests, Reply, Waits, deal
from buffers.probe import Probes
from buffers.process import keep_freed_memory
from buffers.refusal import Refusal
from buffers.run_status import RunStatus
from buffers.watchdog import Stuck
from configs.buffer import Durability
from configs.schema import Config
from configs.sockets import randomize_peer_names

__all__ = ["BufferServer", "Stuck"]

log = logging.getLogger("slipstream.buffer")

MAX_FRAMES = 4
MAX_UNFINISHED_BYTES = 1 << 30
"""Of all connections' messages that have not come whole."""
SEND_HIGH_WATER_MARK = 1000
"""Answers that wait for a client to read them: those beyond are dropped."""
MAX_UNREAD_BYTES = 256 << 20
"""The bytes of answers that a client does not take: beyond it the connection is ended."""
MAX_OUTBOX_BYTES = 64 << 20
"""Answers of a turn: what is asked beyond them waits for the next."""
MAX_RECORDS_PER_NEWS = 500
RECEIVE_HIGH_WATER_MARK = 4
"""Messages of a connection that wait here. Few: what has waited long has left the processor's cache."""
MAX_PER_TURN = 1000
MAX_BYTES_PER_TURN = 4 << 20
"""Of submissions: then those who wait for an answer get it."""
MAX_INBOX_BYTES = 64 << 20
MAX_COMMITTING = 3
"""Turns whose answers wait for the disk, at most, while the next is under way."""
TICK_S = 0.05
FROM_LEARNER = (
    m.PublishVersion
    | m.ReportTrainedStep
    | m.ReportCheckpoint
    | m.RequestBatch
    | m.RequestParityProbe
    | m.ReportDamagedGroups
    | m.AwaitEvaluations
)
"""Requests that a rank of the learner alone makes, and that count no more once another life of it has begun."""


class BufferServer:
    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        config_text: str = "",
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds `config.buffer.address` (see `address` for the port) and opens the journal in `folder`.

        With `resume_step`, takes up the journal at the checkpoint of that step. Raises ValueError when the address is taken,
        the journal is, the keys are missing, or there is no such step.
        """
        self._config, self._config_text, self._clock = config, config_text, clock
        self._parked = ParkedRequests()
        self._outbox: list[Reply] = []
        self._outbox_bytes = 0
        self._committing: deque[tuple[Future[None], list[Reply]]] = deque()  # with the answers
        self._inbox: deque[list[zmq.Frame]] = deque()
        self._inbox_bytes = 0
        self._learners: set[bytes] = set()  # senders of the learner's messages
        self._dead: set[bytes] = set()  # those of them that lived before the last rewind
        self._queued: Counter[bytes] = Counter()  # messages in the inbox, by sender
        self._ticked_at = float("-inf")
        self._serve_overdue = False
        self._running = True
        self._drained = True  # the last turn has read all whole messages that had come
        keep_freed_memory()
        randomize_peer_names()
        self._context = zmq.Context()  # of its own: a context has one authenticator
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._door: Door | None = None
        self._connections = Connections(
            self._socket, encrypted=config.buffer.keys is not None, max_message=m.MAX_PAYLOAD_BYTES + m.MAX_BODY_BYTES,
            max_waiting=RECEIVE_HIGH_WATER_MARK, max_total=MAX_UNFINISHED_BYTES, max_unread=MAX_UNREAD_BYTES,
        )  # fmt: skip
        try:
            self._socket.setsockopt(zmq.LINGER, 500)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says which answers cannot be delivered
            self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_PAYLOAD_BYTES)
            self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
            if config.buffer.keys is not None:
                self._door = open_door(self._socket, Path(config.buffer.keys))
            try:
                self._socket.bind(config.buffer.address)
            except zmq.ZMQError as error:
                raise ValueError(
                    f"buffer.address must be free, got {config.buffer.address}: {error.strerror}"
                ) from error
            self.buffer = Buffer(config, folder, resume_step=resume_step, clock=clock)
            self._probes = Probes(config)
            self._metrics = Metrics(config.buffer.metrics_port)
        except BaseException:
            self._connections.close()
            self._socket.close(linger=0)
            if self._door is not None:
                self._door.close()
            self._context.term()
            raise
        self._change = int(
            1e9 * self.buffer.journal.began_at
        )  # and up: a later life counts on from a higher number
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("the buffer answers at %s", self.address)

    def run(self) -> None:
        """Consumes every role's requests, produces their answers, the journal and the ledger.

        Waits for messages only, at most `TICK_S`. Ends when `stop` has been called, or with `Stuck` when nothing has moved
        for twice `buffer.watchdog_s`.
        """
        try:
            while self._running:
                self._receive()
                self._tick()
                self._serve_parked()
                if self._config.buffer.durability is Durability.none:
                    self._send(self._outbox)
                    self._outbox = []
                self._committing.append((self.buffer.start_commit(), self._outbox))
                self._outbox, self._outbox_bytes = [], 0
                self._send_committed()
        except BaseException:
            self.close(in_good_order=False)
            raise
        self.close()

    def stop(self) -> None:
        """Ends `run` after the turn under way. May be called from another thread."""
        self._running = False

    def close(self, *, in_good_order: bool = True) -> None:
        """Makes durable what is not yet, and lets go of address and journal."""
        try:
            self.buffer.close(in_good_order=in_good_order)
        finally:  # a context whose sockets are open holds its process up for ever
            self._connections.close()
            self._socket.close()
            self._metrics.close()
            if self._door is not None:
                self._door.close()
            self._context.term()

    def status(self) -> RunStatus:
        return self.buffer.make_status(self._waiting_for())

    # ---- the turn

    def _receive(self) -> None:
        """Takes in all that has come, then handles as many submissions as a turn has time for: whoever only asks is not kept
        waiting behind a thousand of them. What one sender has sent is handled in its order."""
        patience_s = 0.0 if self._inbox or self._committing else TICK_S
        self._drained = False
        if not self._socket.poll(int(patience_s * 1000)) and not self._inbox:
            self._drained = True
            return
        for _ in range(MAX_PER_TURN):
            if self._inbox_bytes > MAX_INBOX_BYTES or self._outbox_bytes > MAX_OUTBOX_BYTES:
                break
            if (frames := self._connections.receive(MAX_FRAMES)) is None:
                self._drained = True
                break
            if not 3 <= len(frames) <= MAX_FRAMES:
                self.buffer.refuse_message(
                    "malformed message", f"a message must have 3 or {MAX_FRAMES} frames"
                )
            elif len(frames) == MAX_FRAMES or frames[0].bytes in self._queued:
                self._inbox.append(frames)
                self._queued[frames[0].bytes] += 1
                self._inbox_bytes += sum(map(len, frames))
            else:
                self._handle(frames)
        num_bytes = 0
        while self._inbox and num_bytes < MAX_BYTES_PER_TURN:
            frames = self._inbox.popleft()
            num_bytes += sum(map(len, frames))
            sender = frames[0].bytes
            self._queued[sender] -= 1
            if not self._queued[sender]:
                del self._queued[sender]
            self._handle(frames)
        self._inbox_bytes -= num_bytes

    def _handle(self, frames: list[zmq.Frame]) -> None:
        sender, number, body = frames[0].bytes, frames[1].bytes, frames[2].buffer
        payload = [frame.buffer for frame in frames[3:]]
        try:
            if len(body) > m.MAX_BODY_BYTES or len(number) > m.MAX_NUMBER_BYTES:
                raise m.UndecodableRequest(
                    f"a request must have at most {m.MAX_BODY_BYTES} bytes and its number {m.MAX_NUMBER_BYTES}, got "
                    f"{len(body)} and {len(number)}"
                )
            request, user = m.decode_request(body), ""
            if self._door is not None:
                user = str(frames[2].get("User-Id"))
                self._check_key(self._door, user, request, frames[2])
            check_bounds(request, self.buffer, self._config)
        except m.UndecodableRequest as error:
            self._answer(
                sender,
                number[: m.MAX_NUMBER_BYTES],
                self.buffer.refuse_message("malformed message", str(error)),
            )
            return
        except Refusal as refusal:
            self._answer(sender, number, self.buffer.refuse_message(refusal.reason, str(refusal)))
            return
        if isinstance(request, FROM_LEARNER):
            if sender in self._dead:  # what it has sent came late
                late = f"{type(request).__name__} of a life before the rewind"
                self._answer(sender, number, self.buffer.refuse_message("dead learner", late))
                return
            self._learners.add(sender)
        if isinstance(request, Waits):
            self._park(sender, number, request, user)
            return
        if isinstance(request, m.ReadBatchPart):
            self._answer(sender, number, m.BatchPart(), [self.buffer.progress.read_part(request)])
            return
        try:
            self._answer(sender, number, self._reply(request, payload))
        except Refusal as refusal:
            self._answer(sender, number, self.buffer.refuse_message(refusal.reason, str(refusal)))
            return
        if isinstance(request, m.RewindToStep):
            self._bury_learners(but=sender)

    def _check_key(self, door: Door, user: str, request: m.Request, frame: zmq.Frame) -> None:
        """Raises Refusal for what the owner of a key may not say. A key that is not allowed any more loses its connection."""
        roles = door.roles_of(user)
        if not roles:
            self._connections.shut_down(descriptor_of(frame))
            raise Refusal(
                "revoked key", f"{type(request).__name__} with key {user}, which is not allowed any more"
            )
        if not may_say(roles, request):
            raise Refusal(
                "forbidden",
                f"{type(request).__name__} must not be said with the key of a {' and '.join(roles)}",
            )

    def _bury_learners(self, but: bytes) -> None:
        """Another life of the learner begins. What the one before has sent and nobody has read yet must not reach it."""
        self._dead |= self._learners - {but}
        self._learners &= {but}
        self._parked.forget(
            lambda parked: isinstance(parked.request, FROM_LEARNER) and parked.sender in self._dead
        )

    def _park(self, sender: bytes, number: bytes, request: Waits, user: str) -> None:
        if not self._parked.has_room(sender):
            many = f"at most {MAX_PARKED_OF_ONE} requests of a client, and {MAX_PARKED} of all, may wait for an answer"
            self._answer(sender, number, self.buffer.refuse_message("too many requests", many))
            return
        if isinstance(request, m.RequestLeases):
            self._end_asks(request.generator, but=sender)
        self._parked.park(sender, number, request, user, self._clock())
        self._ticked_at = float("-inf")  # it may have to be answered at once

    def _reply(self, request: m.Request, payload: list[memoryview]) -> m.Reply:
        buffer = self.buffer
        match request:
            case m.SubmitGroups():
                if len(payload) != 1:
                    raise Refusal(
                        "malformed group", f"a submission must carry one Arrow frame, got {len(payload)}"
                    )
                verdicts = buffer.intake.submit_groups(
                    request.generator, request.leases, request.schema, payload[0]
                )
                return m.LeaseReceipt(leases=request.leases, verdicts=verdicts)
            case m.SubmitParityProbe():
                self._probes.take(request, payload, buffer.progress.version, buffer.progress.manifest_locator)
            case m.GeneratorHeartbeat():
                revoked = buffer.take_heartbeat(request)
                return m.GeneratorStanding(
                    revoked=revoked, version=buffer.progress.version, manifest_locator=buffer.progress.manifest_locator,
                    announcement_number=self._change,
                    ended=self._stopping,
                )  # fmt: skip
            case m.RoleHeartbeat(role=role):
                if request.ended:
                    buffer.fleet.forget(role)
                else:
                    buffer.fleet.hear(role, request, self._clock())
            case m.SubmitEvaluation(generator=name, lease=lease, reward=reward):
                return m.LeaseReceipt(
                    leases=[lease], verdicts=[buffer.submit_evaluation(name, lease, reward)]
                )
            case m.FailLease(lease=lease):
                verdict = buffer.fail_lease(lease, request.num_tokens, request.error, revoked=request.revoked)
                return m.LeaseReceipt(leases=[lease], verdicts=[verdict])
            case m.JoinRun(generator=name):
                self._end_asks(name)
                buffer.join_generator(name)
                return m.JoinedRun(config=self._config_text)
            case m.LeaveRun(generator=name, error=why):
                self._end_asks(name)
                buffer.remove_generator(name, why)
            case m.LocateJournal():
                return m.JournalLocation(
                    folder=str(buffer.journal.folder.resolve()), mark=buffer.journal.mark
                )
            case m.ReportDamagedGroups():
                return m.ReplacedGroups(count=buffer.progress.replace_damaged(request.groups))
            case m.PublishVersion():
                buffer.progress.publish_version(request.version, request.manifest_locator)
                self._change += 1
            case m.ReportTrainedStep():
                buffer.progress.finish_step(request)
            case m.ReportCheckpoint():
                buffer.progress.keep_checkpoint(request.step, request.oldest)
            case m.RewindToStep(step=step):
                try:
                    buffer.progress.rewind_to(step)
                except ValueError as error:
                    raise Refusal("wrong step", str(error)) from error
                self._change += 1
            case m.StopRun():
                buffer.stop(request.reason)
        return m.Acknowledged()

    def _end_asks(self, generator: str, but: bytes = b"") -> None:
        """Answers what a generator has asked before it left, began or connected anew with no leases, in case that it listens."""
        for parked in self._parked.take_asks(generator, but):
            self._answer(parked.sender, parked.number, self._work([]))

    def _answer(
        self, sender: bytes, number: bytes, reply: m.Reply, payload: list[bytes] | None = None
    ) -> None:
        leases = reply.leases if isinstance(reply, m.LeaseGrant) else []
        frames = [sender, number, m.encoder.encode(reply), *(payload or [])]
        self._outbox_bytes += sum(map(len, frames))
        self._outbox.append(Reply(frames, leases))

    def _answer_parked(self, parked: Parked[Any], reply: m.Reply, payload: list[bytes] | None = None) -> None:
        self._parked.let_go(parked)
        self._answer(parked.sender, parked.number, reply, payload)

    def _send(self, replies: list[Reply]) -> None:
        for reply in replies:
            try:
                self._socket.send_multipart(reply.frames, zmq.NOBLOCK, copy=len(reply.frames) < 4)
                self._connections.count_sent(reply.frames)
            except zmq.Again:
                self.buffer.refuse_message(
                    "unread answers", f"{SEND_HIGH_WATER_MARK} answers wait for a client to read them"
                )
                self._take_back(reply.leases)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._take_back(reply.leases)  # the client has gone

    def _take_back(self, leases: list[m.Lease]) -> None:
        for lease in leases:
            self.buffer.fail_lease(
                lease.id, 0, "its generator had gone before the lease could reach it", revoked=True
            )

    def _send_committed(self) -> None:
        """Sends the answers of turns that are durable; waits for the disk when too many wait for it."""
        while self._committing and (len(self._committing) > MAX_COMMITTING or self._committing[0][0].done()):
            done, replies = self._committing.popleft()
            done.result()
            self._send(replies)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        self._watch_connections()
        self.buffer.check_time()
        if self._metrics.wanted:
            self._metrics.update(self.status())
        self._serve_overdue = True

    def _watch_connections(self) -> None:
        for num_bytes in self._connections.shut_down_unfinished(drained=self._drained):
            self.buffer.refuse_message(
                "unfinished message", f"{num_bytes:,} bytes of a message that does not end"
            )
        for num_bytes in self._connections.shut_down_deaf():
            self.buffer.refuse_message(
                "unread answers", f"{num_bytes:,} bytes of answers that a client does not take"
            )
        for _ in range(self._connections.shut_down_surplus()):
            self.buffer.refuse_message(
                "too many connections", "half of the file descriptors that this process may have are taken"
            )
        gone = self._connections.take_gone(drained=self._drained, busy=self._queued)
        self._learners.difference_update(gone)
        self._dead.difference_update(gone)
        if self._door is not None:
            self._door.check()
            roles_of = self._door.roles_of
            self._parked.forget(lambda parked: not roles_of(parked.user))

    @property
    def _stopping(self) -> bool:
        return self.buffer.stopping is not None

    def _serve_parked(self) -> None:
        now = self._clock()
        self._deal()
        if self._serve_overdue:
            self._serve_overdue = False
            for ask in [ask for ask in self._parked.asks if now >= ask.deadline]:
                self._answer_parked(ask, self._work([]))
            self._parked.asks = deque(ask for ask in self._parked.asks if now < ask.deadline)
        self._parked.nexts = [p for p in self._parked.nexts if not self._serve_next(p, now)]
        self._parked.probes = [p for p in self._parked.probes if not self._serve_probe(p, now)]
        self._parked.finishes = [p for p in self._parked.finishes if not self._serve_finish(p, now)]
        self._parked.watches = [p for p in self._parked.watches if not self._serve_watch(p, now)]

    def _deal(self) -> None:
        """Deals what may be leased to all who ask, evenly; those who get nothing go on waiting, at the head of the queue."""
        if self._stopping:
            for parked in self._parked.asks:
                self._answer_parked(parked, self._work([]))
            self._parked.asks.clear()
        if not self._parked.asks or not (room := self.buffer.count_openings()):
            return
        for hand in deal(
            self._parked.asks, room, self.buffer.lease_next
        ):  # those who got something are the first
            if not hand:
                break
            self._answer_parked(self._parked.asks.popleft(), self._work(hand))

    def _work(self, leases: list[m.Lease]) -> m.LeaseGrant:
        buffer = self.buffer
        return m.LeaseGrant(
            leases=leases,
            version=buffer.progress.version,
            manifest_locator=buffer.progress.manifest_locator,
            announcement_number=self._change,
            ended=self._stopping,
        )

    def _serve_next(self, parked: Parked[m.RequestBatch], now: float) -> bool:
        """Answers if it can or must; true if it has."""
        try:
            handout = self.buffer.progress.hand_out(parked.request.step)
        except (Refusal, IndexError) as refusal:
            self._answer_parked(parked, self.buffer.refuse_message("wrong step", str(refusal)))
            return True
        if self._stopping:
            self._answer_parked(parked, m.RunStopped(reason=self.buffer.stopping or ""))
        elif handout is not None:
            slices = self.buffer.progress.list_slices(handout)
            reply = m.BatchOffer(
                step=parked.request.step,
                groups=handout.groups,
                slices=slices,
                group_weights=handout.group_weights,
            )
            self._answer_parked(parked, reply)
        elif now >= parked.deadline:
            self._answer_parked(parked, m.NotReadyYet(waiting_for=self._waiting_for()))
        else:
            return False
        return True

    def _serve_probe(self, parked: Parked[m.RequestParityProbe], now: float) -> bool:
        if self._stopping:
            self._answer_parked(parked, m.RunStopped(reason=self.buffer.stopping or ""))
        elif (rows := self._probes.rows(self.buffer.progress.manifest_locator)) is not None:
            self._answer_parked(parked, m.ParityProbeRows(), [rows])
        elif now >= parked.deadline:
            self._answer_parked(parked, m.NotReadyYet(waiting_for=self._waiting_for()))
        else:
            return False
        return True

    def _serve_finish(self, parked: Parked[m.AwaitEvaluations], now: float) -> bool:
        if self._stopping or not self.buffer.evaluations.num_unanswered:
            self._answer_parked(parked, m.Acknowledged())
        elif now >= parked.deadline:
            self._answer_parked(parked, m.NotReadyYet(waiting_for=self._waiting_for()))
        else:
            return False
        return True

    def _serve_watch(self, parked: Parked[m.WatchRun], now: float) -> bool:
        progress, after = self.buffer.progress, parked.request.after
        if (progress.num_records <= after and now < parked.deadline) or self._outbox_bytes > MAX_OUTBOX_BYTES:
            return False
        first = max(0, after - (progress.num_records - len(progress.records)))
        news = m.RunNews(
            records=progress.records[first : first + MAX_RECORDS_PER_NEWS],
            evaluations=self.buffer.evaluations.records,
            status=self.status(),
        )
        self._answer_parked(parked, news)
        return True

    def _waiting_for(self) -> str:
        parked = self._parked
        waits = bool(parked.nexts or parked.probes)
        return self.buffer.describe_waiting(
            learner_waits=waits, probes=bool(parked.probes), num_asking=len(parked.asks)
        )
