"""The learner's way through a run: it publishes versions, is handed batches, reports trained steps, and
may go back."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from buffers import events as e
from buffers import messages as m
from buffers.book import Book
from buffers.book_state import find_needed_segments
from buffers.controller import LagController
from buffers.evaluation import Evaluations
from buffers.evaluation_samples import EvaluationSamples
from buffers.groups import Handout
from buffers.journal import Journal
from buffers.refusal import Refusal
from buffers.run_status import StepRecord
from buffers.segments import Reader, join_slices, read_bytes, segment_path
from buffers.staleness import count_trainable
from buffers.step_records import StepRecords, make_report
from buffers.watchdog import Watchdog
from configs.buffer import Retention
from configs.schema import Config
from configs.staleness import OnLate

log = logging.getLogger("slipstream.buffer")

LAG_METRIC = "staleness/admission_lag"


class Progress:
    """Not thread-safe. Changes are durable after the buffer's next `commit`."""

    def __init__(
        self,
        config: Config,
        book: Book,
        journal: Journal,
        evaluations: Evaluations,
        samples: EvaluationSamples,
        watchdog: Watchdog,
        milestones: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._config, self._book, self._journal, self._evaluations = config, book, journal, evaluations
        self._samples, self._watchdog, self._milestones, self._clock = samples, watchdog, milestones, clock
        self._reader = Reader(journal.folder)
        self._controller = LagController(config.staleness, config.max_versions)
        book.leases.admission_lag = self._controller.lag
        self.manifest_locator = ""
        """Where the manifest of the newest version is."""
        self.step_records = StepRecords()
        self._started_at: float | None = None
        self._learner_idle = (0.0, 0.0)
        """Seconds that the learner has waited, and seconds of its life."""

    @property
    def version(self) -> int:
        """The newest published version; -1 before the first and after a rewind."""
        return self._book.history.version

    @property
    def next_step(self) -> int:
        """The step that is trained next. All steps before it are trained."""
        return self._book.history.next_step

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first version was published after the run was started or resumed."""
        return 0.0 if self._started_at is None else self._clock() - self._started_at

    @property
    def learner_idle_share(self) -> float:
        """Share of its life that the learner has waited, within 0 .. 1."""
        idle_s, alive_s = self._learner_idle
        return idle_s / alive_s if alive_s else 0.0

    def publish_version(self, version: int, manifest_locator: str) -> None:
        """Books a new version.

        Raises Refusal for one that is not above the newest, unless it is the newest said again.
        """
        newest = self.version
        if version == newest and manifest_locator == self.manifest_locator:
            return
        if version <= newest:
            raise Refusal("wrong version", f"version must be above {newest}, got {version}")
        self._book.history.publish_version(version)
        self._book.leases.note_published(version, self._clock())
        self.manifest_locator = manifest_locator
        self._watchdog.note_movement()
        self._book.note(e.Published(version, manifest_locator, time.time()))
        self.step_records.note_published(time.time())
        if self._started_at is None:
            self._started_at = self._clock()
            self._milestones["learner"] = time.time()
        self._evaluations.request_version(version, manifest_locator)

    def adopt_records(self) -> None:
        """Goes on from the step records of an earlier life, if there are any: its time, and how many
        versions ahead groups are leased."""
        records = self.step_records
        if records.began_at is not None:
            self._started_at = self._clock() - max(0.0, time.time() - records.began_at)
        if records.last is not None:
            self._book.leases.admission_lag = self._controller.lag = int(records.last.metrics[LAG_METRIC])

    # ---- batches

    def hand_out(self, step: int) -> Handout | None:
        """Returns the groups that a step trains; None while some of them are missing, or the step is not the
        next.

        Raises Refusal for a step that is trained already.
        """
        if step < self.next_step:
            raise Refusal(
                "wrong step",
                f"step must be {self.next_step} or later (or send RewindToStep first), got {step}",
            )
        return self._book.history.hand_out(step, self._clock()) if step == self.next_step else None

    def list_slices(self, handout: Handout) -> list[m.GroupSlice]:
        """Returns where the groups are. Groups that lie together are one slice."""
        return join_slices(map(self._book.pool.get_content, handout.groups))

    def read_part(self, request: m.ReadBatchPart) -> bytes:
        """Returns a part of a record batch, for readers that cannot map the journal; less where the file
        is shorter."""
        try:
            return read_bytes(self._journal.folder, request.segment, request.offset, request.size)
        except FileNotFoundError:
            return b""

    def replace_damaged(self, groups: Sequence[int]) -> int:
        """A learner found these groups damaged. Those that the buffer finds damaged too get a fresh one in
        their place.

        Returns how many those are.
        """
        pool = self._book.pool
        damaged = [
            number
            for number in set(groups)
            if number in pool.groups and not self._reader.is_intact(pool.get_content(number))
        ]
        for number in damaged:
            self.reject_damaged(number)
        return len(damaged)

    def reject_damaged(self, number: int) -> None:
        content = self._book.pool.get_content(number)
        path = segment_path(self._journal.folder, content.segment)
        error = f"its {content.size} bytes at {content.offset} of {path} are not those that were written"
        log.error("group %d is damaged, and a fresh one takes its place: %s", number, error)
        self._book.history.replace_damaged(number, error)

    # ---- steps

    def finish_step(self, request: m.ReportTrainedStep) -> None:
        """A step has been trained. Raises Refusal unless it is the one at hand, or was reported before."""
        step = request.step
        if step < self.next_step:
            return
        handout = self.hand_out(step)
        if handout is None:
            raise Refusal("wrong step", f"consumed step must be the one handed out, got {step}")
        samples = self._find_shown_groups(step, handout)
        event = self._count_step(step, handout)
        if sum(event.trained) != request.num_trained:
            raise Refusal(
                "wrong count",
                f"num_trained must be {sum(event.trained)} at step {step}, got {request.num_trained}",
            )
        if sum(event.excluded) and self._config.staleness.on_late is not OnLate.mask:
            num_late = sum(event.excluded)
            log.error("step %d: %d tokens were beyond the bound and masked: a defect", step, num_late)
        self._book.history.train_step(event)
        ledger = self._book.ledger
        assert ledger.closes(), f"the ledger does not close after step {step}: {vars(ledger)}"
        self._watchdog.note_movement()
        self._milestones.setdefault("first_step", time.time())
        self._learner_idle = (request.idle_s, request.alive_s)
        admission_lag = self._controller.update_lag(step, request.metrics)
        self._book.leases.admission_lag = admission_lag
        metrics = request.metrics | {LAG_METRIC: float(admission_lag)}
        record = StepRecord(step=step, time=self.elapsed_s, metrics=metrics, samples=samples)
        self.step_records.add_record(record)
        self._book.note(make_report(record))

    def _find_shown_groups(self, step: int, handout: Handout) -> list[m.GroupSlice]:
        tables = self._config.tracking.samples
        shown = handout.groups[: tables.count] if step % tables.every == 0 else []
        return join_slices(map(self._book.pool.get_content, shown))

    def _count_step(self, step: int, handout: Handout) -> e.Trained:
        """Counts the tokens of a step from the versions that the journal has of each group."""
        max_versions = self._book.terms.max_versions
        counts = [
            count_trainable(self._book.pool.get_content(group).tokens_by_version(), step, max_versions)
            for group in handout.groups
        ]
        staleness: Counter[int] = Counter()
        for _, _, by_staleness in counts:
            staleness.update(by_staleness)
        return e.Trained(
            step=step,
            groups=handout.groups,
            trained=[num_trained for num_trained, _, _ in counts],
            excluded=[num_excluded for _, num_excluded, _ in counts],
            staleness=dict(sorted(staleness.items())),
            group_weights=handout.group_weights,
            at=time.time(),
        )

    def keep_checkpoint(self, step: int, oldest: int) -> None:
        """The learner has the checkpoint of `step` and can go back to `oldest` at the earliest.

        Segments that only earlier steps needed may go (`buffer.retention`). Raises Refusal for steps that
        cannot be.
        """
        if not oldest <= step <= self.next_step:
            raise Refusal(
                "wrong step",
                f"checkpoint must be of a step that was trained, and not be older than the oldest kept, "
                f"got {step} (oldest {oldest}) when {self.next_step} steps are trained",
            )
        self._book.history.keep_checkpoint(e.Checkpointed(step, oldest))
        self._journal.request_rotation()
        if self._config.buffer.retention is Retention.all:
            return
        if unneeded := sorted(self._journal.closed_segments() - find_needed_segments(self._book)):
            self._journal.drop_segments(unneeded)

    def rewind_to(self, step: int) -> None:
        """The learner goes on from the checkpoint of `step`.

        Raises ValueError for a step that it cannot go back to.
        """
        self._book.rewind_to(step)
        self._evaluations.rewind_to(step)
        self._samples.rewind_to(step)
        self._watchdog.note_movement()
        num_ready = len(self._book.pool.groups)
        log.info("rewound to step %d; %d complete groups wait to be trained", step, num_ready)
