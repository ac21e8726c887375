"""The documentation of the configuration, made from the schema: every key with its default and rule.

scripts/launch.sh --help                 every key in a line, by section
scripts/launch.sh --help learner         a section;  --help learner.lr  one key
python -m configs.help --markdown > docs/configuration.md
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

from omegaconf import OmegaConf

from configs.load import FOLDER, list_defaults, load_config, to_yaml
from configs.overrides import find_nearest_names
from configs.schema import Config
from configs.setting import Section, show_value

WIDTH = 110
"""Columns of the text, in the terminal and in the page."""
USAGE = """\
scripts/launch.sh [key=value ...]           starts a run
scripts/launch.sh --cfg [key=value ...]     prints the composed configuration, and starts nothing
scripts/launch.sh --help [KEY|SECTION ...]  explains keys: all of them in a line each, or those that are named
scripts/launch.sh --plan model.path=FOLDER  says what memory a run needs, and starts nothing (--plan --help)
"""
KEY_COLUMNS = 44
"""Columns of `key=default` in the overview."""


PAGE_HEAD = """\
# Configuration

<!-- Made by `python -m configs.help --markdown > docs/configuration.md`. Do not edit. -->

Every key with its default, its meaning, and the rule that its value obeys. Keys are given on the command line
as `key=value`; `null` means "not set". `scripts/launch.sh --help` lists them; `--help KEY` and `--help
SECTION` print one key or one section. A run that cannot start names each key that breaks its rule, the rule
and the value, all in one message."""


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """Documentation of one key."""

    name: str
    """Full name: `learner.lr`."""
    default: str
    """The default as a user writes it."""
    rule: str
    """Words that complete "must be ..."; empty where the type says all."""
    choices: dict[str, str]
    """Documentation of each choice, by name; empty for a key that is no choice."""
    text: str
    """The docstring in one line."""

    @property
    def first_sentence(self) -> str:
        """The docstring up to its first full stop, that of "et al." aside."""
        return re.split(r"(?<!\bal)\.(?=\s|$)", self.text, maxsplit=1)[0] + "."


@dataclass(frozen=True, slots=True)
class SectionHelp:
    """Documentation of one section and of the keys that stand directly in it."""

    name: str
    """Full name: `learner.fsdp`; empty for the keys that stand in no section."""
    text: str
    keys: list[KeyHelp]


def main(arguments: list[str]) -> None:
    print(format_page() if arguments == ["--markdown"] else format_help(arguments), end="")


@cache
def list_sections() -> tuple[SectionHelp, ...]:
    """Returns every section in the order of the schema."""
    sections: list[SectionHelp] = []

    def add_section(kind: type[Section], name: str) -> None:
        prefix = f"{name}." if name else ""
        types, documentation = get_type_hints(kind), read_docstrings(kind)
        keys: list[KeyHelp] = []
        sections.append(SectionHelp(name, join_lines(kind.__doc__ or ""), keys))
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # sections are dataclasses
            inner = types[field.name]
            full_name = f"{prefix}{field.name}"
            if isinstance(inner, type) and issubclass(inner, Section):
                add_section(inner, full_name)
                continue
            for one in get_args(inner):
                if isinstance(one, type) and issubclass(one, Section):
                    add_section(one, f"{full_name}.NAME")
            rule = field.metadata.get("rule")
            keys.append(
                KeyHelp(
                    full_name,
                    show_plainly(list_defaults().get(full_name, getattr(kind(), field.name))),
                    rule.text if rule else "",
                    list_choices(inner),
                    documentation.get(field.name, ""),
                )
            )

    add_section(Config, "")
    return tuple(sections)


def list_choices(kind: object) -> dict[str, str]:
    """Returns the members of an enumeration with their docstrings; empty for other types."""
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and issubclass(one, Enum):
            documentation = read_docstrings(one)
            return {name: documentation.get(name, "") for name in one.__members__}
    return {}


def read_docstrings(kind: type) -> dict[str, str]:
    """Returns the docstrings below fields of a dataclass or members of an enumeration, in one line each.

    Python keeps none of them, so this reads the source.
    """
    documentation: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("configs."):
            documentation |= _read_file(inspect.getsourcefile(one) or "").get(one.__name__, {})
    return documentation


@cache
def _read_file(path: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings below the assignments of each class in a file."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(path).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for statement, following in zip(node.body, node.body[1:], strict=False):
            target = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]  # type: ignore[assignment]  # a member of an enumeration
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(target, ast.Name) and is_text:
                texts[target.id] = join_lines(str(following.value.value))  # type: ignore[attr-defined]
    return found


def format_help(names: list[str]) -> str:
    """Returns the overview, or the documentation of the keys and sections that are named.

    Raises ValueError for a name that is neither, with the nearest names.
    """
    if not names:
        return format_overview()
    sections = {section.name: section for section in list_sections() if section.name}
    keys = {key.name: key for section in list_sections() for key in section.keys}
    parts = []
    for name in (name.partition("=")[0] for name in names):
        if name in sections:
            parts.append(format_section(sections[name]))
        elif name in keys:
            parts.append(format_key(keys[name]))
        else:
            nearest = find_nearest_names(name, [*keys, *sections])
            raise ValueError(f"--help must be followed by a key or a section{nearest}, got {name!r}")
    return "\n".join(parts)


def format_overview() -> str:
    """Returns every key in a line, by section."""
    presets = f"{_describe_default_preset()} docs/algorithms.md has a table of them.".replace("`", "")
    parts = [USAGE, _wrap_text(presets) + "\n"]
    for section in list_sections():
        rows = [_wrap_text(f"{section.name}: {section.text}") if section.name else "Keys without a section:"]
        for key in section.keys:
            start = f"  {key.name}={key.default}"
            rows += textwrap.wrap(
                key.first_sentence,
                WIDTH,
                initial_indent=f"{start:{KEY_COLUMNS - 2}}  ",
                subsequent_indent=" " * KEY_COLUMNS,
                break_on_hyphens=False,
            )
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def format_section(section: SectionHelp) -> str:
    """Returns all that is documented of a section, and the names of those below it."""
    parts = [_wrap_text(f"{section.name}: {section.text}") + "\n", *map(format_key, section.keys)]
    below = [one.name for one in list_sections() if one.name.rpartition(".")[0] == section.name]
    if below:
        parts.append(_wrap_text(f"Sections below it: {', '.join(below)}.") + "\n")
    if presets := list_presets(section.name):
        parts.append(_wrap_text(f"{section.name}=NAME chooses a preset: {', '.join(presets)}.") + "\n")
    return "\n".join(parts)


def format_key(key: KeyHelp) -> str:
    """Returns all that is documented of a key."""
    rule = [f"Must be {key.rule}."] if key.rule else []
    rows = [f"{key.name}={key.default}", *(_wrap_text(text, "  ") for text in [key.text, *rule])]
    rows += [
        _wrap_text(f"{name}: {text}" if text else name, "  - ", "    ") for name, text in key.choices.items()
    ]
    return "\n".join(rows) + "\n"


def list_presets(section: str) -> list[str]:
    """Returns the names of the presets that `section=NAME` chooses from."""
    return sorted(path.stem for path in (FOLDER / section).glob("*.yaml")) if section else []


def format_page() -> str:
    """Returns docs/configuration.md."""
    parts = [
        PAGE_HEAD,
        _wrap_text(f"{_describe_default_preset()} [algorithms.md](algorithms.md) has a table of them."),
    ]
    for section in list_sections():
        parts.append(f"## {section.name}" if section.name else "## Keys without a section")
        if section.name:
            parts.append(_wrap_text(section.text))
        for key in section.keys:
            rule = f" Must be {key.rule}." if key.rule else ""
            text = [_wrap_text(f"**`{key.name}={key.default}`** {key.text}{rule}")]
            text += [
                _wrap_text(f"`{name}`: {meaning}" if meaning else f"`{name}`", "- ", "  ")
                for name, meaning in key.choices.items()
            ]
            parts.append("\n".join(text))
    return "\n\n".join(parts) + "\n"


def _describe_default_preset() -> str:
    """Says which keys the default run's preset sets: their values are not the defaults of the schema."""
    defaults, changed = list_defaults(), []
    for name, value in _list_values(load_config([])).items():
        if value != defaults[name]:
            changed.append(f"`{name}={show_plainly(value)}`")
    return (
        f"The default run takes the preset `algo=dppo`, which sets {', '.join(changed)}. `algo=NAME` chooses "
        f"another preset: {', '.join(list_presets('algo'))}."
    )


def join_lines(text: str) -> str:
    """Returns the text of a docstring in one line."""
    return " ".join(text.split())


def show_plainly(value: object) -> str:
    """Returns the value as a user writes it on the command line, text without quotation marks."""
    return value if type(value) is str else show_value(value)


def _list_values(config: Config) -> dict[str, object]:
    """Returns the value of every key, by the key's full name."""
    written = OmegaConf.create(to_yaml(config))
    return {name: OmegaConf.select(written, name) for name in list_defaults()}


def _wrap_text(text: str, indent: str = "", further: str | None = None) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
