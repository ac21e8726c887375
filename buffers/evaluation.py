"""Evaluation of versions: prompts of named sets that generators answer, scored, averaged, and kept out of
training and ledger.

    a version is published ──▶ a sweep for each set that is due ──▶ leases of its prompts ──▶ answers
                                  │                                                             │
                                  └── replaced by a newer version's,                            ▼
                                      while it has not begun and an older one is under way    result

A result is made of all of a sweep's prompts or not at all. At most one version waits behind the one that is
under way, so an evaluation that takes longer than `eval.every` steps does not pile up.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from buffers import events as e
from buffers.evaluation_statistics import EvaluationResult, PromptSamples, summarize_samples
from buffers.messages import Lease, SubmitEvaluation
from buffers.run_status import EvaluationRecord
from configs.eval import HELD_OUT
from configs.schema import Config

log = logging.getLogger("slipstream.buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A named set as the buffer asks for it."""

    name: str
    task: str
    num_prompts: int
    num_samples: int = 1
    every: int = 0
    """Steps between evaluations. 0: only before the first step and after the last."""
    pass_ks: Sequence[int] = (1,)
    passes_at: float = 1.0

    def is_due(self, version: int, last_version: int) -> bool:
        return version in (0, last_version) or (self.every > 0 and version % self.every == 0)


def list_evaluation_sets(config: Config) -> list[EvaluationSet]:
    """Returns the sets of a run: the held-out prompts of its own task, then the named ones."""
    sets = [
        EvaluationSet(
            name=name,
            task=one.task,
            num_prompts=one.num_prompts or 0,
            num_samples=one.samples,
            every=config.eval.every if one.every is None else one.every,
            pass_ks=one.pass_ks,
            passes_at=one.passes_at,
        )
        for name, one in config.eval.sets.items()
    ]
    own = EvaluationSet(
        name=HELD_OUT, task=config.task.name, num_prompts=config.eval.prompts, every=config.eval.every
    )
    return [one for one in (own, *sets) if one.num_prompts]


@dataclass(slots=True)
class Sweep:
    """One evaluation of one version on one set."""

    evaluation_set: EvaluationSet
    version: int
    manifest_locator: str
    """Where the version's manifest is; empty where that is not known."""
    waiting: deque[int]
    """Indices of the prompts that nobody answers at present."""
    answers: dict[int, PromptSamples] = field(default_factory=dict)
    """By prompt."""
    failures: dict[int, int] = field(default_factory=dict)
    """Number of failed attempts by prompt."""
    num_failed: int = 0
    """Prompts that have failed `buffer.max_attempts` times."""
    has_begun: bool = False
    """True once a prompt was leased."""
    replaced: frozenset[int] = frozenset()
    """Versions for which it stands, because the set is evaluated on this one instead. Empty where the set is
    evaluated on this version anyhow."""

    @property
    def num_unanswered(self) -> int:
        return self.evaluation_set.num_prompts - len(self.answers) - self.num_failed

    def make_result(self) -> EvaluationResult:
        one = self.evaluation_set
        return summarize_samples(
            one.name,
            [self.answers[index] for index in sorted(self.answers)],
            num_failed=self.num_failed,
            k=one.pass_ks,
            passes_at=one.passes_at,
            version=self.version,
            digest=read_digest(self.manifest_locator),
        )


@dataclass(slots=True)
class PromptLease:
    """An evaluation prompt that a generator answers at present."""

    sweep: Sweep
    index: int
    """Index of the prompt in its set."""
    generator: str
    deadline: float
    """When the lease expires, in seconds on the buffer's clock."""


class Evaluations:
    """Sweeps under way, oldest first.

    A prompt whose lease fails or expires is asked again, up to `buffer.max_attempts` times.
    """

    def __init__(self, config: Config) -> None:
        self.sets = list_evaluation_sets(config)
        self._seed, self._last_version = config.run.seed, config.run.steps
        self._lease_s, self._max_attempts = config.buffer.lease_s, config.buffer.max_attempts
        self.has_own_generators = config.eval.generators > 0
        """True where generators of their own answer, with the version that is asked for and no other."""
        self._sweeps: deque[Sweep] = deque()
        self._leases: dict[int, PromptLease] = {}
        self._num_leases: Counter[str] = Counter()
        """Leases by generator."""
        self.records: list[EvaluationRecord] = []
        """Results of all versions that were evaluated, of all lives of the buffer."""
        self.num_records = 0
        """Number of the newest record."""
        self.num_skipped = 0
        """Sweeps that were given up in this life of the buffer."""
        self._overdue: set[str] = set()
        """Sets whose evaluation was lost with a rewind: the next version is evaluated on them."""

    @property
    def num_unanswered(self) -> int:
        """Number of evaluation prompts without an answer."""
        return sum(sweep.num_unanswered for sweep in self._sweeps)

    @property
    def num_waiting(self) -> int:
        """Number of evaluation prompts that nobody answers at present."""
        return sum(len(sweep.waiting) for sweep in self._sweeps)

    @property
    def version_under_way(self) -> tuple[int, str] | None:
        """The oldest version whose evaluation is not finished, with its manifest locator; None for none."""
        return (self._sweeps[0].version, self._sweeps[0].manifest_locator) if self._sweeps else None

    def list_needed_versions(self) -> list[int]:
        """Returns the versions that the learner must keep, because a generator takes them up later."""
        return self.list_unfinished() if self.has_own_generators else []

    def list_unfinished(self) -> list[int]:
        """Returns the versions with a set whose evaluation is not finished."""
        return sorted({sweep.version for sweep in self._sweeps})

    def list_carried(self) -> list[tuple[int, str]]:
        """Returns (version, set) where a set is to be evaluated on a version at which it was not due; -1 for
        the next version."""
        carried = [
            (sweep.version, sweep.evaluation_set.name)
            for sweep in self._sweeps
            if not self._is_due(sweep.evaluation_set, sweep.version)
        ]
        return carried + [(-1, name) for name in sorted(self._overdue)]

    def list_unfinished_locators(self) -> dict[int, str]:
        """Returns where the manifests of those versions are."""
        return {sweep.version: sweep.manifest_locator for sweep in self._sweeps}

    def list_results(self) -> list[EvaluationResult]:
        return [record.result for record in self.records]

    def request_version(self, version: int, manifest_locator: str = "") -> None:
        """Begins a sweep for each set for which the version is due, or whose evaluation was lost before.

        They take the place of those that wait behind an older version's and have not begun: those sets are
        evaluated on this version instead.
        """
        due = {one.name for one in self.sets if self._is_due(one, version)} | self._overdue
        self._overdue = set()
        if not due:
            return
        replaced = [
            sweep
            for sweep in self._sweeps
            if not sweep.has_begun and sweep.version != self._sweeps[0].version
        ]
        self._skip_sweeps(replaced, f"version {version} is due, and an older one is still under way")
        stands_for = dict.fromkeys(due, frozenset[int]())
        for sweep in replaced:
            if (name := sweep.evaluation_set.name) not in due:
                stands_for[name] = stands_for.get(name, frozenset()) | sweep.replaced | {sweep.version}
        self._sweeps += [
            Sweep(
                one,
                version,
                manifest_locator,
                deque(range(one.num_prompts)),
                replaced=stands_for[one.name],
            )
            for one in self.sets
            if one.name in stands_for
        ]

    def request_overdue(self, names: Iterable[str]) -> None:
        """Has the next version evaluated on these sets, whether it is due or not."""
        self._overdue |= {one.name for one in self.sets} & set(names)

    def _is_due(self, one: EvaluationSet, version: int) -> bool:
        return one.is_due(version, self._last_version)

    def _skip_sweeps(self, skipped: Sequence[Sweep], why: str) -> None:
        for sweep in skipped:
            log.warning(
                "version %d is not evaluated on %s: %s", sweep.version, sweep.evaluation_set.name, why
            )
        self.num_skipped += len(skipped)
        self._keep_sweeps(sweep for sweep in self._sweeps if sweep not in skipped)

    def _keep_sweeps(self, kept: Iterable[Sweep]) -> None:
        """Drops all other sweeps, with their leases. Their generators hear that the leases are revoked."""
        self._sweeps = deque(kept)
        alive = {id(sweep) for sweep in self._sweeps}
        self._leases = {number: one for number, one in self._leases.items() if id(one.sweep) in alive}
        self._num_leases = Counter(one.generator for one in self._leases.values())

    # ---- leases of prompts

    @property
    def next_version(self) -> int | None:
        """The version that is to answer the prompt that is leased next; None where no prompt is."""
        sweep = self._find_next_sweep()
        return None if sweep is None else sweep.version

    def _find_next_sweep(self) -> Sweep | None:
        sweep = next((sweep for sweep in self._sweeps if sweep.waiting), None)
        # One generator is not told to take up the next version while another one needs this one.
        if sweep is not None and self.has_own_generators and sweep.version != self._sweeps[0].version:
            return None
        return sweep

    def lease_next(
        self, lease_ids: Iterator[int], generator: str, now: float, room: int | None = None
    ) -> Lease | None:
        """Leases the next prompt of the oldest sweep; None when no prompt waits, or when it has more than
        `room` samples (None: any number).

        A generator that has no prompt gets one with more, if it has any room: or nobody would answer it.
        """
        sweep = self._find_next_sweep()
        if sweep is None or room == 0:
            return None
        if room is not None and sweep.evaluation_set.num_samples > room and self._num_leases[generator]:
            return None
        index, lease_id = sweep.waiting.popleft(), next(lease_ids)
        sweep.has_begun = True
        self._leases[lease_id] = PromptLease(sweep, index, generator, now + self._lease_s)
        self._num_leases[generator] += 1
        return Lease(
            id=lease_id,
            split="eval",
            task=sweep.evaluation_set.task,
            index=index,
            seed=self._seed,
            group=index,
            due=sweep.version,
            min_version=sweep.version,
            num_samples=sweep.evaluation_set.num_samples,
            evaluation=sweep.evaluation_set.name,
        )

    def has_lease(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def find_holder(self, lease_id: int) -> str:
        """Returns the generator that is to answer; empty where no prompt has this lease."""
        return self._leases[lease_id].generator if lease_id in self._leases else ""

    def renew_lease(self, lease_id: int, now: float) -> None:
        self._leases[lease_id].deadline = now + self._lease_s

    def find_fault(self, answer: SubmitEvaluation, newest_version: int) -> str | None:
        """Returns the rule that an answer to a leased prompt breaks; None where it keeps all."""
        sweep = self._leases[answer.lease].sweep
        wanted = sweep.evaluation_set.num_samples
        if len(answer.rewards) != wanted or answer.num_truncated > wanted:
            return (
                f"it must have {wanted} samples, got {len(answer.rewards)}, of them "
                f"{answer.num_truncated} truncated"
            )
        if not all(map(math.isfinite, answer.rewards)):
            return f"its rewards must be finite, got {answer.rewards[:10]}"
        if not sweep.version <= answer.oldest_version <= answer.newest_version <= newest_version:
            return (
                f"versions {sweep.version} to {newest_version} must have sampled it, got "
                f"{answer.oldest_version} to {answer.newest_version}"
            )
        digest = read_digest(sweep.manifest_locator)
        is_exact = (answer.newest_version, answer.digest) == (sweep.version, digest or answer.digest)
        if self.has_own_generators and not is_exact:
            return (
                f"version {sweep.version} alone must have sampled it, with digest {digest}, got version "
                f"{answer.newest_version} with {answer.digest}"
            )
        return None

    def find_prompt(self, lease_id: int) -> tuple[str, int, int]:
        """Returns (set, version, index) of a leased prompt."""
        lease = self._leases[lease_id]
        return lease.sweep.evaluation_set.name, lease.sweep.version, lease.index

    def submit_answer(self, answer: SubmitEvaluation) -> None:
        lease = self._end_lease(answer.lease)
        lease.sweep.answers[lease.index] = PromptSamples(
            rewards=answer.rewards,
            num_tokens=answer.num_tokens,
            num_truncated=answer.num_truncated,
            versions=(answer.oldest_version, answer.newest_version),
        )

    def fail_lease(self, lease_id: int, *, counts: bool = True) -> None:
        """Takes a lease back. With `counts=False` it is no failure of the prompt."""
        lease = self._end_lease(lease_id)
        sweep, index = lease.sweep, lease.index
        times = sweep.failures[index] = sweep.failures.get(index, 0) + counts
        if times < self._max_attempts:
            sweep.waiting.append(index)
        else:
            sweep.num_failed += 1

    def _end_lease(self, lease_id: int) -> PromptLease:
        lease = self._leases.pop(lease_id)
        self._num_leases[lease.generator] -= 1
        return lease

    def extend_leases(self, seconds: float) -> None:
        for lease in self._leases.values():
            lease.deadline += seconds

    def expire_leases(self, now: float) -> None:
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]:
            self.fail_lease(lease_id)

    def release_generator(self, generator: str, *, counts: bool = True) -> None:
        """Takes back what `generator` holds. With `counts=False` it left in good order."""
        held = [lease_id for lease_id, lease in self._leases.items() if lease.generator == generator]
        for lease_id in held:
            self.fail_lease(lease_id, counts=counts)

    # ---- ends of sweeps

    def finish_sweeps(self) -> list[EvaluationResult]:
        """Ends the sweeps that have all answers, and returns their results."""
        done = [sweep for sweep in self._sweeps if not sweep.num_unanswered]
        if not done:
            return []
        self._keep_sweeps(sweep for sweep in self._sweeps if sweep.num_unanswered)
        results = [sweep.make_result() for sweep in done]
        self.add_results(results)
        return results

    def add_results(self, results: Iterable[EvaluationResult]) -> None:
        for result in results:
            self.num_records += 1
            self.records.append(EvaluationRecord(number=self.num_records, result=result))

    def restore_results(
        self, results: Sequence[EvaluationResult], numbers: Sequence[int], num_records: int
    ) -> None:
        """Adds the results of an earlier life under their numbers, so that watchers go on where they were."""
        told = numbers or range(1, len(results) + 1)
        self.records += [
            EvaluationRecord(number=number, result=result)
            for number, result in zip(told, results, strict=True)
        ]
        self.num_records = max([num_records, *told])

    def withdraw_version(self, version: int, name: str) -> None:
        """Drops the sweep of a version that is evaluated already, and one that only took its place: a log
        does not tell which sweeps had begun, so more are replaced as it is read than were."""
        self._keep_sweeps(
            sweep
            for sweep in self._sweeps
            if sweep.evaluation_set.name != name or version not in sweep.replaced | {sweep.version}
        )

    def rewind_to(self, step: int) -> None:
        """The learner goes on from version `step`, which it will publish again: later results count no
        more.

        Sweeps under way are dropped, because versions that are undone have sampled for them. Sets that the
        learner does not come to again as it repeats its steps are evaluated on version `step` instead.
        """
        self.request_overdue(
            sweep.evaluation_set.name
            for sweep in self._sweeps
            if sweep.version < step or not self._is_due(sweep.evaluation_set, sweep.version)
        )
        undone = {(one.result.version, one.result.evaluation_set) for one in self.records}
        self.request_overdue(
            one.name
            for one in self.sets
            for version, name in undone
            if name == one.name and version >= step and not self._is_due(one, version)
        )
        older = [sweep for sweep in self._sweeps if sweep.version < step]
        self._skip_sweeps(older, f"the learner went back to step {step}, which is evaluated instead")
        self._keep_sweeps(())
        self.records = [record for record in self.records if record.result.version < step]


def replay_results(
    results: Iterable[EvaluationResult], events: Iterable[e.AnyEvent]
) -> list[EvaluationResult]:
    """Returns the results that there were, less those that the events undo, and those that they tell."""
    found = list(results)
    for event in events:
        match event:
            case e.Evaluated(result=EvaluationResult() as result):
                found.append(result)
            case e.Rewound(step=step):
                found = [result for result in found if result.version < step]
    return found


def read_digest(manifest_locator: str) -> str:
    """Returns the digest of the weights that an announcement names (`sync.announcement`); empty where it
    names none."""
    fields = manifest_locator.split("#", 3)
    return fields[2] if len(fields) == 4 else ""
