"""The replay buffer: leases out, groups in, batches out, everything on the record. No sockets: `buffers.server` has those.

    lease ─▶ submit: check, journal, book ─▶ next: which groups a step trains ─▶ consumed
                                 │
                              commit: one write, and one fsync, for all that has come in since the last

A buffer that is opened on a folder reads the newest state there, applies the log since, and goes on from there.
"""

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow as pa

from buffers import events as e
from buffers import messages as m
from buffers.book_state import count_entries, export_book, segments_needed
from buffers.controller import LagController
from buffers.evaluation import Evaluations, score_of
from buffers.fleet import STARTING, Fleet
from buffers.groups import Handout, make_terms, record_terms
from buffers.journal import Journal
from buffers.leases import LeaseBook
from buffers.ledger import Ledger
from buffers.prompts import PromptOrder
from buffers.recovery import find_damaged_groups, rebuild_book
from buffers.refusal import Refusal
from buffers.run_status import EvaluationRecord, RunStatus, StepRecord
from buffers.samplers import load_sampler
from buffers.segments import Reader, join_slices, read_bytes, segment_path
from buffers.staleness import count
from buffers.state import State
from buffers.trajectory import (
    SCHEMA_VERSION,
    Checked,
    Expected,
    Facts,
    Malformed,
    check_groups,
    divide_groups,
    encode,
)
from buffers.vocabulary import read_routing, read_vocabulary
from buffers.watchdog import Stuck, Watchdog
from configs.buffer import Retention
from configs.schema import Config
from configs.staleness import OnLate

log = logging.getLogger("slipstream.buffer")

MAX_RECORDS = 10_000
"""Step records kept for those who watch."""


class Buffer:
    """Not thread-safe. What a method changes is durable after the next `commit`."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the journal in `folder`, and goes on from what it holds: with `resume_step`, from the checkpoint of that
        step. Raises ValueError for a step that it cannot go back to, and when another process writes the journal."""
        self._config, self._clock, self._bound = config, clock, config.max_versions
        self._vocabulary = read_vocabulary(Path(config.model.path))
        self._routing = read_routing(Path(config.model.path), config.learner.moe.router_replay)
        self.ledger = Ledger()
        self._lease_ids = itertools.count(
            secrets.randbits(30) << 32
        )  # no lease of an earlier life has such a number
        self._terms = terms = make_terms(config)
        self._silent = True
        sampler = load_sampler(config.buffer.sampler, config.buffer.sampler_args)
        self.book = LeaseBook(terms, self.ledger, sampler=sampler, lease_ids=self._lease_ids, note=self._note)
        self._controller = LagController(config.staleness, self._bound)
        self.book.lag = self._controller.lag
        self._prompts = PromptOrder(terms.task_size, terms.seed)
        self._evaluations = Evaluations(terms.task, terms.seed, terms.lease_s, terms.max_attempts)
        self.refusals: Counter[str] = Counter()
        self.records: list[StepRecord] = []
        self.num_records = 0
        """Step records ever; the last of them are in `records`."""
        self.scores: list[EvaluationRecord] = []
        self.weights = ""
        self._learner_idle = (0.0, 0.0)
        self._started_at: float | None = None
        self._watchdog = Watchdog(config.buffer.watchdog_s, clock())
        self.reached: dict[str, float] = {}
        self.fleet = Fleet(config.generators.count, self.reached)
        self.stopping: str | None = None
        self._quarantined_in_a_row = 0
        self._state_due = False
        """A checkpoint was written since the last state."""
        self.journal = Journal(folder, config.buffer.durability, config.buffer.segment_mb << 20)
        self._reader = Reader(folder)
        try:
            self._recover(resume_step)
        except BaseException:
            self.journal.close()
            raise

    def _note(self, event: e.AnyEvent) -> None:
        if not self._silent:
            self.journal.note(event)

    def _recover(self, resume_step: int | None) -> None:
        """Goes on from what the journal holds. Nothing in it is changed before all is known to fit."""
        began, now = time.monotonic(), self._clock()
        found = self.journal.recover()
        self.weights = rebuild_book(
            self.book, self._evaluations, found, self._terms, now, self._request_evaluation
        )
        if resume_step is not None:
            self.book.check_rewind(resume_step)
        damaged = find_damaged_groups(self.book, found, self._reader)
        for what in self.journal.begin(found, self._export_state()):
            log.warning("recovery has set aside from the journal: %s", what)
        self._silent = False
        for number in damaged:
            self._reject_damaged(number)
        if resume_step is not None:
            self.rewind(resume_step)
        if found.state is not None or found.tail.lines:
            log.info(
                "recovered in %.2f s from a state and %d events: step %d, %d complete groups wait to be trained",
                time.monotonic() - began, len(found.tail.lines), self.book.num_consumed, len(self.book.pool),
            )  # fmt: skip

    def _export_state(self) -> State:
        return State(
            terms=record_terms(self._terms), book=export_book(self.book), weights=self.weights,
            unscored=self._evaluations.unscored(), next_segment=0, open_segment=None,
        )  # fmt: skip

    def commit(self) -> None:
        """Makes durable, as `buffer.durability` has it, all that has changed."""
        self.start_commit().result()

    def start_commit(self) -> "Future[None]":
        """As `commit`, but the future that it returns waits for the disk."""
        done = self.journal.start_commit()
        if self.journal.wants_rotation(count_entries(self.book), now=self._state_due):
            self._state_due = False
            self.journal.rotate(
                self._export_state(), keep_logs=self._config.buffer.retention is Retention.all
            )
        return done

    def close(self, *, in_good_order: bool = True) -> None:
        """Leaves a state behind, but not after an error, which may have left the book half-way: then the log speaks."""
        self.journal.close(self._export_state() if in_good_order else None)

    def stop(self, reason: str) -> None:
        self.stopping = self.stopping or reason

    def refuse(self, reason: str, detail: str) -> m.RefusedRequest:
        """Counts a message that cannot be taken in; `reason` is one of a few, `detail` says which message and why."""
        self.refusals[reason] += 1
        count = self.refusals[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood of them does not fill the log
            log.warning("refused (%d times by now), %s: %s", count, reason, detail)
        return m.RefusedRequest(reason=detail)

    # ---- generators

    def join(self, generator: str) -> None:
        """A generator begins a new life: what it held before is free."""
        self.leave(generator, f"{generator} was started again")
        self.fleet.join(generator, self._clock())

    def leave(self, generator: str, error: str | None, *, gone: bool = True) -> None:
        for group, outcome in self.book.release(generator, error):
            self._lost(group, outcome, error or "left")
        self._evaluations.release(generator)
        if gone:
            self.fleet.leave(generator)

    def room(self) -> int:
        """How many leases there are to be had, at most."""
        return self._evaluations.num_waiting + self.book.room()

    def lease(self, generator: str) -> m.Lease | None:
        """One lease, if there is one to be had."""
        if self.book.version < 0 or self.stopping is not None:
            return None
        now = self._clock()
        return self._evaluations.lease(self._lease_ids, generator, now) or self.book.lease(generator, now)

    def heartbeat(self, beat: m.GeneratorHeartbeat) -> list[int]:
        """Renews leases, if the generator's loop goes round; returns those that are no longer the generator's."""
        now = self._clock()
        if self.fleet.report(beat, now):
            self._watchdog.moved_at = now
        if beat.standstill_s > self._config.buffer.stalled_s:
            self.leave(beat.generator, f"stalled: {beat.activity} for {beat.activity_s:.0f} s", gone=False)
        training = {}
        for lease_id, num_tokens in beat.progress.items():
            if self._evaluations.owns(lease_id):
                self._evaluations.renew(lease_id, now)
            elif num_tokens >= 0:
                training[lease_id] = num_tokens
        return self.book.heartbeat(beat.generator, training, now)

    def submit(self, generator: str, leases: Sequence[int], schema: int, data: memoryview) -> list[str]:
        """Checks, journals and books the groups of some leases; returns the verdict on each.

        `accepted`, `zero_variance` (complete, and rejected by dynamic sampling), `duplicate`, or `failed` (and refused,
        because the group breaks a rule, or the message cannot be read at all).
        """
        num_samples = self.book.terms.samples_per_prompt
        wanted: dict[int, Expected] = {}  # by place in the message
        groups: set[int] = set()
        for place, lease in enumerate(leases):
            held = self.book.lease_of(lease)
            if held is not None and held[0] not in groups:
                groups.add(held[0])
                wanted[place] = Expected(held[0], held[1], self._prompts.index(held[0]))
        spent: dict[int, int] = {}
        found = None
        try:
            if schema != SCHEMA_VERSION:
                raise Malformed(f"schema version must be {SCHEMA_VERSION}, got {schema}")
            if len(wanted) < len(leases):
                data, spent = divide_groups(data, len(leases), wanted, num_samples)
            if wanted:
                found = check_groups(
                    data, list(wanted.values()), num_samples=num_samples, newest_version=self.book.newest_version,
                    longest=self._config.longest_row, vocabulary=self._vocabulary, routing=self._routing,
                )  # fmt: skip
        except Malformed as error:
            self.refuse("malformed group", f"from {generator}: {error}")
            for place in wanted:
                self.fail(leases[place], 0, str(error))
        stored = iter(
            () if found is None else self._store(generator, [leases[place] for place in wanted], data, found)
        )
        return [
            next(stored, "failed") if place in wanted else self._in_vain(lease, spent.get(place, 0))
            for place, lease in enumerate(leases)
        ]

    def _in_vain(self, lease: int, num_tokens: int) -> str:
        """A group that is complete already, or that nobody waits for any more."""
        if self.book.is_accepted(lease):
            return "accepted"  # sent again because the receipt was lost
        if self.book.lease_of(lease) is not None:  # its group was in the message twice, and has been refused
            return self.fail(lease, num_tokens, "handed in twice, and refused")
        if self.book.find(lease) is not None:
            self.book.duplicate(lease, num_tokens)
        return "duplicate"

    def _store(self, generator: str, leases: list[int], data: memoryview, found: Checked) -> Iterator[str]:
        num_samples = self.book.terms.samples_per_prompt
        good = [number for number, facts in enumerate(found.verdicts) if isinstance(facts, Facts)]
        if good:
            message = data
            if not found.storable:
                parts = [found.batch.slice(number * num_samples, num_samples) for number in good]
                message = memoryview(encode(pa.concat_batches(parts))).cast("B")
            segment, offset, xxh3 = self.journal.append(message)
            self._watchdog.moved_at = self._clock()
            self._quarantined_in_a_row = 0
            self.reached.setdefault("first_group", time.time())
        row = 0
        for lease, facts in zip(leases, found.verdicts, strict=True):
            if isinstance(facts, Malformed):
                self.refuse("malformed group", f"from {generator}: {facts}")
                self.fail(lease, 0, str(facts))
                yield "failed"
                continue
            held = self.book.lease_of(lease)
            assert held is not None
            group, due = held
            if self.book.is_too_new(due, facts.newest):
                row += num_samples
                error = f"sampled by version {facts.newest}, newer than the step {due} that it is for"
                self.book.fail(lease, facts.num_tokens, error, counts=False)
                yield "failed"
                continue
            self.book.accept(
                e.Accepted(
                    lease=lease, group=group, due=due, prompt=self._prompts.index(group), segment=segment, offset=offset,
                    size=len(message), xxh3=xxh3, row=row, rows=num_samples, tokens=facts.num_tokens, oldest=facts.oldest,
                    newest=facts.newest, reward_mean=facts.reward_mean, reward_std=facts.reward_std, at=time.time(),
                    versions=facts.versions,
                )
            )  # fmt: skip
            row += num_samples
            if self._config.algo.dynamic_sampling and facts.reward_std == 0.0:
                self.book.reject(group, "zero_variance")
                yield "zero_variance"
            else:
                yield "accepted"

    def evaluated(self, generator: str, lease: int, reward: float) -> str:
        if not self._evaluations.owns(lease):
            return "duplicate"
        if not np.isfinite(reward):
            self.refuse("malformed evaluation", f"from {generator}: reward must be finite, got {reward}")
            self._evaluations.fail(lease)
            return "failed"
        self._watchdog.moved_at = self._clock()
        self._evaluations.submit(lease, reward)
        for sweep in self._evaluations.take_done():
            if sweep.rewards:
                score = score_of(sweep, self.seconds)
                self._note(e.Scored(sweep.version, score.reward, score.num_prompts, time.time()))
                self.scores.append(score)
                log.info(
                    "version %d scores %.3f on %d held-out prompts",
                    sweep.version,
                    score.reward,
                    score.num_prompts,
                )
        return "accepted"

    def holder(self, lease: int) -> str:
        """The generator that a lease was given to; empty where that is not known (any more)."""
        attempt = self.book.find(lease)
        return self._evaluations.holder(lease) if attempt is None else attempt.generator

    def fail(self, lease: int, num_tokens: int, error: str, *, revoked: bool = False) -> str:
        if self._evaluations.owns(lease):
            self._evaluations.fail(lease)
        elif (
            self.book.find(lease) is not None
        ):  # what is said of an unknown lease is not worth a line in the journal
            held = self.book.lease_of(lease)
            outcome = self.book.fail(lease, max(0, num_tokens), error, counts=not revoked)
            if held is not None and outcome != "over":
                self._lost(held[0], outcome, error)
        return "failed"

    def _lost(self, group: int, outcome: str, error: str) -> None:
        log.warning("group %d failed and is %s: %s", group, outcome, error)
        self._quarantined_in_a_row += outcome == "quarantined"

    # ---- learner

    def publish(self, version: int, weights: str) -> None:
        """Raises Refusal for a version that is not above the newest (but for the newest itself, said again)."""
        if version == self.book.version and weights == self.weights:
            return
        if version <= self.book.version:
            raise Refusal("wrong version", f"version must be above {self.book.version}, got {version}")
        self.book.publish(version)
        self.weights, self._watchdog.moved_at = weights, self._clock()
        self._note(e.Published(version, weights, time.time()))
        if self._started_at is None:
            self._started_at = self._watchdog.moved_at
            self.reached["learner"] = time.time()
        self._request_evaluation(version)

    def _request_evaluation(self, version: int) -> None:
        every, last = self._config.eval.every, self._config.run.steps
        if version in (0, last) or (every and version % every == 0):
            self._evaluations.request(version, self._config.eval.prompts)

    @property
    def num_unevaluated(self) -> int:
        """Held-out prompts without an answer."""
        return self._evaluations.pending

    def next(self, step: int) -> Handout | None:
        """What step `step` trains, or None while some of it is missing. Raises Refusal for a step that is trained already."""
        if step < self.book.num_consumed:
            raise Refusal(
                "wrong step",
                f"step must be {self.book.num_consumed} or later (or send RewindToStep first), got {step}",
            )
        return self.book.ready(step, self._clock()) if step == self.book.num_consumed else None

    def slices(self, handout: Handout) -> list[m.GroupSlice]:
        """Where the groups are; those that lie together are one slice."""
        return join_slices(map(self.book.content, handout.groups))

    def read_part(self, request: m.ReadBatchPart) -> bytes:
        """A part of a record batch, for readers that cannot map the journal; shorter where the file is shorter."""
        try:
            return read_bytes(self.journal.folder, request.segment, request.offset, request.size)
        except FileNotFoundError:
            return b""

    def report_damaged(self, groups: Sequence[int]) -> int:
        """A learner found these groups damaged. Those that the buffer finds so too are replaced; returns how many."""
        damaged = [
            n for n in set(groups) if n in self.book.pool and not self._reader.is_intact(self.book.content(n))
        ]
        for number in damaged:
            self._reject_damaged(number)
        return len(damaged)

    def _reject_damaged(self, number: int) -> None:
        content = self.book.content(number)
        error = (
            f"its {content.size} bytes at {content.offset} of {segment_path(self.journal.folder, content.segment)} "
            "are not those that were written"
        )
        log.error("group %d is damaged, and a fresh one takes its place: %s", number, error)
        self.book.reject_damaged(number, error)

    def consumed(self, request: m.ReportTrainedStep) -> None:
        """A step has been trained. Raises Refusal when it is not the one at hand (one trained before is no error)."""
        if request.step < self.book.num_consumed:
            return
        handout = self.next(request.step)
        if handout is None:
            raise Refusal("wrong step", f"consumed step must be the one handed out, got {request.step}")
        counts = [
            count(self.book.content(g).tokens_by_version(), request.step, self._bound) for g in handout.groups
        ]
        staleness: Counter[int] = Counter()
        for _, _, by_staleness in counts:
            staleness.update(by_staleness)
        trained, excluded = [c[0] for c in counts], [c[1] for c in counts]
        if sum(trained) != request.num_trained:
            raise Refusal(
                "wrong count",
                f"num_trained must be {sum(trained)} at step {request.step}, got {request.num_trained}",
            )
        if sum(excluded) and self._config.staleness.on_late is not OnLate.mask:
            log.error(
                "step %d: %d tokens were beyond the bound and masked: a defect", request.step, sum(excluded)
            )
        self.book.consume(
            e.Trained(
                request.step, handout.groups, trained, excluded, dict(sorted(staleness.items())), handout.weights, time.time()
            )
        )  # fmt: skip
        assert self.ledger.closes(), (
            f"the ledger does not close after step {request.step}: {vars(self.ledger)}"
        )
        self._watchdog.moved_at = self._clock()
        self.reached.setdefault("first_step", time.time())
        self._learner_idle = (request.idle_s, request.alive_s)
        self.book.lag = self._controller.see(request.step, request.metrics)
        metrics = request.metrics | {"staleness/admitted": float(self.book.lag)}
        self.records.append(StepRecord(step=request.step, time=self.seconds, metrics=metrics))
        self.num_records += 1
        del self.records[:-MAX_RECORDS]

    def checkpointed(self, step: int, oldest: int) -> None:
        """The learner can go back to `oldest` at the earliest: what only earlier steps needed may go. Raises Refusal."""
        if not oldest <= step <= self.book.num_consumed:
            raise Refusal(
                "wrong step",
                f"checkpoint must be of a step that was trained, and not be older than the oldest kept, got {step} "
                f"(oldest {oldest}) when {self.book.num_consumed} steps are trained",
            )
        self.book.checkpoint(e.Checkpointed(step, oldest))
        self._state_due = True
        if self._config.buffer.retention is Retention.all:
            return
        if gone := sorted(self.journal.closed_segments() - segments_needed(self.book)):
            self.journal.drop(gone)

    def rewind(self, step: int) -> None:
        """The learner goes on from the checkpoint of `step`. Raises ValueError for a step that cannot be gone back to."""
        self.book.rewind(step)
        self._evaluations.clear()
        self.scores = [
            score for score in self.scores if score.version < step
        ]  # `step` itself is published again
        self._watchdog.moved_at = self._clock()
        log.info("rewound to step %d; %d complete groups wait to be trained", step, len(self.book.pool))

    # ---- time, and what can be said of it

    def tick(self) -> None:
        """What time alone brings about. Raises Stuck when nothing has moved and nobody has been at work for twice
        `buffer.watchdog_s`, or when `buffer.max_quarantined` groups have failed for good with none accepted between."""
        now = self._clock()
        for group, outcome in self.book.expire(now):
            self._lost(group, outcome, "lease expired")
        self._evaluations.expire(now)
        for group in self.book.cancel_stragglers(now):
            log.warning(
                "group %d held its step for %s s: cancelled",
                group,
                self._config.staleness.straggler_timeout_s,
            )
        if self._quarantined_in_a_row >= self._config.buffer.max_quarantined:
            group, error = next(reversed(self.book.quarantine.last.items()))
            times = f"{self._quarantined_in_a_row} groups in a row have failed {self._config.buffer.max_attempts} times each"
            raise Stuck(f"{times}, the last of them (group {group}) with: {error}")
        if self.fleet.is_at_work(now, self._config.buffer.stalled_s):
            self._watchdog.worked_at = now
        self._watchdog.check(now, self.waiting_for)

    @property
    def seconds(self) -> float:
        """Since the first version was published, in this life."""
        return 0.0 if self._started_at is None else self._clock() - self._started_at

    def waiting_for(self, *, learner_waits: bool = True, probes: bool = False, num_asking: int = 0) -> str:
        """Who waits for whom, in a sentence; then who has not been heard of, and who has been doing one thing for long."""
        step, budget, now = self.book.num_consumed, self.book.budget_reached() or "admission", self._clock()
        starts = self.fleet.starts(now)
        if self.book.version < 0:
            who = "; ".join(filter(None, (f"all wait for the learner to publish version {step}", starts)))
        elif step == self._config.run.steps:
            who = f"the run waits for {self._evaluations.pending} evaluation prompts"
        elif learner_waits:
            who = (
                "the learner waits: "
                + "an engine's parity probe; " * probes
                + self.book.waiting_for(step, starts)
            )
        else:
            who = f"the learner trains step {step}; {num_asking} generators wait for {budget}"
        told = STARTING if starts and starts in who else "waiting"
        return "; ".join(filter(None, (who, self.fleet.long_waits(now, told))))

    def status(self, waiting_for: str) -> RunStatus:
        idle, alive = self._learner_idle
        return RunStatus(
            version=self.book.version,
            num_trained_steps=self.book.num_consumed,
            elapsed_s=self.seconds,
            tokens=self.ledger.token_account(),
            groups=self.ledger.group_account(),
            trained_twice=self.book.trained_twice,
            staleness_histogram=dict(sorted(self.ledger.staleness.items())),
            admission_lag=self.book.lag,
            learner_idle_share=idle / alive if alive else 0.0,
            quarantined=self.book.quarantine.last,
            num_quarantined=self.book.quarantine.total,
            replayed_tokens=self.ledger.replayed,
            refused_requests=dict(self.refusals),
            waiting_for=waiting_for,
            milestones=self.reached,
            standstill_s=self._clock() - self._watchdog.moved_at,
            **self.fleet.summary(self._clock()),
        )
