"""The terms that a buffer keeps its book by, how the journal records them, and which of them a resumed run
may not change."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from configs.schema import Config
from configs.staleness import OnLate

TermsRecord = Mapping[str, str | int | float | None]
"""Terms as the journal records them, by field name of `Terms`."""
FIXED_SETTINGS = {
    "groups_per_step": "learner.groups_per_step",
    "samples_per_prompt": "learner.samples_per_prompt",
    "max_uses": "buffer.max_uses",
    "on_late": "staleness.on_late",
    "task": "task.name",
    "task_size": "task.size",
    "seed": "run.seed",
}
"""Terms that the contents of a journal rest on, each with the setting that it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings that decide about groups. `configs.schema` describes the fields of the same names."""

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
    def excluded_fate(self) -> str:
        """The fate, on the ledger, of a trained group's tokens beyond `max_versions`.

        `late` tokens are a defect.
        """
        return "masked" if self.on_late is OnLate.mask else "late"

    @property
    def fresh_per_step(self) -> int:
        """Number of places that fall due at each step after the first. The first step needs a whole batch."""
        return self.groups_per_step // self.max_uses

    def num_places(self, due: int) -> int:
        """Returns how many places fall due at step `due`."""
        return self.groups_per_step if due == 0 else self.fresh_per_step

    def due_step(self, place: int) -> int:
        """Returns the step at which a place falls due."""
        after_first = place - self.groups_per_step
        return 0 if after_first < 0 else 1 + after_first // self.fresh_per_step

    def num_places_through(self, due: int) -> int:
        """Returns how many places fall due at step `due` or before it."""
        return self.groups_per_step + due * self.fresh_per_step


def make_terms(config: Config) -> Terms:
    """Returns the terms that a configuration sets."""
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


def record_terms(terms: Terms) -> dict[str, str | int | float | None]:
    """Returns the terms as the journal records them."""
    return {name: str(value) if isinstance(value, OnLate) else value for name, value in asdict(terms).items()}


def apply_record(terms: Terms, record: TermsRecord) -> Terms:
    """Returns `terms` with the values of the record in their place."""
    known = {f.name: record[f.name] for f in fields(Terms) if f.name in record}
    on_late = OnLate(str(known.pop("on_late", terms.on_late)))
    return replace(terms, **known, on_late=on_late)  # type: ignore[arg-type]


def check_terms(terms: Terms, record: TermsRecord) -> None:
    """Raises ValueError, naming each setting, when a journal that was kept on the recorded terms cannot go
    on with `terms`."""
    now = record_terms(terms)
    problems = [
        f"{setting} must stay {record[name]} (the journal rests on it), got {now[name]}"
        for name, setting in FIXED_SETTINGS.items()
        if name in record and record[name] != now[name]
    ]
    before = record.get("max_versions")
    if isinstance(before, int) and terms.max_versions < before:
        problems.append(
            f"staleness.max_versions must be at least {before} "
            f"(groups of that staleness wait in the journal), got {terms.max_versions}"
        )
    if problems:
        raise ValueError("\n".join(problems))
