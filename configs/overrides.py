"""Overrides, `key=value`: how a command line says what a configuration is to be.

Hydra reads those of a new run. Those of a run that goes on, of a study and of evaluation sets are put on top
here, and read by the same grammar.
"""

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from configs.benchmarks import BENCHMARKS
from configs.eval import EvalSetConfig

OPEN_ENDED = (
    "task.args",
    "buffer.sampler_args",
    "placement.learner",
    "placement.generators",
    "data.train",
    "data.eval",
    "data.chat_template_kwargs",
    "reward.args",
    "tracking.args",
)
"""Sections whose keys the schema cannot know: they are arguments of a class that the user names."""
EVAL_SETS = "eval.sets"
"""Section of sections whose names the user chooses."""


def find_nearest_names(name: str, known: Sequence[str]) -> str:
    """Returns the known names that look like this one, in brackets; empty where none does."""
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(nearest)})" if nearest else ""


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Raises ValueError for the first that Hydra's grammar does not take, or that has several values."""
    parser, parsed = OverridesParser.create(), []
    for override in overrides:
        key, _, value = override.partition("=")
        try:
            one = parser.parse_override(override)
        except HydraException as error:
            reason = " ".join(str(error).split("\nSee ")[0].split())
            raise ValueError(
                f"{override!r} must read KEY=VALUE, with quotes around a value of other characters than "
                f"letters and digits (\"KEY='a (b)'\"), got: {reason}"
            ) from error
        if one.is_sweep_override():
            raise ValueError(f"{key} must have one value (a list stands in brackets: [{value}]), got {value}")
        parsed.append(one)
    return parsed


def names_eval_set(override: str) -> bool:
    """True for an override of `eval.sets`, or of a key of one set."""
    key = override.lstrip("+~").partition("=")[0]
    return key == EVAL_SETS or key.startswith(f"{EVAL_SETS}.")


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Puts overrides of keys on top of a configuration, and below them what the catalogue says of new
    evaluation sets. Hydra would make a new set a plain dict, and so refuse it.

    Changes `config`. Raises ValueError for an override that takes a key away.
    """
    said_sets: list[dict[str, Any]] = []
    for override in parse_overrides(overrides):
        key = str(override.key_or_group)
        value: Any = override.value()
        if override.is_delete():
            raise ValueError(f"{key} must be followed by =VALUE, got {override.input_line!r}")
        if names_eval_set(key):
            if key == EVAL_SETS and not isinstance(value, dict | None):
                raise ValueError(
                    f"{key} must be a mapping, {{NAME: {{KEY: VALUE}}}} (benchmarks by name are "
                    f"eval.benchmarks=[NAME, ...]), got {value}"
                )
            for name in reversed(key.split(".")):
                value = {name: value}
            said_sets.append(value)
        else:
            OmegaConf.update(config, key, value, force_add=key.startswith(OPEN_ENDED))
    said = [pair for one in said_sets for pair in (one["eval"]["sets"] or {}).items()]
    found = _find_benchmarks(config.eval.benchmarks, config.eval.sets, said)
    OmegaConf.set_struct(config.eval.sets, False)
    merged = OmegaConf.merge(config, found, *said_sets)
    assert isinstance(merged, DictConfig)
    return merged


def describe_benchmarks(composed: DictConfig) -> None:
    """Adds what the catalogue says of the sets in a recipe, for the keys that the recipe leaves as they
    are. Raises ValueError for a benchmark that there is not."""
    defaults = OmegaConf.structured(EvalSetConfig)
    for name, one in composed.eval.sets.items():
        benchmark = one.benchmark or name
        if benchmark in BENCHMARKS:
            for key, value in {"benchmark": benchmark, **BENCHMARKS[benchmark].settings}.items():
                if one[key] == defaults[key]:
                    OmegaConf.update(one, key, value)
        elif one.benchmark is not None:
            raise _refuse_benchmark(f"{EVAL_SETS}.{name}.benchmark", one.benchmark)


def _find_benchmarks(
    asked: Sequence[str], known: Collection[Any], said: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Returns what the catalogue says of new sets: of those `asked` for in `eval.benchmarks`, and of those
    that overrides say something of. `known` are the sets that are there, `said` names and keys.

    Raises ValueError for a benchmark that there is not.
    """
    described = {
        name: keys["benchmark"] for name, keys in said if isinstance(keys, dict) and "benchmark" in keys
    }
    found = {}
    for name in dict.fromkeys([*asked, *(name for name, _ in said)]):
        benchmark = described.get(name, name)
        if benchmark in BENCHMARKS and name not in known:
            found[name] = {"benchmark": benchmark, **BENCHMARKS[benchmark].settings}
        elif benchmark not in BENCHMARKS and benchmark is not None and (name in asked or name in described):
            key = f"{EVAL_SETS}.{name}.benchmark" if name in described else "eval.benchmarks"
            raise _refuse_benchmark(key, str(benchmark))
    return {"eval": {"sets": found}}


def _refuse_benchmark(key: str, benchmark: str) -> ValueError:
    hint = find_nearest_names(benchmark, sorted(BENCHMARKS))
    return ValueError(f"{key} must be of {', '.join(BENCHMARKS)}{hint}, got {benchmark!r}")
