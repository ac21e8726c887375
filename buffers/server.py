"""The buffer's sockets: requests in, answers out, in one thread, around one `Buffer`.

Each turn of the loop takes in what has arrived, answers what can be answered, makes the journal durable once for all of it,
and only then sends the answers. While the disk works on one turn the next begins:

    wait for messages ─▶ handle each ─▶ expire, cancel ─▶ serve those who wait ─▶ commit ─▶ send ─┐
          ▲────────────────────────────────────────────────────────────────────────────────────┘

A request that cannot be answered yet (no work, no batch, no news) is kept with its deadline and answered by then at the latest.
"""

import ctypes
import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import pyarrow as pa
import zmq

from buffers import messages as m
from buffers.buffer import Buffer, Refusal, Stuck
from buffers.keys import Door, open_door
from buffers.metrics import Metrics
from configs.schema import Config, Durability

__all__ = ["BufferServer", "Stuck"]

log = logging.getLogger("slipstream.buffer")
R = TypeVar("R")

MAX_MESSAGE_BYTES = 256 << 20
MAX_BODY_BYTES = 4 << 20
MAX_FRAMES = 4
SEND_HIGH_WATER_MARK = 10_000
RECEIVE_HIGH_WATER_MARK = 4
"""Messages of a connection that wait here. Few: what has waited long has left the processor's cache."""
MAX_PER_TURN = 1000
MAX_BYTES_PER_TURN = 4 << 20
"""Of submissions: then those who wait for an answer get it."""
MAX_INBOX_BYTES = 64 << 20
MAX_COMMITTING = 3
"""Turns whose answers wait for the disk, at most, while the next is under way."""
MAX_WAIT_S = 60.0
TICK_S = 0.05


@dataclass(slots=True)
class Parked(Generic[R]):
    """A request that waits for its answer."""

    sender: bytes
    number: bytes
    request: R
    deadline: float


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
        self._asks: deque[Parked[m.Ask]] = deque()
        self._nexts: list[Parked[m.Next]] = []
        self._finishes: list[Parked[m.Finish]] = []
        self._watches: list[Parked[m.Watch]] = []
        self._outbox: list[list[bytes | pa.Buffer]] = []
        self._committing: deque[tuple[Future[None], list[list[bytes | pa.Buffer]]]] = deque()  # with the answers
        self._inbox: deque[list[zmq.Frame]] = deque()
        self._inbox_bytes = 0
        self._learners: set[bytes] = set()  # senders of the learner's messages
        self._dead: set[bytes] = set()  # those of them that lived before the last rewind
        self._queued: Counter[bytes] = Counter()  # messages in the inbox, by sender
        self._ticked_at = float("-inf")
        self._serve_overdue = False
        self._running = True
        self._change = time.time_ns()  # from here on up: a later life of the buffer counts on from a higher number

        _allow_many_connections()
        _keep_freed_memory()
        self._context = zmq.Context()  # of its own: a context has one authenticator
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._door: Door | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 500)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
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
            self._metrics = Metrics(config.buffer.metrics_port)
        except BaseException:
            self._socket.close(linger=0)
            if self._door is not None:
                self._door.close()
            self._context.term()
            raise
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
                self._outbox = []
                self._send_committed()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` after the turn under way. May be called from another thread."""
        self._running = False

    def close(self) -> None:
        """Makes durable what is not yet, and lets go of address and journal."""
        self.buffer.close()
        self._socket.close()
        self._metrics.close()
        if self._door is not None:
            self._door.close()
        self._context.term()

    def status(self) -> m.Status:
        return self.buffer.status(self._waiting_for())

    # ---- the turn

    def _receive(self) -> None:
        """Takes in all that has come, then handles as many submissions as a turn has time for: whoever only asks is not kept
        waiting behind a thousand of them. What one sender has sent is handled in its order."""
        patience_s = 0.0 if self._inbox or self._committing else TICK_S
        if not self._socket.poll(int(patience_s * 1000)) and not self._inbox:
            return
        for _ in range(MAX_PER_TURN):
            if self._inbox_bytes > MAX_INBOX_BYTES or (frames := self._receive_one()) is None:
                break
            if not 3 <= len(frames) <= MAX_FRAMES:
                self.buffer.refuse("malformed message", f"a message must have 3 or {MAX_FRAMES} frames")
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

    def _receive_one(self) -> list[zmq.Frame] | None:
        """A message, if there is one. Of one with too many frames, the first few."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more and len(frames) < MAX_FRAMES + 1:
            frames.append(self._socket.recv(copy=False))
        if len(frames) > MAX_FRAMES:
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(copy=False)
        return frames

    def _handle(self, frames: list[zmq.Frame]) -> None:
        sender, number, body = frames[0].bytes, frames[1].bytes, frames[2].buffer
        payload = [frame.buffer for frame in frames[3:]]
        if len(body) > MAX_BODY_BYTES or len(number) > 64:
            self.buffer.refuse(
                "malformed message", f"a request must have at most {MAX_BODY_BYTES} bytes, got {len(body)}"
            )
            return
        try:
            request = m.request_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._answer(sender, number, self.buffer.refuse("malformed message", str(error)))
            return
        if isinstance(request, m.Publish | m.Consumed | m.Checkpointed | m.Next | m.Damaged | m.Finish):
            if sender in self._dead:  # what it has sent came late
                late = f"{type(request).__name__} of a life before the rewind"
                self._answer(sender, number, self.buffer.refuse("dead learner", late))
                return
            self._learners.add(sender)
        if isinstance(request, m.Ask | m.Next | m.Finish | m.Watch):
            self._park(sender, number, request)
            return
        if isinstance(request, m.Read):
            self._answer(sender, number, m.Part(), [self.buffer.read_part(request)])
            return
        try:
            self._answer(sender, number, self._reply(request, payload))
        except Refusal as refusal:
            self._answer(sender, number, self.buffer.refuse(refusal.reason, str(refusal)))
            return
        if isinstance(request, m.Rewind):
            self._bury_learners(but=sender)

    def _bury_learners(self, but: bytes) -> None:
        """Another life of the learner begins. What the one before has sent and nobody has read yet must not reach it."""
        self._dead |= self._learners - {but}
        self._learners &= {but}
        self._nexts = [parked for parked in self._nexts if parked.sender not in self._dead]
        self._finishes = [parked for parked in self._finishes if parked.sender not in self._dead]

    def _park(self, sender: bytes, number: bytes, request: m.Ask | m.Next | m.Finish | m.Watch) -> None:
        wait_s = min(max(request.wait_s, 0.0), MAX_WAIT_S)
        deadline = self._clock() + (wait_s if wait_s == wait_s else 0.0)
        match request:
            case m.Ask():
                self._asks.append(Parked(sender, number, request, deadline))
            case m.Next():
                self._nexts.append(Parked(sender, number, request, deadline))
            case m.Finish():
                self._finishes.append(Parked(sender, number, request, deadline))
            case m.Watch():
                self._watches.append(Parked(sender, number, request, deadline))
        self._ticked_at = float("-inf")  # it may have to be answered at once

    def _reply(self, request: m.Request, payload: list[memoryview]) -> m.Reply:
        buffer = self.buffer
        match request:
            case m.Submit():
                if len(payload) != 1:
                    raise Refusal("malformed group", f"a submission must carry one Arrow frame, got {len(payload)}")
                verdicts = buffer.submit(request.generator, request.leases, request.schema, payload[0])
                return m.Receipt(leases=request.leases, verdicts=verdicts)
            case m.Heartbeat():
                revoked = buffer.heartbeat(request)
                return m.Standing(
                    revoked=revoked, version=buffer.book.version, weights=buffer.weights, change=self._change,
                    ended=self._stopping,
                )  # fmt: skip
            case m.Alive(role=role):
                if request.ended:
                    buffer.fleet.forget(role)
                else:
                    buffer.fleet.hear(role, request.activity, request.for_s, self._clock())
            case m.Evaluated(generator=name, lease=lease, reward=reward):
                return m.Receipt(leases=[lease], verdicts=[buffer.evaluated(name, lease, reward)])
            case m.Fail(lease=lease):
                verdict = buffer.fail(lease, request.num_tokens, request.error, revoked=request.revoked)
                return m.Receipt(leases=[lease], verdicts=[verdict])
            case m.Join(generator=name):
                buffer.join(name)
                return m.Welcome(config=self._config_text)
            case m.Leave(generator=name, error=why):
                buffer.leave(name, why)
            case m.Locate():
                return m.Located(folder=str(buffer.journal.folder.resolve()), mark=buffer.journal.mark)
            case m.Damaged():
                return m.Replaced(count=buffer.report_damaged(request.groups))
            case m.Publish():
                buffer.publish(request.version, request.weights)
                self._change += 1
            case m.Consumed():
                buffer.consumed(request)
            case m.Checkpointed():
                buffer.checkpointed(request.step, request.oldest)
            case m.Rewind(step=step):
                try:
                    buffer.rewind(step)
                except ValueError as error:
                    raise Refusal("wrong step", str(error)) from error
                self._change += 1
            case m.Stop():
                buffer.stop(request.reason)
        return m.Done()

    def _answer(self, sender: bytes, number: bytes, reply: m.Reply, payload: list[bytes] | None = None) -> None:
        self._outbox.append([sender, number, m.encoder.encode(reply), *(payload or [])])

    def _send(self, answers: list[list[bytes | pa.Buffer]]) -> None:
        for frames in answers:
            self._socket.send_multipart(frames, copy=len(frames) < 4)

    def _send_committed(self) -> None:
        """Sends the answers of turns that are durable; waits for the disk when too many wait for it."""
        while self._committing and (len(self._committing) > MAX_COMMITTING or self._committing[0][0].done()):
            done, answers = self._committing.popleft()
            done.result()
            self._send(answers)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        self.buffer.tick()
        if self._metrics.wanted:
            self._metrics.update(self.status())
        self._serve_overdue = True

    @property
    def _stopping(self) -> bool:
        return self.buffer.stopping is not None

    def _serve_parked(self) -> None:
        now = self._clock()
        self._deal()
        if self._serve_overdue:
            self._serve_overdue = False
            for ask in [ask for ask in self._asks if now >= ask.deadline]:
                self._asks.remove(ask)
                self._answer(ask.sender, ask.number, self._work([]))
        self._nexts = [p for p in self._nexts if not self._serve_next(p, now)]
        self._finishes = [p for p in self._finishes if not self._serve_finish(p, now)]
        self._watches = [p for p in self._watches if not self._serve_watch(p, now)]

    def _deal(self) -> None:
        """Deals what may be leased to all who ask, evenly; those who get nothing go on waiting, at the head of the queue."""
        if self._stopping:
            for parked in self._asks:
                self._answer(parked.sender, parked.number, self._work([]))
            self._asks.clear()
        if not self._asks or not (room := self.buffer.room()):
            return
        share = max(1, room // len(self._asks))  # in a row: groups that come together are stored and read together
        hands: list[list[m.Lease]] = [[] for _ in self._asks]
        hungry, exhausted = deque(zip(self._asks, hands, strict=True)), False
        while hungry and not exhausted:
            parked, hand = hungry.popleft()
            wanted = max(1, parked.request.count)
            for _ in range(min(share, wanted - len(hand))):
                lease = self.buffer.lease(parked.request.generator)
                if lease is None:
                    exhausted = True
                    break
                hand.append(lease)
            if len(hand) < wanted:
                hungry.append((parked, hand))
        for hand in hands:  # those who got something are the first
            if not hand:
                break
            parked = self._asks.popleft()
            self._answer(parked.sender, parked.number, self._work(hand))

    def _work(self, leases: list[m.Lease]) -> m.Work:
        buffer = self.buffer
        return m.Work(
            leases=leases,
            version=buffer.book.version,
            weights=buffer.weights,
            change=self._change,
            ended=self._stopping,
        )

    def _serve_next(self, parked: Parked[m.Next], now: float) -> bool:
        """Answers if it can or must; true if it has."""
        try:
            handout = self.buffer.next(parked.request.step)
        except (Refusal, IndexError) as refusal:
            self._answer(parked.sender, parked.number, self.buffer.refuse("wrong step", str(refusal)))
            return True
        if self._stopping:
            self._answer(parked.sender, parked.number, m.Over(reason=self.buffer.stopping or ""))
        elif handout is not None:
            slices = self.buffer.slices(handout)
            reply = m.Batch(step=parked.request.step, groups=handout.groups, slices=slices, weights=handout.weights)
            self._answer(parked.sender, parked.number, reply)
        elif now >= parked.deadline:
            self._answer(parked.sender, parked.number, m.NotYet(waiting_for=self._waiting_for()))
        else:
            return False
        return True

    def _serve_finish(self, parked: Parked[m.Finish], now: float) -> bool:
        if self._stopping or not self.buffer.num_unevaluated:
            self._answer(parked.sender, parked.number, m.Done())
        elif now >= parked.deadline:
            self._answer(parked.sender, parked.number, m.NotYet(waiting_for=self._waiting_for()))
        else:
            return False
        return True

    def _serve_watch(self, parked: Parked[m.Watch], now: float) -> bool:
        buffer, after = self.buffer, parked.request.after
        if buffer.num_records <= after and now < parked.deadline:
            return False
        first = max(0, after - (buffer.num_records - len(buffer.records)))
        news = m.News(records=buffer.records[first:], evaluations=buffer.scores, status=self.status())
        self._answer(parked.sender, parked.number, news)
        return True

    def _waiting_for(self) -> str:
        return self.buffer.waiting_for(learner_waits=bool(self._nexts), num_asking=len(self._asks))


def _allow_many_connections() -> None:
    """Each connection takes a file descriptor: raises the process's own limit as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _keep_freed_memory() -> None:
    """Lets the C library keep what messages have freed: else every large message costs fresh pages (a third of the speed).

    `mallopt` of glibc: up to 256 MB stay with the process, and blocks up to 32 MB come from there. Other C libraries have none.
    """
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(trim_threshold, 256 << 20)
    mallopt(mmap_threshold, 32 << 20)
