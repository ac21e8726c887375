"""The terms that a buffer keeps its book by, how the journal records them, and which of them a resumed run
may not change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from configs.curriculum import CurriculumConfig, CurriculumKind
from configs.schema import Config
from configs.staleness import OnLate
from configs.task import TaskConfig

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
"""Terms that the contents of a journal rest on, each with the setting that it comes from. The sources of
prompts and the kind of curriculum are fixed besides."""


class SourceTerms(msgspec.Struct, frozen=True):
    """A named supply of prompts (`generators.task.PromptSource`)."""

    name: str
    size: int | None = None
    """Number of its prompts. None: prompts without end."""
    weight: float = 1.0
    level: int | None = None
    """Level of difficulty, where there are such."""


class CurriculumTerms(msgspec.Struct, frozen=True):
    """The keys of `curriculum` that decide which prompt a group asks (`configs.curriculum` has them)."""

    kind: CurriculumKind = CurriculumKind.none
    window: int = 64
    hard_up_to: float = 0.25
    normal_up_to: float = 0.75
    weights: tuple[float | None, float, float, float] = (None, 1.0, 1.0, 0.2)
    """Weights of the pools unseen, hard, normal and easy. None: unseen prompts come first."""
    raise_at: float = 0.8
    lower_at: float = 0.2
    review: float = 0.2


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
    sources: tuple[SourceTerms, ...] = ()
    """Sources of prompts; empty for a task that names none, which is one source of `task_size` prompts."""
    curriculum: CurriculumTerms = CurriculumTerms()
    max_uses: int = 1
    max_groups: int | None = None
    max_tokens: int | None = None
    max_bytes: int | None = None

    def list_sources(self) -> tuple[SourceTerms, ...]:
        """Returns the sources of prompts, one at least."""
        return self.sources or (SourceTerms(self.task, self.task_size),)

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
        sources=make_source_terms(config.task),
        curriculum=make_curriculum_terms(config.curriculum),
        max_uses=config.buffer.max_uses,
        max_groups=config.buffer.max_groups,
        max_tokens=config.buffer.max_tokens,
        max_bytes=config.buffer.max_bytes,
    )


def make_source_terms(task: TaskConfig) -> tuple[SourceTerms, ...]:
    """Returns the sources that a task has named. Raises ValueError where `task.size` cannot be meant."""
    sources = tuple(msgspec.convert(task.sources, list[SourceTerms]))
    if task.size is None:
        return sources
    if len(sources) > 1:
        raise ValueError(
            f"task.size must not be set for a task of several sources, got {task.size} with {len(sources)}"
        )
    return tuple(msgspec.structs.replace(one, size=task.size) for one in sources)


def make_curriculum_terms(curriculum: CurriculumConfig) -> CurriculumTerms:
    pools, levels = curriculum.pools, curriculum.levels
    return CurriculumTerms(
        kind=curriculum.kind,
        window=curriculum.window,
        hard_up_to=pools.hard_up_to,
        normal_up_to=pools.normal_up_to,
        weights=(pools.unseen_weight, pools.hard_weight, pools.normal_weight, pools.easy_weight),
        raise_at=levels.raise_at,
        lower_at=levels.lower_at,
        review=levels.review,
    )


def record_terms(terms: Terms) -> dict[str, str | int | float | None]:
    """Returns the terms as the journal records them: those that are records themselves as JSON."""
    return {name: _record_value(getattr(terms, name)) for name in _NAMES}


def apply_record(terms: Terms, record: TermsRecord) -> Terms:
    """Returns `terms` with the values of the record in their place.

    What a journal of before does not name is as it was then.
    """
    known: dict[str, Any] = {name: record[name] for name in _NAMES if name in record}
    known["on_late"] = OnLate(str(known.pop("on_late", terms.on_late)))
    known["sources"] = msgspec.json.decode(str(known.get("sources", "[]")), type=tuple[SourceTerms, ...])
    known["curriculum"] = msgspec.json.decode(str(known.get("curriculum", "{}")), type=CurriculumTerms)
    return replace(terms, **known)


def _record_value(value: Any) -> str | int | float | None:
    if isinstance(value, tuple | msgspec.Struct):
        return msgspec.json.encode(value).decode()
    return str(value) if isinstance(value, OnLate) else value


_NAMES = tuple(field.name for field in fields(Terms))


def check_terms(terms: Terms, record: TermsRecord) -> None:
    """Raises ValueError, naming each setting, when a journal that was kept on the recorded terms cannot go
    on with `terms`."""
    now = record_terms(terms)
    problems = [
        f"{setting} must stay {record[name]} (the journal rests on it), got {now[name]}"
        for name, setting in FIXED_SETTINGS.items()
        if name in record and record[name] != now[name]
    ]
    before = apply_record(terms, record)
    problems += compare_sources(before.sources, terms.sources)
    if before.curriculum.kind != terms.curriculum.kind:
        problems.append(
            f"curriculum.kind must stay {before.curriculum.kind} (the journal rests on it), "
            f"got {terms.curriculum.kind}"
        )
    if terms.max_versions < before.max_versions:
        problems.append(
            f"staleness.max_versions must be at least {before.max_versions} "
            f"(groups of that staleness wait in the journal), got {terms.max_versions}"
        )
    if problems:
        raise ValueError("\n".join(problems))


def compare_sources(before: Sequence[SourceTerms], now: Sequence[SourceTerms]) -> list[str]:
    """Returns a sentence for each source of prompts that is not as the journal has it."""
    names = [one.name for one in before]
    if names != [one.name for one in now]:
        wanted, got = (", ".join(one.name for one in some) or "none" for some in (before, now))
        return [f"the sources of prompts must stay {wanted} (the journal rests on them), got {got}"]
    return [
        f"{field} of the source {old.name!r} must stay {getattr(old, field)} (the journal rests on it), "
        f"got {getattr(new, field)}"
        for old, new in zip(before, now, strict=True)
        for field in ("size", "weight", "level")
        if getattr(old, field) != getattr(new, field)
    ]
