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
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from buffers import events as e
from buffers import messages as m
from buffers.book import Book
from buffers.book_state import count_entries, export_book
from buffers.evaluation import Evaluations
from buffers.intake import Intake
from buffers.journal import Journal
from buffers.progress import Progress
from buffers.recovery import find_damaged_groups, rebuild_book
from buffers.refusal import RefusalCounts
from buffers.role_registry import STARTING, RoleRegistry
from buffers.run_status import RunStatus
from buffers.samplers import load_sampler
from buffers.segments import Reader
from buffers.state import State
from buffers.terms import make_terms, record_terms
from buffers.watchdog import Stuck, Watchdog
from configs.buffer import Retention
from configs.schema import Config

log = logging.getLogger("slipstream.buffer")


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
        self._terms = terms = make_terms(config)
        # A random start, so that no lease of an earlier life has the same number.
        self._lease_ids = itertools.count(secrets.randbits(30) << 32)
        sampler = load_sampler(config.buffer.sampler, config.buffer.sampler_args)
        self.book = Book(terms, sampler=sampler, lease_ids=self._lease_ids)
        self.evaluations = Evaluations(terms.task, terms.seed, terms.lease_s, terms.max_attempts)
        self.refusals = RefusalCounts()
        self._watchdog = Watchdog(config.buffer.watchdog_s, clock)
        self.milestones: dict[str, float] = {}
        """Unix time in seconds at which this life of the buffer reached a milestone, by name."""
        self.roles = RoleRegistry(config.generators.count, self.milestones)
        self.stopping: str | None = None
        """Why the run is being stopped; None while it is not."""
        self.journal = Journal(folder, config.buffer.durability, config.buffer.segment_mb << 20)
        try:
            self.progress = Progress(
                config, self.book, self.journal, self.evaluations, self._watchdog, self.milestones, clock
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
            self.book, self.evaluations, found, self._terms, now, self.progress.request_evaluation
        )
        if resume_step is not None:
            self.book.history.check_rewind(resume_step)
        damaged = find_damaged_groups(self.book, found, Reader(self.journal.folder))
        for what in self.journal.begin(found, self._export_state()):
            log.warning("recovery has set aside from the journal: %s", what)
        self.book.note = self.journal.note_event
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

    def _export_state(self) -> State:
        return State(
            terms=record_terms(self._terms),
            book=export_book(self.book),
            manifest_locator=self.progress.manifest_locator,
            unevaluated=self.evaluations.list_unfinished(),
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
        self.journal.close(self._export_state() if in_good_order else None)

    def stop(self, reason: str) -> None:
        """Gives out no more leases. The first reason stays."""
        self.stopping = self.stopping or reason

    def refuse_message(self, reason: str, detail: str) -> m.RefusedRequest:
        """Counts a message that is not taken in and returns the answer to it."""
        self.refusals.refuse_message(reason, detail)
        return m.RefusedRequest(reason=detail)

    # ---- generators

    def join_generator(self, generator: str) -> None:
        """A generator begins a new life. The leases that it held before are given out again."""
        self._release_generator(generator, f"{generator} was started again")
        self.roles.begin_life(generator, self._clock())

    def remove_generator(self, generator: str, error: str | None) -> None:
        """A generator has left; `error` is None when it left in good order."""
        self._release_generator(generator, error)
        self.roles.remove_generator(generator)

    def _release_generator(self, generator: str, error: str | None) -> None:
        for group, outcome in self.book.leases.release_generator(generator, error):
            self.intake.note_lost(group, outcome, error or "left")
        self.evaluations.release_generator(generator)

    def count_openings(self) -> int:
        """Returns how many leases there are to be had at most."""
        return self.evaluations.num_waiting + self.book.leases.count_openings()

    def lease_next(self, generator: str) -> m.Lease | None:
        """Returns one lease; None when there is none to be had. Held-out prompts come first."""
        if self.progress.version < 0 or self.stopping is not None:
            return None
        now = self._clock()
        held_out = self.evaluations.lease_next(self._lease_ids, generator, now)
        return held_out or self.book.leases.lease_next(generator, now)

    def take_heartbeat(self, beat: m.GeneratorHeartbeat) -> list[int]:
        """Renews leases, unless the generator's loop stands still; returns those that are not the
        generator's any more."""
        now = self._clock()
        if self.roles.note_generator(beat, now):
            self._watchdog.note_movement()
        if beat.standstill_s > self._config.buffer.stalled_s:
            error = f"stalled: {beat.activity} for {beat.activity_s:.0f} s"
            self._release_generator(beat.generator, error)
        training = {}
        for lease_id, num_tokens in beat.progress.items():
            if self.evaluations.has_lease(lease_id):
                self.evaluations.renew_lease(lease_id, now)
            elif num_tokens >= 0:
                training[lease_id] = num_tokens
        return self.book.leases.renew_leases(beat.generator, training, now)

    def submit_evaluation(self, generator: str, lease: int, reward: float) -> str:
        """Books the reward of a held-out prompt; returns the verdict: `accepted`, `duplicate` or `failed`."""
        if not self.evaluations.has_lease(lease):
            return "duplicate"
        if not np.isfinite(reward):
            detail = f"from {generator}: reward must be finite, got {reward}"
            self.refusals.refuse_message("malformed evaluation", detail)
            self.evaluations.fail_lease(lease)
            return "failed"
        self._watchdog.note_movement()
        self.evaluations.submit_reward(lease, reward)
        for score in self.evaluations.finish_sweeps(self.progress.elapsed_s):
            self.book.note(e.Evaluated(score.version, score.reward, score.num_prompts, time.time()))
            log.info(
                "version %d scores %.3f on %d held-out prompts",
                score.version,
                score.reward,
                score.num_prompts,
            )
        return "accepted"

    def fail_lease(self, lease: int, num_tokens: int, error: str, *, revoked: bool = False) -> str:
        """Books that a lease came to nothing. With `revoked` it does not count against `max_attempts`."""
        if self.evaluations.has_lease(lease):
            self.evaluations.fail_lease(lease)
            return "failed"
        return self.intake.fail_lease(lease, num_tokens, error, revoked=revoked)

    def find_holder(self, lease: int) -> str:
        """Returns the generator that a lease was given to; empty where that is not known, or not known any
        more."""
        attempt = self.book.leases.attempts.find_attempt(lease)
        return self.evaluations.find_holder(lease) if attempt is None else attempt.generator

    # ---- time, and what can be said of it

    def check_time(self) -> None:
        """Expires leases, cancels stragglers, and looks whether the run gets on.

        Raises Stuck when nothing has moved and nobody has been at work for twice `buffer.watchdog_s`, or when
        `buffer.max_quarantined` groups have failed for good with none accepted between.
        """
        now = self._clock()
        for group, outcome in self.book.leases.expire_leases(now):
            self.intake.note_lost(group, outcome, "lease expired")
        self.evaluations.expire_leases(now)
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
        if self.roles.is_at_work(now, self._config.buffer.stalled_s):
            self._watchdog.note_work()
        self._watchdog.check_standstill(self.describe_waiting)

    def describe_waiting(
        self, *, learner_waits: bool = True, probes: bool = False, num_asking: int = 0
    ) -> str:
        """Returns a sentence that says who waits for whom, who has not been heard of, and who does one thing
        for long.

        `learner_waits`: the learner has asked for a batch or a probe. `probes`: it has asked for a parity
        probe. `num_asking`: generators that have asked for leases.
        """
        step, now = self.progress.next_step, self._clock()
        starts = self.roles.describe_starts(now)
        if self.progress.version < 0:
            who = f"all wait for the learner to publish version {step}" + (f"; {starts}" if starts else "")
        elif step == self._config.run.steps:
            who = f"the run waits for {self.evaluations.num_unanswered} evaluation prompts"
        elif learner_waits:
            probe = "an engine's parity probe; " if probes else ""
            who = f"the learner waits: {probe}{self.book.leases.describe_missing(step, starts)}"
        else:
            who, budget = f"the learner trains step {step}", self.book.leases.name_reached_budget()
            if num_asking:
                limit = budget or "the staleness bound admits no more groups"
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
            **self.roles.summarize(self._clock()),
        )
