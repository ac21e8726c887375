"""How a key of the configuration is declared: its default, its rule, and the one loop that checks them all.

A section of the configuration is a dataclass that derives from `Section`. Each of its fields is a key, a
section below it, or open-ended (`task.args`). The rule of a key stands beside its default, its documentation
below it:

    @dataclass(kw_only=True, slots=True)
    class LearnerConfig(Section):
        lr: float = setting(2e-4, POSITIVE)
        \"\"\"Peak learning rate of AdamW.\"\"\"

A rule over several keys of a section is a `Condition` of its method `conditions`; rules across sections stand
in `configs/checks.py`. OmegaConf checks names and types before any of them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from configs.rules import Rule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Condition:
    """A rule over several keys. Its problem reads `KEY must RULE, got GOT`."""

    holds: bool
    key: str
    """Full name of the key that the user should look at first."""
    rule: str
    """The words after "must", with the reason and the nearest setting that works in brackets."""
    got: object
    """The value of the key, or a text that names the values of all keys that take part."""

    @property
    def problem(self) -> str:
        got = self.got if type(self.got) is str else show_value(self.got)
        return f"{self.key} must {self.rule}, got {got}"


class Section:
    """Base of the dataclasses that hold the keys."""

    __slots__ = ()

    def conditions(self) -> list[Condition]:
        """Returns the rules over several keys of this section. Called only when each key keeps its own
        rule."""
        return []


def setting(default: T, rule: Rule | None = None) -> T:
    """Declares a key with its default and the rule that its value obeys. None is always allowed where the
    type has it."""
    metadata = {} if rule is None else {"rule": rule}
    if isinstance(default, list | dict):
        copied: Any = dataclasses.field(default_factory=default.copy, metadata=metadata)
        return copied
    declared: Any = dataclasses.field(default=default, metadata=metadata)
    return declared


def section(of: Callable[[], T]) -> T:
    """Declares a section below this one, with its own defaults."""
    declared: Any = dataclasses.field(default_factory=of)
    return declared


def find_problems(part: Section) -> list[str]:
    """Returns a sentence for each rule that the section, or a section below it, breaks."""
    return find_key_problems(part) + find_condition_problems(part)


def find_key_problems(part: Section, prefix: str = "") -> list[str]:
    """Returns a sentence for each key whose value breaks the key's rule. `prefix` precedes the names:
    `learner.`."""
    problems = []
    for field in dataclasses.fields(part):  # type: ignore[arg-type]  # sections are dataclasses
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        rule: Rule | None = field.metadata.get("rule")
        for below, part_name in list_sections_below(value, name):
            problems += find_key_problems(below, f"{part_name}.")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            problems.append(f"{name} must be a number of 64 bits, got {value}")
        elif rule is not None and value is not None and not rule.holds(value):
            problems.append(f"{name} must be {rule.text}, got {show_value(value)}")
    return problems


def find_condition_problems(part: Section) -> list[str]:
    """Returns a sentence for each broken rule over several keys, of this section and those below it.

    A section is asked only when every key in it keeps its own rule: conditions may divide by what must not be
    0. A section that has others in a dict asks them itself, because it knows their names.
    """
    problems = []
    for field in dataclasses.fields(part):  # type: ignore[arg-type]  # sections are dataclasses
        if isinstance(value := getattr(part, field.name), Section):
            problems += find_condition_problems(value)
    if not find_key_problems(part):
        problems += [condition.problem for condition in part.conditions() if not condition.holds]
    return problems


def list_sections_below(value: object, name: str) -> list[tuple[Section, str]]:
    """Returns the sections that the value of the key `name` holds, with their names: itself, those of a dict
    by name, or none."""
    if isinstance(value, Section):
        return [(value, name)]
    parts = value.items() if isinstance(value, dict) else ()
    return [(part, f"{name}.{key}") for key, part in parts if isinstance(part, Section)]


def show_value(value: object) -> str:
    """Returns the value as a user writes it on the command line; text stands in quotation marks."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if type(value) is str else str(value)
