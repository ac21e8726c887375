"""Sources of rows, as `data.train` and `data.eval` name them.

data.train=rows.parquet                                       one source of one file
data.train=[part-0.parquet,part-1.parquet]                    one source of two files
data.train='[{name: math, path: math/, weight: 2}, {name: sums, task: arithmetic}]'     two sources
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from configs.data import HUB, make_absolute
from generators.data.forms import find_form
from generators.plain_values import show_value
from generators.rewards.arguments import check_number, check_text
from generators.task import MAX_SOURCE_NAME, SOURCE_NAME_RULE, is_source_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """A named supply of rows: files, or another task."""

    name: str
    path: tuple[str, ...] = ()
    """Files, folders, globs and names of the hub. Empty where a task is named."""
    task: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    level: int | None = None
    """Level of difficulty, for `curriculum.kind=levels`."""
    form: str | None = None
    prompt: str | None = None
    answer: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> dict[str, str | None]:
        """The keyword arguments of `generators.data.rows.shape_row`."""
        names = ("form", "prompt", "answer", "system_prompt")
        return {name: getattr(self, name) for name in names}


DEFAULTS = ("form", "prompt", "answer", "system_prompt", "chat_template_kwargs")
"""Keys of `data` that hold for all sources which do not say otherwise."""


def read_sources(data: Mapping[str, Any], split: str) -> list[RowSource]:
    """Returns the sources that `data.train` or `data.eval` names; none where it is null.

    Relative paths become absolute. Raises ValueError that names the key, the rule and the value.
    """
    key, value = f"data.{split}", data.get(split)
    if value is None:
        return []
    entries = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(entries, Sequence) or not entries:
        raise ValueError(f"{key} must be a path, a list of paths, or a list of sources, got {value!r}")
    if all(isinstance(entry, str) for entry in entries):
        entries = [{"path": list(entries)}]
    sources = [
        _read_source(key if len(entries) == 1 else f"{key}[{place}]", entry, data)
        for place, entry in enumerate(entries)
    ]
    names = [source.name for source in sources]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"{key}[{place}].name must be another than those before, got {name!r}")
    return sources


def _read_source(key: str, entry: Any, data: Mapping[str, Any]) -> RowSource:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{key} must be a path or {{name, path, weight, ...}}, got {show_value(entry)}")
    known = [one.name for one in fields(RowSource)]
    if unknown := [name for name in entry if name not in known]:
        raise ValueError(f"{key} must have keys of a source ({', '.join(known)}), got {unknown[0]!r}")
    given = {name: data.get(name) for name in DEFAULTS} | dict(entry)
    paths = given.get("path") or []
    paths = [paths] if isinstance(paths, str) else list(paths)
    if bool(paths) == (given.get("task") is not None):
        raise ValueError(f"{key} must have a path or a task, got {dict(entry)}")
    for name in ("task", "form", "prompt", "answer", "system_prompt"):
        if given.get(name) is not None:
            check_text(f"{key}.{name}", given[name])
    if given["form"] is not None:
        find_form(given["form"])
    if type(level := given.get("level")) not in (int, type(None)):
        raise ValueError(f"{key}.level must be a whole number, got {show_value(level)}")
    for name in ("args", "chat_template_kwargs"):
        if not isinstance(given.get(name) or {}, Mapping):
            raise ValueError(f"{key}.{name} must be a mapping, got {show_value(given[name])}")
    said = given.get("name")
    name = check_text(f"{key}.name", _name_source(paths, given.get("task")) if said is None else said)
    if not is_source_name(name):
        raise ValueError(f"{key}.name must {SOURCE_NAME_RULE}, got {name!r}")
    return RowSource(
        name=name,
        path=tuple(make_absolute(check_text(f"{key}.path", path)) for path in paths),
        task=given.get("task"),
        args=dict(given.get("args") or {}),
        weight=check_number(f"{key}.weight", given.get("weight", 1.0), above=0),
        level=level,
        form=given["form"],
        prompt=given["prompt"],
        answer=given["answer"],
        system_prompt=given["system_prompt"],
        chat_template_kwargs=dict(given["chat_template_kwargs"] or {}),
    )


def _name_source(paths: Sequence[str], task: str | None) -> str:
    if task is not None:
        return task.rpartition(":")[2]
    name = paths[0] if paths[0].startswith(HUB) else Path(paths[0]).name.partition(".")[0] or paths[0]
    return name[:MAX_SOURCE_NAME].strip()
