"""The replay buffer: leases out, groups in, batches out, everything on the record. No sockets:
`buffers.server` has those.

    lease ─▶ submit: check, journal, book ─▶ hand out: the groups of a step ─▶ finish the step
                                 │
                              commit: one write, and one fsync, for all that has come in since the last

A buffer that is opened on a folder reads the newest state there, applies the log since, and goes on from
there.
"""

import itertools
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from buffers import events as e
from buffers import messages as m
from buffers.attempts import BEGIN_S
from buffers.book import Book
from buffers.book_state import count_entries, export_book
from buffers.evaluation import Evaluations
from buffers.evaluation_samples import EvaluationSamples
from buffers.intake import Intake
from buffers.journal import Journal
from buffers.progress import Progress
from buffers.recovery import find_damaged_groups, rebuild_book
from buffers.refusal import Refusal, RefusalCounts
from buffers.role_registry import STARTING, RoleRegistry
from buffers.run_status import RunStatus, Scaling
from buffers.samplers import load_sampler
from buffers.segments import Reader
from buffers.state import State
from buffers.step_records import StepRecords
from buffers.terms import make_terms, record_terms
from buffers.trajectory import MalformedGroup
from buffers.watchdog import Stuck, Watchdog
from configs.buffer import Retention
from configs.schema import Config

log = logging.getLogger("slipstream.buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRoom:
    """The bounds of a generator's next lease."""

    num_samples: int
    """Samples at most; a generator that plays no evaluation prompt may get one with more."""
    num_evaluated: int
    """Samples of an evaluation prompt at most while the run trains."""
    takes_groups: bool
    held: int | None = None
    """Version that the generator holds; -1 before the first. None: it can begin any group at once."""


ANY_LEASE = LeaseRoom(num_samples=2**20, num_evaluated=2**20, takes_groups=True)


class Buffer:
    """Not thread-safe. Changes are durable after the next `commit`.

    `intake` takes in groups; `progress` is the learner's side; `book` is what both keep.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the journal in `folder` and goes on from its contents, with `resume_step` from the checkpoint
        of that step.

        Raises ValueError for a step that it cannot go back to, and when another process writes the journal.
        """
        self._config, self._clock = config, clock
        self.samples_per_group = config.samples_per_group
        self._terms = terms = make_terms(config)
        # A random start, so that no lease of an earlier life has the same number.
        self._lease_ids = itertools.count(secrets.randbits(30) << 32)
        sampler = load_sampler(config.buffer.sampler, config.buffer.sampler_args)
        self.book = Book(terms, sampler=sampler, lease_ids=self._lease_ids)
        self.evaluations = Evaluations(config)
        self.samples = EvaluationSamples(config, folder.parent / "evaluations")
        self.refusals = RefusalCounts()
        self._watchdog = Watchdog(config.buffer.watchdog_s, clock)
        self.milestones: dict[str, float] = {}
        """Unix time in seconds at which this life of the buffer reached a milestone, by name."""
        self.roles = RoleRegistry(len(config.engine_names), self.milestones)
        self.stopping: str | None = None
        """Why the run is being stopped; None while it is not."""
        self.scaling: Scaling | None = None
        """The last change of the number of generators that this life of the buffer has heard of."""
        self._unheard_leases: defaultdict[str, set[int]] = defaultdict(set)
        """By generator: leases of an earlier life of the buffer that no heartbeat has named in this one."""
        self._recovered_at = clock()
        """When this life has begun, in seconds on the buffer's clock."""
        self.journal = Journal(folder, config.buffer.durability, config.buffer.segment_mb << 20)
        try:
            self.progress = Progress(
                config,
                self.book,
                self.journal,
                self.evaluations,
                self.samples,
                self._watchdog,
                self.milestones,
                clock,
            )
            self.intake = Intake(
                config, self.book, self.journal, self.refusals, self._watchdog, self.milestones
            )
            self._recover(resume_step)
        except BaseException:
            self.journal.close()
            raise

    def _recover(self, resume_step: int | None) -> None:
        """Goes on from the contents of the journal. Nothing in it is changed before all is known to fit."""
        began, now = time.monotonic(), self._clock()
        found = self.journal.recover()
        self.progress.manifest_locator = rebuild_book(
            self.book, self.evaluations, found, self._terms, now, self.progress.step_records
        )
        if resume_step is not None:
            self._check_resume_step(resume_step)
            self.progress.step_records = StepRecords()
        self.progress.adopt_records()
        damaged = find_damaged_groups(self.book, found, Reader(self.journal.folder))
        for what in self.journal.begin(found, self._export_state()):
            log.warning("recovery has set aside from the journal: %s", what)
        self.book.note = self.journal.note_event
        if self.progress.version >= 0:
            self.book.leases.note_published(self.progress.version, now)
        for attempt in self.book.leases.attempts.under_way.values():
            self._unheard_leases[attempt.generator].add(attempt.lease)
        for number in damaged:
            self.progress.reject_damaged(number)
        if resume_step is not None:
            self.progress.rewind_to(resume_step)
        if found.state is not None or found.tail.lines:
            log.info(
                "recovered in %.2f s from a state and %d events: step %d, "
                "%d complete groups wait to be trained",
                time.monotonic() - began,
                len(found.tail.lines),
                self.progress.next_step,
                len(self.book.pool.groups),
            )

    def _check_resume_step(self, step: int) -> None:
        """Raises ValueError where the journal cannot go back to the newest checkpoint that was found."""
        try:
            self.book.history.check_rewind(step)
        except ValueError as error:
            found = f"step {step} at most" if step else "none"
            raise ValueError(
                "run.resume must be a folder with the checkpoints that its journal knows of (they are on the "
                f"host of the learner that wrote them: docs/cluster.md), got {found}: {error}"
            ) from None

    def _export_state(self) -> State:
        return State(
            terms=record_terms(self._terms),
            book=export_book(self.book),
            manifest_locator=self.progress.manifest_locator,
            unevaluated=self.evaluations.list_unfinished(),
            carried_evaluations=self.evaluations.list_carried(),
            unevaluated_locators=self.evaluations.list_unfinished_locators(),
            num_evaluations=self.evaluations.num_records,
            evaluation_numbers=[record.number for record in self.evaluations.records],
            evaluations=self.evaluations.list_results(),
            step_records=self.progress.step_records.export_state(),
            next_segment=0,
            open_segment=None,
        )

    def commit(self) -> None:
        """Makes all changes durable, as `buffer.durability` has it."""
        self.start_commit().result()

    def start_commit(self) -> "Future[None]":
        """Starts what `commit` does; the future that it returns waits for the disk."""
        done = self.journal.start_commit()
        if self.journal.wants_rotation(count_entries(self.book)):
            keep_logs = self._config.buffer.retention is Retention.all
            self.journal.rotate(self._export_state(), keep_logs=keep_logs)
        return done

    def close(self, *, in_good_order: bool = True) -> None:
        """Closes the journal. In good order it leaves a state behind.

        After an error the book may be half-changed, so no state is written and the next opening applies the
        log.
        """
        self.samples.close()
        self.journal.close(self._export_state() if in_good_order else None)

    def stop(self, reason: str) -> None:
        """Gives out no more leases. The first reason stays."""
        self.stopping = self.stopping or reason

    def order_scaling(self, order: str, count: int) -> None:
        """Notes an order for the driver. Raises Refusal while another change is under way, and at the end of
        the run."""
        if self.stopping is not None:
            raise Refusal("too late", f"the run is told to stop: {self.stopping}")
        known = self.scaling
        if known is not None and known.order == order:
            return
        if known is not None and not known.ended:
            raise Refusal(
                "scaling",
                f"another change must have ended, got one to {known.count} generators under way "
                f"({known.progress or 'not begun'})",
            )
        self.scaling = Scaling(order=order, count=count)

    def note_scaling(self, scaling: Scaling) -> None:
        """The driver says how far it is with a change. It may not have heard of an order that came after."""
        if scaling.ended and self.scaling is not None and self.scaling.order != scaling.order:
            return
        self.scaling = scaling
        if scaling.ended and not scaling.failed:
            self.roles.num_wanted = scaling.count + self._config.eval.generators

    def refuse_message(self, reason: str, detail: str) -> m.RefusedRequest:
        """Counts a message that is not taken in and returns the answer to it."""
        self.refusals.refuse_message(reason, detail)
        return m.RefusedRequest(reason=detail)

    # ---- generators

    def join_generator(self, generator: str, *, evaluates: bool = False) -> None:
        """A generator begins a new life. The leases that it held before are given out again.

        Raises Refusal for a generator for evaluation alone in a run whose others evaluate.
        """
        if evaluates and not self.evaluations.has_own_generators:
            raise Refusal(
                "wrong purpose",
                "eval.generators must be at least 1 in the run that a generator for evaluation joins, got 0",
            )
        self._release_generator(generator, f"{generator} was started again")
        self.roles.begin_life(generator, self._clock(), evaluates=evaluates)

    def remove_generator(self, generator: str, error: str | None) -> None:
        """A generator has left; `error` is None when it left in good order."""
        self._release_generator(generator, error)
        self.roles.remove_generator(generator, self._clock())

    def _release_generator(self, generator: str, error: str | None) -> None:
        for group, outcome in self.book.leases.release_generator(generator, error):
            self.intake.note_lost(group, outcome, error or f"{generator} left", counts=error is not None)
        self.evaluations.release_generator(generator, counts=error is not None)

    def count_openings(self) -> int:
        """Returns how many leases there are to be had at most."""
        return self.evaluations.num_waiting + self.book.leases.count_openings()

    def lease_next(self, generator: str, room: LeaseRoom = ANY_LEASE) -> m.Lease | None:
        """Returns one lease; None when there is none to be had.

        Groups of the step at hand come first, then evaluation prompts, then groups of later steps. A
        generator that has no room for a group at hand gets no prompt either, so its room grows. One that has
        left gets nothing: its request may have come over another connection, after its farewell.
        """
        if self.progress.version < 0 or self.stopping is not None or self.roles.has_left(generator):
            return None
        now, leases = self._clock(), self.book.leases
        if generator in self.roles.evaluators:
            # It hears of the version that is evaluated, whether it has leases or not.
            if room.held not in (None, self.evaluations.next_version):
                return None
            return self.evaluations.lease_next(self._lease_ids, generator, now, room.num_samples)
        is_at_hand = leases.has_opening_at_hand and leases.count_openings() > 0
        if is_at_hand and not room.takes_groups:
            return None
        if is_at_hand and (group := leases.lease_next(generator, now, room.held)) is not None:
            return group
        if not self.evaluations.has_own_generators and self._can_begin_prompt(room.held, now):
            is_trained = self.progress.next_step == self._config.run.steps
            most = room.num_samples if is_trained else room.num_evaluated
            prompt = self.evaluations.lease_next(self._lease_ids, generator, now, most)
            if prompt is not None:
                return prompt
        return leases.lease_next(generator, now, room.held) if room.takes_groups else None

    def _can_begin_prompt(self, held: int | None, now: float) -> bool:
        """True for a generator that has the version of the next evaluation prompt, or will have it soon."""
        version = self.evaluations.next_version
        if held is None or version is None:
            return True
        return held >= min(version, self.book.leases.find_last_follower(now))

    def find_oldest_useful(self) -> int:
        """Returns the oldest version with which a generator that trains may get any of the leases that are to
        be had; a version that nobody holds where there are none for it."""
        leases, prompts = self.book.leases, self.evaluations
        floors = [leases.next_floor] if leases.has_opening else []
        if prompts.next_version is not None and not prompts.has_own_generators:
            floors.append(prompts.next_version)
        return min(*floors, leases.find_last_follower(self._clock())) if floors else self.progress.version + 1

    def take_heartbeat(self, beat: m.GeneratorHeartbeat) -> list[int]:
        """Renews leases, unless the generator's loop stands still, and takes back those that it could not
        begin; returns those that are not the generator's any more."""
        now, leases = self._clock(), self.book.leases
        if self.roles.note_generator(beat, now):
            self._watchdog.note_movement()
        if beat.standstill_s > self._config.buffer.stalled_s:
            error = f"stalled: {beat.activity} for {beat.activity_s:.0f} s"
            self._release_generator(beat.generator, error)
        for group, outcome in leases.take_back_overdue(
            beat.generator, [*beat.overdue, *self._find_unheard(beat, now)]
        ):
            self.intake.note_lost(group, outcome, f"{beat.generator} could not begin it", counts=False)
        training, overdue = {}, frozenset(beat.overdue)
        for lease_id, num_tokens in beat.progress.items():
            if self.evaluations.has_lease(lease_id):
                if self.evaluations.find_holder(lease_id) != beat.generator:
                    continue  # nobody speaks for another
                if lease_id in overdue:
                    self.evaluations.fail_lease(lease_id, counts=False)
                else:
                    self.evaluations.renew_lease(lease_id, now)
            elif num_tokens >= 0:
                training[lease_id] = num_tokens
        return leases.renew_leases(beat.generator, training, now)

    def _find_unheard(self, beat: m.GeneratorHeartbeat, now: float) -> set[int]:
        """Returns leases of an earlier life of the buffer that no heartbeat has named for `BEGIN_S`: their
        grant was lost with that life, and nobody would begin them."""
        unheard = self._unheard_leases.get(beat.generator, set())
        unheard.difference_update(beat.progress)
        return unheard if now - self._recovered_at > BEGIN_S else set()

    def submit_evaluation(self, answer: m.SubmitEvaluation, rows: memoryview | None = None) -> str:
        """Books the scored samples of an evaluation prompt; returns the verdict: `accepted`, `duplicate` or
        `failed`."""
        if not self.evaluations.has_lease(answer.lease):
            return "duplicate"
        name, version, prompt = self.evaluations.find_prompt(answer.lease)
        fault = self.evaluations.find_fault(answer, self.progress.version)
        try:
            if fault is None and rows is not None:
                rows = self.samples.check_rows(answer, rows, prompt, version)
        except MalformedGroup as error:
            fault = str(error)
        if fault is not None:
            self.refusals.refuse_message("malformed evaluation", f"from {answer.generator}: {fault}")
            self.evaluations.fail_lease(answer.lease)
            self._finish_evaluations()
            return "failed"
        self._watchdog.note_movement()
        if rows is not None:
            self.samples.append_prompt(name, version, rows)
        self.evaluations.submit_answer(answer)
        self._finish_evaluations()
        return "accepted"

    def _finish_evaluations(self) -> None:
        """Writes down the results of the sweeps that have all answers."""
        for result in self.evaluations.finish_sweeps():
            self.samples.finish_set(result.evaluation_set, result.version)
            self.book.note(e.Evaluated(version=result.version, at=time.time(), result=result))
            log.info(
                "version %d has an average reward of %s on %s (%d prompts, %d failed)",
                result.version,
                "none" if result.avg is None else f"{result.avg:.3f}",
                result.evaluation_set,
                result.prompts,
                result.failed,
            )

    def fail_lease(self, lease: int, num_tokens: int, error: str, *, revoked: bool = False) -> str:
        """Books that a lease came to nothing. With `revoked` it does not count against `max_attempts`."""
        if self.evaluations.has_lease(lease):
            self.evaluations.fail_lease(lease, counts=not revoked)
            self._finish_evaluations()
            return "failed"
        return self.intake.fail_lease(lease, num_tokens, error, revoked=revoked)

    def find_holder(self, lease: int) -> str:
        """Returns the generator that a lease was given to; empty where that is not known, or not known any
        more."""
        attempt = self.book.leases.attempts.find_attempt(lease)
        return self.evaluations.find_holder(lease) if attempt is None else attempt.generator

    # ---- time, and what can be said of it

    def extend_leases(self, seconds: float) -> None:
        """Lets all leases run longer."""
        self.book.leases.attempts.extend_deadlines(seconds)
        self.evaluations.extend_leases(seconds)

    def check_time(self) -> None:
        """Expires leases, cancels stragglers, and looks whether the run gets on.

        Raises Stuck when nothing has moved and nobody has been at work for twice `buffer.watchdog_s`, or when
        `buffer.max_quarantined` groups have failed for good with none accepted between, or
        `curriculum.max_refills` have taught nothing.
        """
        now = self._clock()
        self.roles.forget_generators(now)
        for group, outcome in self.book.leases.expire_leases(now):
            self.intake.note_lost(group, outcome, "lease expired")
        self.evaluations.expire_leases(now)
        self._finish_evaluations()
        for group in self.book.leases.cancel_stragglers(now):
            timeout_s = self._config.staleness.straggler_timeout_s
            log.warning("group %d held its step for %s s: cancelled", group, timeout_s)
        if self.intake.quarantined_in_a_row >= self._config.buffer.max_quarantined:
            group, error = next(reversed(self.book.leases.quarantine.last.items()))
            num_groups, attempts = self.intake.quarantined_in_a_row, self._config.buffer.max_attempts
            raise Stuck(
                f"{num_groups} groups in a row have failed {attempts} times each, the last of them "
                f"(group {group}) with: {error}"
            )
        self.intake.refills.check_end()
        if self.roles.is_at_work(now, self._config.buffer.stalled_s):
            self._watchdog.note_work()
        self._watchdog.check_standstill(self.describe_waiting)

    def describe_waiting(
        self, *, learner_waits: bool = True, probes: bool = False, num_asking: int = 0
    ) -> str:
        """Returns a sentence that says who waits for whom, who has not been heard of, and who does one thing
        for long.

        `learner_waits`: the learner has asked for a batch or a probe. `probes`: it has asked for a parity
        probe. `num_asking`: generators that have asked for leases of groups.
        """
        step, now = self.progress.next_step, self._clock()
        starts = self.roles.describe_starts(now)
        if self.progress.version < 0:
            who = f"all wait for the learner to publish version {step}" + (f"; {starts}" if starts else "")
        elif step == self._config.run.steps:
            who = f"the run waits for {self.evaluations.num_unanswered} evaluation prompts"
        elif learner_waits:
            probe = "an engine's parity probe; " if probes else ""
            nobody = starts or self.roles.describe_lag(self.book.leases.next_floor)
            who = f"the learner waits: {probe}{self.book.leases.describe_missing(step, nobody)}"
        else:
            who, budget = f"the learner trains step {step}", self.book.leases.name_reached_budget()
            limit = self.book.leases.describe_limit() if num_asking else None
            if limit is not None:
                who += f"; {num_asking} generators wait for leases: {limit}"
            elif budget is not None:
                who += f"; {budget}"
        told = STARTING if starts and starts in who else "waiting"
        return "; ".join(filter(None, (who, self.roles.describe_long_waits(now, told))))

    def make_status(self, waiting_for: str) -> RunStatus:
        """Returns the state of the run; `waiting_for` is the sentence of `describe_waiting`."""
        history, leases, ledger = self.book.history, self.book.leases, self.book.ledger
        return RunStatus(
            version=history.version,
            num_trained_steps=history.next_step,
            elapsed_s=self.progress.elapsed_s,
            tokens=ledger.token_account(),
            groups=ledger.group_account(),
            trained_twice=history.trained_twice,
            staleness_histogram=dict(sorted(ledger.staleness.items())),
            admission_lag=leases.admission_lag,
            learner_idle_share=self.progress.learner_idle_share,
            quarantined=leases.quarantine.last,
            num_quarantined=leases.quarantine.total,
            replayed_tokens=ledger.replayed,
            refused_requests=dict(self.refusals.by_reason),
            waiting_for=waiting_for,
            milestones=self.milestones,
            standstill_s=self._watchdog.standstill_s,
            sources=self.book.supply.list_reports(),
            curriculum=self._list_curriculum_figures(),
            skipped_evaluations=self.evaluations.num_skipped,
            oldest_checkpoint=history.oldest_checkpoint,
            ended=self.stopping is not None,
            scaling=self.scaling,
            **self.roles.summarize(self._clock()),
        )

    def _list_curriculum_figures(self) -> dict[str, float]:
        share = self.intake.refills.rejected_share
        refilled = {} if share is None else {"refilled_share": share}
        return self.book.supply.curriculum.list_figures() | refilled
