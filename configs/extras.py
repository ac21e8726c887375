"""The optional packages that a configuration needs, and the extras of `pyproject.toml` that bring them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.data import HUB
from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.schema import Config
from configs.tracking import TRACKER_PACKAGES


@dataclass(frozen=True, slots=True)
class Need:
    """A package that a setting cannot do without."""

    setting: str
    extra: str
    package: str
    """Its import name."""


def list_needs(config: Config) -> list[Need]:
    """Returns what the settings need beyond what every run does, whether it is installed or not."""
    learner = config.learner
    known = [
        (
            learner.engine is LearnerKind.megatron,
            Need("learner.engine=megatron", "megatron", "megatron.core"),
        ),
        (learner.lora.rank is not None, Need("learner.lora.rank", "lora", "peft")),
        (learner.fsdp.liger, Need("learner.fsdp.liger", "liger", "liger_kernel")),
    ]
    known += [
        (name in config.tracking.trackers, Need(f"tracking.trackers={name}", name, package))
        for name, package in TRACKER_PACKAGES.items()
    ]
    known += [(_names_hub(rows), Need(key, "hub", "datasets")) for key, rows in _list_rows(config)]
    return [need for is_needed, need in known if is_needed]


def _list_rows(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields each key that names rows which are read, with its value. A simulated engine makes no prompts."""
    if config.generators.engine is EngineKind.simulated:
        return
    if config.task.name == "dataset":
        yield from (("data.train", config.data.train), ("data.eval", config.data.eval))
    for name, one in config.eval.sets.items():
        if one.task == "dataset":
            yield f"eval.sets.{name}.data", one.data


def _names_hub(rows: Any) -> bool:
    """True where one of the sources, in any of the forms of `data.train`, is of the hub."""
    if isinstance(rows, str):
        return rows.startswith(HUB)
    if isinstance(rows, Mapping):
        return _names_hub(rows.get("path"))
    return isinstance(rows, list | tuple) and any(map(_names_hub, rows))
