"""What the lease book keeps: groups, attempts at them, and the terms they are made on."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from buffers import events as e
from buffers.state import AttemptState, GroupState
from configs.schema import Config
from configs.staleness import OnLate


@dataclass(slots=True)
class Attempt:
    """One lease of one group."""

    lease: int
    group: int
    generator: str
    deadline: float
    leased_at: float
    num_tokens: int = 0
    fate: str = "in_flight"


@dataclass(slots=True)
class Quarantine:
    """Groups that failed for good."""

    total: int = 0
    last: dict[int, str] = field(default_factory=dict)
    """The error of each of the last ten, by group; the log has them all."""

    def add(self, group: int, error: str) -> None:
        self.total += 1
        self.last[group] = error
        if len(self.last) > 10:
            del self.last[next(iter(self.last))]


class Deadlines:
    """Finds the attempts whose deadline has passed without looking at all of them."""

    def __init__(self, attempts: Mapping[int, Attempt]) -> None:
        """`attempts` are those under way, by lease; their deadlines may move on meanwhile."""
        self._attempts = attempts
        self._heap: list[tuple[float, int]] = []

    def add(self, attempt: Attempt) -> None:
        heapq.heappush(self._heap, (attempt.deadline, attempt.lease))
        if len(self._heap) > 2 * len(self._attempts) + 1000:  # most are of leases that are over
            self._heap = [entry for entry in self._heap if entry[1] in self._attempts]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Attempt]:
        """Those whose deadline has passed, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            attempt = self._attempts.get(heapq.heappop(self._heap)[1])
            if attempt is not None and attempt.deadline > now:
                heapq.heappush(self._heap, (attempt.deadline, attempt.lease))
            elif attempt is not None:
                passed.append(attempt)
        return passed


@dataclass(slots=True)
class Group:
    """A group that may still be trained."""

    due: int
    attempts: set[int] = field(default_factory=set)
    """Leases under way."""
    accepted: Attempt | None = None
    """The lease whose submission won."""
    content: e.Accepted | None = None
    num_failures: int = 0
    uses: int = 0


def export_attempt(attempt: Attempt) -> AttemptState:
    return AttemptState(attempt.lease, attempt.group, attempt.generator, attempt.num_tokens, attempt.fate)


def restore_attempt(state: AttemptState, now: float, lease_s: float) -> Attempt:
    return Attempt(
        state.lease, state.group, state.generator, now + lease_s, now, state.num_tokens, state.fate
    )


def export_group(number: int, group: Group) -> GroupState:
    return GroupState(
        number, group.due, group.num_failures, group.uses, sorted(group.attempts), group.content
    )


def restore_group(state: GroupState) -> Group:
    content = state.content
    accepted = None
    if content is not None:
        accepted = Attempt(content.lease, state.number, "", 0.0, 0.0, content.tokens, "accepted")
    return Group(state.due, set(state.attempts), accepted, content, state.num_failures, state.uses)


@dataclass(frozen=True, slots=True)
class Handout:
    """What a step trains."""

    groups: list[int]
    """In the order of their numbers."""
    weights: list[float]
    """Importance weight of each; empty: all 1."""


@dataclass(frozen=True, slots=True)
class Use:
    """A group's part in a trained step, kept until no checkpoint can undo it."""

    number: int
    group: Group
    trained: int
    excluded: int
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the book is kept by; see `configs.schema` for the fields of the same names."""

    groups_per_step: int
    steps: int
    max_versions: int
    on_late: OnLate
    samples_per_prompt: int
    lease_s: float
    max_attempts: int
    straggler_timeout_s: float | None
    task: str
    seed: int
    task_size: int | None = None
    max_uses: int = 1
    max_groups: int | None = None
    max_tokens: int | None = None
    max_bytes: int | None = None

    @property
    def excluded_as(self) -> str:
        """What a trained group's tokens beyond the bound are on the ledger: `late` ones are a defect."""
        return "masked" if self.on_late is OnLate.mask else "late"

    @property
    def fresh_per_step(self) -> int:
        """Places that fall due at each step after the first, which needs a whole batch."""
        return self.groups_per_step // self.max_uses

    def num_places(self, due: int) -> int:
        return self.groups_per_step if due == 0 else self.fresh_per_step

    def due(self, place: int) -> int:
        """The step at which a place falls due."""
        return (
            0 if place < self.groups_per_step else 1 + (place - self.groups_per_step) // self.fresh_per_step
        )

    def num_places_through(self, due: int) -> int:
        """Places that fall due at this step or before it."""
        return self.groups_per_step + due * self.fresh_per_step


def make_terms(config: Config) -> Terms:
    """The terms that a configuration sets."""
    return Terms(
        groups_per_step=config.learner.groups_per_step,
        steps=config.run.steps,
        max_versions=config.max_versions,
        on_late=config.staleness.on_late,
        samples_per_prompt=config.learner.samples_per_prompt,
        lease_s=config.buffer.lease_s,
        max_attempts=config.buffer.max_attempts,
        straggler_timeout_s=config.staleness.straggler_timeout_s,
        task=config.task.name,
        seed=config.run.seed,
        task_size=config.task.size,
        max_uses=config.buffer.max_uses,
        max_groups=config.buffer.max_groups,
        max_tokens=config.buffer.max_tokens,
        max_bytes=config.buffer.max_bytes,
    )


TermsRecord = Mapping[str, str | int | float | None]
"""Terms as the journal records them."""
FIXED = {
    "groups_per_step": "learner.groups_per_step",
    "samples_per_prompt": "learner.samples_per_prompt",
    "max_uses": "buffer.max_uses",
    "on_late": "staleness.on_late",
    "task": "task.name",
    "task_size": "task.size",
    "seed": "run.seed",
}
"""Terms that what a journal holds rests on, and the settings that they come from."""


def record_terms(terms: Terms) -> dict[str, str | int | float | None]:
    return {name: str(value) if isinstance(value, OnLate) else value for name, value in asdict(terms).items()}


def recorded_terms(terms: Terms, record: TermsRecord) -> Terms:
    """`terms`, with what the record says in their place."""
    known = {f.name: record[f.name] for f in fields(Terms) if f.name in record}
    return replace(terms, **{**known, "on_late": OnLate(known.get("on_late", terms.on_late))})  # type: ignore[arg-type]


def check_terms(terms: Terms, record: TermsRecord) -> None:
    """Raises ValueError, naming each, for settings that a journal kept on the recorded terms cannot go on with."""
    now = record_terms(terms)
    problems = [
        f"{setting} must stay {record[name]} (the journal is made so), got {now[name]}"
        for name, setting in FIXED.items()
        if name in record and record[name] != now[name]
    ]
    before = record.get("max_versions")
    if isinstance(before, int) and terms.max_versions < before:
        problems.append(
            f"staleness.max_versions must be at least {before} (groups of that staleness wait in the journal), "
            f"got {terms.max_versions}"
        )
    if problems:
        raise ValueError("\n".join(problems))


def name_holders(missing: Sequence[Attempt]) -> str:
    """Who holds these leases (at least one), in words."""
    holders = Counter(attempt.generator for attempt in missing)
    named = ", ".join(f"{name} ({count})" for name, count in sorted(holders.items())[:8])
    more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
    return f"leased to {named}{more}, the oldest is group {min(attempt.group for attempt in missing)}"
