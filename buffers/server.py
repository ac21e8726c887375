"""The buffer: gives out leases, takes in groups, hands out batches, keeps the journal and the ledger.

One thread, one ROUTER socket. Each turn of the loop takes in what has arrived, answers what can be answered, makes the
journal durable once for all of it, and only then sends the answers:

    wait for messages ─▶ handle each ─▶ expire, cancel ─▶ serve those who wait ─▶ commit ─▶ send ─┐
          ▲────────────────────────────────────────────────────────────────────────────────────┘

A request that cannot be answered yet (no work, no batch, no news) is kept with its deadline and answered by then at the latest.
"""

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import zmq

from buffers import messages as m
from buffers.evaluation import Evaluations
from buffers.fleet import Fleet
from buffers.journal import Journal, Rejected, Trained
from buffers.leases import LeaseBook, Terms
from buffers.ledger import Ledger
from buffers.recovery import recover
from buffers.staleness import count
from buffers.trajectory import Malformed, check_group, decode, flat
from configs.schema import Config, OnLate

log = logging.getLogger("slipstream.buffer")

MAX_MESSAGE_BYTES = 256 << 20
HIGH_WATER_MARK = 10_000
TICK_S = 0.05


class Stuck(RuntimeError):
    """Nothing has moved for so long that the run is better ended."""


@dataclass(slots=True)
class Parked:
    """A request that waits for its answer."""

    sender: bytes
    number: bytes
    request: m.Ask | m.Next | m.Watch | m.Finish
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

        With `resume_step`, takes up the journal at the checkpoint of that step. Raises ValueError when the address is taken.
        """
        self._config, self._config_text, self._clock = config, config_text, clock
        self._bound = config.bound
        self.ledger = Ledger()
        self._lease_ids = itertools.count(secrets.randbits(30) << 32)  # no lease of an earlier life has such a number
        terms = Terms(
            groups_per_step=config.learner.groups_per_step,
            steps=config.run.steps,
            max_versions=self._bound,
            on_late=config.staleness.on_late,
            samples_per_prompt=config.learner.samples_per_prompt,
            lease_s=config.buffer.lease_s,
            max_attempts=config.buffer.max_attempts,
            straggler_timeout_s=config.staleness.straggler_timeout_s,
            task=config.task.name,
            seed=config.run.seed,
        )
        self.book = LeaseBook(terms, self.ledger, self._lease_ids)
        self._evaluations = Evaluations(
            config.task.name, config.run.seed, config.buffer.lease_s, config.buffer.max_attempts
        )
        self._batches: dict[int, pa.RecordBatch] = {}
        self._staleness: Counter[int] = Counter()
        self._refusals: Counter[str] = Counter()
        self._records: list[m.StepRecord] = []
        self._scores: list[m.Evaluation] = []
        if resume_step is not None:
            self._batches, self._staleness = recover(
                folder, resume_step, self.book, self.ledger, self._bound, config.staleness.on_late
            )
        self._journal = Journal(folder, config.buffer.durability, config.buffer.segment_mb << 20)

        self._handed: tuple[int, list[int], pa.Buffer] | None = None  # the step being trained
        self._weights = ""
        self._fleet = Fleet()
        self._learner_idle = (0.0, 0.0)
        self._started_at: float | None = None
        self._moved_at = clock()
        self._warned_at = clock()
        self._stopping: str | None = None
        self._parked: list[Parked] = []
        self._outbox: list[list[bytes | pa.Buffer]] = []

        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        try:
            self._socket.bind(config.buffer.address)
        except zmq.ZMQError as error:
            raise ValueError(f"buffer.address must be free, got {config.buffer.address}: {error.strerror}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("the buffer answers at %s", self.address)

    def run(self) -> None:
        """Consumes every role's requests, produces their answers, the journal and the ledger.

        Waits for messages only, at most `TICK_S`. Ends when `stop` has been called, or with `Stuck` when nothing has moved
        for twice `buffer.watchdog_s`.
        """
        self._running = True
        try:
            while self._running:
                self._receive()
                self._tick()
                self._serve_parked()
                self._journal.commit()
                self._send()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` after the turn under way. May be called from another thread."""
        self._running = False

    def close(self) -> None:
        """Makes durable what is not yet, and lets go of the address."""
        self._journal.commit()
        self._journal.close()
        self._socket.close()

    # ---- the turn

    def _receive(self) -> None:
        if not self._socket.poll(int(TICK_S * 1000)):
            return
        for _ in range(1000):  # then the others get their turn
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) >= 3:
                sender, number, body, *payload = frames
                self._handle(sender.bytes, number.bytes, body.buffer, [frame.buffer for frame in payload])
            else:
                self._refuse("malformed message", "a message must have at least three frames")

    def _handle(self, sender: bytes, number: bytes, body: memoryview, payload: list[memoryview]) -> None:
        try:
            request = m.request_decoder.decode(body)
        except msgspec.DecodeError as error:
            self._answer(sender, number, self._refuse("malformed message", str(error)))
            return
        if isinstance(request, m.Ask | m.Next | m.Watch | m.Finish):
            self._parked.append(Parked(sender, number, request, self._clock() + request.wait_s))
            return
        self._answer(sender, number, self._reply(request, payload))

    def _reply(self, request: m.Request, payload: list[memoryview]) -> m.Reply:
        now = self._clock()
        match request:
            case m.Join(generator=name):
                self._fleet.join(name)
                self._release(name)
                return m.Welcome(config=self._config_text)
            case m.Leave(generator=name):
                self._release(name)
                return m.Done()
            case m.Heartbeat():
                return self._heartbeat(request, now)
            case m.Submit():
                return m.Receipt(lease=request.lease, verdict=self._submit(request, payload))
            case m.Evaluated():
                return m.Receipt(lease=request.lease, verdict=self._evaluated(request))
            case m.Fail():
                return m.Receipt(lease=request.lease, verdict=self._fail(request))
            case m.Publish():
                return self._publish(request, now)
            case m.Consumed():
                return self._consumed(request, now)
            case m.Stop():
                self._stopping = self._stopping or request.reason
                return m.Done()
        raise AssertionError(request)

    def _answer(self, sender: bytes, number: bytes, reply: m.Reply, payload: pa.Buffer | None = None) -> None:
        self._outbox.append([sender, number, m.encoder.encode(reply), *([] if payload is None else [payload])])

    def _send(self) -> None:
        for frames in self._outbox:
            self._socket.send_multipart(frames, copy=len(frames) < 4)
        self._outbox.clear()

    def _refuse(self, reason: str, detail: str) -> m.Refused:
        """Counts a message that cannot be taken in; `reason` is one of a few, `detail` says which message and why."""
        self._refusals[reason] += 1
        log.warning("refused, %s: %s", reason, detail)
        return m.Refused(reason=detail)

    def _tick(self) -> None:
        now = self._clock()
        for group, outcome in self.book.expire(now):
            self._lost(group, outcome)
        self._evaluations.expire(now)
        for group in self.book.cancel_stragglers(now):
            log.warning("group %d held its step for %s s: cancelled", group, self._config.staleness.straggler_timeout_s)
            self._journal.note(Rejected(group, "cancelled"))
        limit = self._config.buffer.watchdog_s
        still = now - self._moved_at
        if still > 2 * limit:
            raise Stuck(f"nothing has moved for {still:.0f} s: {self._waiting_for(now)}")
        if still > limit and now - self._warned_at > limit:
            self._warned_at = now
            log.warning("nothing has moved for %.0f s: %s", still, self._waiting_for(now))

    def _serve_parked(self) -> None:
        now = self._clock()
        asking = sum(isinstance(p.request, m.Ask) for p in self._parked)
        work = self._lease_out([p.request for p in self._parked if isinstance(p.request, m.Ask)], now) if asking else {}
        waiting = []
        for parked in self._parked:
            reply: m.Reply | None
            payload: pa.Buffer | None
            match parked.request:
                case m.Ask():
                    reply, payload = work.get(id(parked.request)), None
                case m.Next():
                    reply, payload = self._next(parked.request, now)
                case m.Finish():
                    reply, payload = (m.Done() if self._stopping or not self._evaluations.pending else None), None
                case m.Watch():
                    reply, payload = (self._news(parked.request, now) if self._has_news(parked.request) else None), None
            if reply is None and now >= parked.deadline:
                reply = self._empty_answer(parked.request, now)
            if reply is None:
                waiting.append(parked)
            else:
                self._answer(parked.sender, parked.number, reply, payload)
        self._parked = waiting

    def _empty_answer(self, request: m.Ask | m.Next | m.Watch | m.Finish, now: float) -> m.Reply:
        match request:
            case m.Ask():
                return self._work([])
            case m.Watch():
                return self._news(request, now)
            case _:
                return m.NotYet(waiting_for=self._waiting_for(now))

    # ---- generators

    def _lease_out(self, asks: list[m.Ask], now: float) -> dict[int, m.Work]:
        """Deals what may be leased to all who ask, evenly; those who get nothing go on waiting."""
        if self._stopping is not None:
            return {id(ask): self._work([]) for ask in asks}
        hands: dict[int, list[m.Lease]] = {id(ask): [] for ask in asks}
        hungry = list(asks)
        while hungry:
            for ask in list(hungry):
                hand = hands[id(ask)]
                lease = self._one_lease(ask.generator, now) if len(hand) < ask.count else None
                if lease is None:
                    hungry.remove(ask)
                else:
                    hand.append(lease)
        return {key: self._work(hand) for key, hand in hands.items() if hand}

    def _one_lease(self, generator: str, now: float) -> m.Lease | None:
        if self.book.version < 0:
            return None
        return self._evaluations.lease(next(self._lease_ids), generator, now) or self.book.lease(generator, now)

    def _work(self, leases: list[m.Lease]) -> m.Work:
        return m.Work(leases=leases, version=self.book.version, weights=self._weights, ended=self._stopping is not None)

    def _release(self, generator: str) -> None:
        for group, outcome in self.book.release(generator):
            self._lost(group, outcome)
        self._evaluations.release(generator)

    def _heartbeat(self, beat: m.Heartbeat, now: float) -> m.Standing:
        if self._fleet.report(beat.generator, beat.report):
            self._moved_at = now
        training = {}
        for lease_id, num_tokens in beat.progress.items():
            if self._evaluations.owns(lease_id):
                self._evaluations.renew(lease_id, now)
            else:
                training[lease_id] = num_tokens
        revoked = self.book.heartbeat(beat.generator, training, now)
        return m.Standing(
            revoked=revoked, version=self.book.version, weights=self._weights, ended=self._stopping is not None
        )

    def _submit(self, request: m.Submit, payload: list[memoryview]) -> str:
        """Checks, journals and books a group; returns the verdict."""
        if self.book.is_complete(request.lease):
            return "accepted"  # sent again because the receipt was lost
        held = self.book.lease_of(request.lease)
        try:
            if len(payload) != 1:
                raise Malformed(f"a submission must carry one Arrow frame, got {len(payload)}")
            batch = decode(payload[0])
            if held is not None:
                check_group(
                    batch, group=held[0], due=held[1], num_samples=self._config.learner.samples_per_prompt,
                    newest_version=self.book.version,
                )  # fmt: skip
        except Malformed as error:
            self._refuse("malformed group", f"from {request.generator}: {error}")
            return self._failed(request.lease, 0, str(error))
        num_tokens = int(np.count_nonzero(flat(batch, "sampled")))
        verdict = self.book.submit(request.lease, num_tokens)
        if verdict == "accepted":
            assert held is not None
            self._moved_at = self._clock()
            self._journal.append(batch)
            rewards = batch.column("reward").to_pylist()
            if self._config.algo.dynamic_sampling and min(rewards) == max(rewards):
                self.book.reject(held[0], "zero_variance")
                self._journal.note(Rejected(held[0], "zero_variance"))
                return "zero_variance"
            self._batches[held[0]] = batch
        return verdict

    def _evaluated(self, request: m.Evaluated) -> str:
        if not self._evaluations.owns(request.lease):
            return "duplicate"
        if not np.isfinite(request.reward):
            self._refuse(
                "malformed evaluation", f"from {request.generator}: reward must be finite, got {request.reward}"
            )
            self._evaluations.fail(request.lease)
            return "failed"
        self._moved_at = self._clock()
        self._evaluations.submit(request.lease, request.reward)
        for sweep in self._evaluations.take_done():
            if sweep.rewards:
                mean = float(np.mean(sweep.rewards))
                self._scores.append(
                    m.Evaluation(
                        version=sweep.version, time=self._seconds(), reward=mean, num_prompts=len(sweep.rewards)
                    )
                )
                log.info("version %d scores %.3f on %d held-out prompts", sweep.version, mean, len(sweep.rewards))
        return "accepted"

    def _fail(self, request: m.Fail) -> str:
        if self._evaluations.owns(request.lease):
            self._evaluations.fail(request.lease)
            return "failed"
        return self._failed(request.lease, request.num_tokens, request.error)

    def _failed(self, lease: int, num_tokens: int, error: str) -> str:
        held = self.book.lease_of(lease)
        outcome = self.book.fail(lease, num_tokens, error)
        if held is not None and outcome != "over":
            self._lost(held[0], outcome, error)
        return "failed"

    def _lost(self, group: int, outcome: str, error: str = "lease expired") -> None:
        log.warning("group %d failed and is %s: %s", group, outcome, error)
        if outcome == "quarantined":
            self._journal.note(Rejected(group, "failed", error))

    # ---- learner

    def _publish(self, request: m.Publish, now: float) -> m.Reply:
        if request.version <= self.book.version:
            return self._refuse("wrong version", f"version must be above {self.book.version}, got {request.version}")
        self.book.publish(request.version)
        self._weights = request.weights
        self._moved_at = now
        if self._started_at is None:
            self._started_at = now
        every, last = self._config.eval.every, self._config.run.steps
        if request.version in (0, last) or (every and request.version % every == 0):
            self._evaluations.request(request.version, self._config.eval.prompts)
        return m.Done()

    def _next(self, request: m.Next, now: float) -> tuple[m.Reply | None, pa.Buffer | None]:
        if self._handed is not None and self._handed[0] == request.step:
            return m.Batch(step=request.step, groups=self._handed[1]), self._handed[2]
        if self._stopping is not None:
            return m.Over(reason=self._stopping), None
        groups = self.book.ready(request.step, now)
        if groups is None:
            return None, None
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._batches[groups[0]].schema) as writer:
            for group in groups:
                writer.write_batch(self._batches[group])
        self._handed = (request.step, groups, sink.getvalue())
        return m.Batch(step=request.step, groups=groups), self._handed[2]

    def _consumed(self, request: m.Consumed, now: float) -> m.Reply:
        if self._handed is None or self._handed[0] != request.step:
            return self._refuse("wrong step", f"consumed step must be the one handed out, got {request.step}")
        groups = self._handed[1]
        counts = {}
        for group in groups:
            trained, excluded, by_staleness = count(self._batches.pop(group), request.step, self._bound)
            counts[group] = (trained, excluded)
            self._staleness.update(by_staleness)
        num_trained = sum(trained for trained, _ in counts.values())
        assert num_trained == request.num_trained, (
            f"learner trained {request.num_trained} tokens, buffer counts {num_trained}"
        )
        excluded = sum(excluded for _, excluded in counts.values())
        if excluded and self._config.staleness.on_late is not OnLate.mask:
            log.error("step %d: %d tokens were beyond the staleness bound and masked: a defect", request.step, excluded)
        self.book.consume(request.step, counts)
        assert self.ledger.closes(), f"the ledger does not close after step {request.step}: {vars(self.ledger)}"
        self._journal.note(Trained(request.step, groups))
        self._handed = None
        self._moved_at = now
        self._learner_idle = (request.idle_s, request.alive_s)
        self._records.append(m.StepRecord(step=request.step, time=self._seconds(), metrics=request.metrics))
        return m.Done()

    # ---- driver

    def _has_news(self, watch: m.Watch) -> bool:
        return len(self._records) > watch.after

    def _news(self, watch: m.Watch, now: float) -> m.News:
        return m.News(records=self._records[watch.after :], evaluations=self._scores, status=self.status(now))

    def _seconds(self) -> float:
        return 0.0 if self._started_at is None else self._clock() - self._started_at

    def status(self, now: float) -> m.Status:
        return m.Status(
            version=self.book.version,
            step=self.book.num_consumed,
            seconds=self._seconds(),
            tokens=self.ledger.token_account(),
            groups=self.ledger.group_account(),
            trained_twice=self.book.trained_twice,
            staleness=dict(sorted(self._staleness.items())),
            learner_idle=self._learner_idle[0] / self._learner_idle[1] if self._learner_idle[1] else 0.0,
            quarantined=self.book.quarantined,
            refused=dict(self._refusals),
            waiting_for=self._waiting_for(now),
            still_s=now - self._moved_at,
            **self._fleet.summary(),
        )

    def _waiting_for(self, now: float) -> str:
        if self.book.version < 0:
            return "all wait for the learner to publish version 0"
        if any(isinstance(p.request, m.Next) for p in self._parked):
            return f"the learner waits: {self.book.waiting_for(self.book.num_consumed, now)}"
        if self.book.num_consumed == self._config.run.steps:
            return f"the run waits for {self._evaluations.pending} evaluation prompts"
        asking = sum(isinstance(p.request, m.Ask) for p in self._parked)
        return f"the learner trains step {self.book.num_consumed}; {asking} generators wait for admission"
