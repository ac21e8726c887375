"""From command-line overrides to a checked, typed `Config`. Hydra composes; past this module there is no
DictConfig."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import xxhash
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from configs.checks import find_config_problems
from configs.data import make_absolute
from configs.eval import PROMPT_KEYS, EvalSetConfig
from configs.overrides import (
    EVAL_SETS,
    OPEN_ENDED,
    apply_overrides,
    describe_benchmarks,
    find_nearest_names,
    names_eval_set,
    parse_overrides,
)
from configs.reward import RewardConfig
from configs.schema import Config, Mode

FOLDER = Path(__file__).parent
RECIPES = "experiment"
"""Group of the recipes."""
OWN_RECIPES = "experiment_file"
"""Group of recipes in files that users name. A group of its own, so that they can build on those here."""
FIXED_BY_JOURNAL = ("run.seed", "task.name", "learner.groups_per_step", "learner.samples_per_prompt")
NO_KEYS = {
    "generators.pipeline_parallel": "with several stages vLLM keeps several batches under way, so a version "
    "could be taken up between the stages of one token; generators.tensor_parallel divides every layer",
    "generators.expert_parallel": "vLLM's kernel for CPUs computes no part of the experts, so this could not "
    "be tried; generators.tensor_parallel divides every expert",
    "generators.data_parallel": "generators.count says how many engines there are",
}
"""Keys that users may look for, and why there are none."""
RETIRED_KEYS = {"generators.score_timeout_s": "episodes.score_timeout_s", "generators.score_threads": None}
"""Keys of older runs, and those that took their place."""
WRONG_KINDS = {
    r"Cannot convert '\w+' to string: (.*)": "a text",
    r"Cannot assign (\w+) to Dict\[": "a mapping, {KEY: VALUE}",
    r"Invalid value assigned: (\w+) is not a ListConfig": "a list, [VALUE, ...]",
    r"Key (.*) is incompatible with \(str\)": "a text where a key stands",
}
"""Patterns of OmegaConf's complaints about a value of another kind, and what the value must be."""
FIXED_BY_RECORD = ("learner.groups_per_step", "learner.samples_per_prompt", "model.path")


def load_config(overrides: Sequence[str]) -> Config:
    """Composes `config.yaml` with the overrides. Raises ValueError with every problem, named by key, rule and
    value."""
    overrides = [_take_up_recipe(_spell_out_task(override)) for override in overrides]
    return _check_overridden(_compose(tuple(overrides)), overrides)


def parse_config(text: str) -> Config:
    """Reads a `config.yaml` that a run has written. Raises ValueError for one of another version."""
    return check_config(_merge_saved(OmegaConf.create(text)))


def find_resumed_folder(overrides: Sequence[str]) -> Path | None:
    """Returns the folder of the run that the overrides resume; None where they begin one.

    `load_resumed_config` checks what the overrides say, not this function.
    """
    pairs = [override.partition("=") for override in overrides]
    folders = [value for key, _, value in pairs if key == "run.resume"]
    return Path(folders[-1].strip("'\"")) if folders and folders[-1] != "null" else None


def load_resumed_config(folder: Path, overrides: Sequence[str]) -> Config:
    """Loads the configuration of the run in `folder`, with overrides on top.

    Raises ValueError for changes that the run's journal cannot bear.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"run.resume must be the folder of a run, got {folder} without a config.yaml")
    _refuse_unknown_keys(overrides)
    saved = OmegaConf.create(path.read_text())
    groups = [override for override in overrides if not _is_single_key(override)]
    if groups:
        raise ValueError(f"the overrides of a resumed run must be single keys, got {groups}")
    config = _check_overridden(_override_keys(_merge_saved(saved), overrides), overrides)
    _refuse_changes(saved, config, FIXED_BY_JOURNAL, "in a resumed run (its journal is made so)")
    sets = OmegaConf.select(saved, EVAL_SETS) or {}
    of_prompts = [f"{EVAL_SETS}.{name}.{key}" for name in sets for key in PROMPT_KEYS]
    _refuse_changes(saved, config, of_prompts, "in a resumed run (name another set)")
    return config


def load_study_config(folder: Path, overrides: Sequence[str]) -> Config:
    """Loads the configuration of the run in `folder`, changed for training on the data that the run has
    recorded.

    Overrides may name another algorithm (`algo=NAME`) and other hyperparameters. Raises ValueError for
    changes of what the recorded data fixes.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"the run must be a folder with a config.yaml, got {folder}")
    _refuse_unknown_keys(overrides)
    saved = OmegaConf.load(path)
    assert isinstance(saved, DictConfig)
    single_keys = [override for override in overrides if "." in override.partition("=")[0]]
    for override in overrides:
        group, _, name = override.partition("=")
        if override in single_keys:
            continue
        if not (FOLDER / group / f"{name}.yaml").is_file() or group != "algo":
            raise ValueError(f"the overrides of a study must be algo=NAME or single keys, got {override!r}")
        own, other = _load_preset(saved.algo.name), _load_preset(name)
        saved["algo"] = other.algo
        # A preset also sets these two. The study takes the other preset's where the run had its own preset's.
        for key in ("lr", "minibatches"):
            if saved.learner[key] == own.learner[key]:
                saved.learner[key] = other.learner[key]
    config = check_config(_override_keys(_merge_saved(saved), single_keys))
    _refuse_changes(saved, config, FIXED_BY_RECORD, "(the recorded data is made so)")
    return config


def load_recorded_config(folder: Path, overrides: Sequence[str]) -> Config:
    """Loads the configuration of the run in `folder`, with single keys on top, for commands that only read
    the run."""
    _refuse_unknown_keys(overrides)
    saved = OmegaConf.create((folder / "config.yaml").read_text())
    if groups := [override for override in overrides if not _is_single_key(override)]:
        raise ValueError(f"overrides of a run's settings must be single keys, got {groups}")
    return check_config(_override_keys(_merge_saved(saved), overrides))


def find_named_sets(overrides: Sequence[str]) -> dict[str, set[str]]:
    """Returns the evaluation sets that overrides name, and which of their keys they say."""
    said = find_said_keys(overrides)
    found: dict[str, set[str]] = {str(name): set() for name in said.get("eval.benchmarks") or []}
    for key in said:
        if key.startswith(f"{EVAL_SETS}."):
            name, _, below = key.removeprefix(f"{EVAL_SETS}.").partition(".")
            found.setdefault(name, set()).add(below.partition(".")[0])
    return found


def find_said_keys(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the full name of each key that overrides say, alone or within a section, and its value."""
    said: dict[str, Any] = {}

    def walk_value(key: str, value: Any) -> None:
        said[key] = value
        for name, below in value.items() if isinstance(value, dict) else ():
            walk_value(f"{key}.{name}", below)

    for override in parse_overrides([_take_up_recipe(one) for one in overrides]):
        walk_value(str(override.key_or_group), override.value())
    return said


def check_config(composed: DictConfig | ListConfig) -> Config:
    """Turns a composed configuration into a typed one. Raises ValueError with every rule that it breaks."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(_explain_error(error, [])) from error
    assert isinstance(config, Config)
    if problems := find_config_problems(config):
        raise ValueError("\n".join(problems))
    return config


def to_yaml(config: Config) -> str:
    return dump_values(dataclasses.asdict(config))


def dump_values(values: Mapping[str, Any]) -> str:
    """Returns values as YAML, texts with `${` as they are."""
    return OmegaConf.to_yaml(OmegaConf.create(_quote_values(dict(values))))


def _quote_values(value: Any) -> Any:
    """Returns a value in which OmegaConf finds no interpolation: `${` of a text is a part of the text."""
    if isinstance(value, dict):
        return {key: _quote_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_quote_values(one) for one in value]
    if isinstance(value, Enum):
        return value.name
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@cache
def list_defaults() -> Mapping[str, object]:
    """Returns the default of every key, by the key's full name."""
    defaults: dict[str, object] = {}

    def walk_section(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            value = OmegaConf.select(node, key)
            if OmegaConf.get_type(node, key) not in (None, dict) and isinstance(value, DictConfig):
                walk_section(value, f"{prefix}{key}.")
            else:
                defaults[f"{prefix}{key}"] = value

    walk_section(OmegaConf.structured(Config), "")
    return defaults


@lru_cache(maxsize=64)
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    """Composes once for the same overrides, because it takes a tenth of a second. Callers must not change the
    result."""
    parse_overrides(overrides)
    _refuse_unknown_keys(overrides)
    _store_schema()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        try:
            # Hydra wants a `++` where the schema cannot know the key.
            prefixed = [f"++{one}" if one.startswith(OPEN_ENDED) else one for one in overrides]
            sets = [one for one in prefixed if names_eval_set(one)]
            composed = compose("config", overrides=[one for one in prefixed if one not in sets])
            describe_benchmarks(composed)
            return apply_overrides(composed, sets)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_explain_error(error, overrides)) from error


@cache
def _store_schema() -> None:
    """Lets `config.yaml` name the schema in its defaults."""
    ConfigStore.instance().store(name="schema", node=Config)


def _check_overridden(composed: DictConfig | ListConfig, overrides: Sequence[str]) -> Config:
    """Checks a composed configuration, and refuses an override that would silently have no effect."""
    config = check_config(composed)
    names_bound = any(override.lstrip("+").startswith("staleness.max_versions=") for override in overrides)
    if config.mode is Mode.on_policy and names_bound and config.staleness.max_versions > 0:
        raise ValueError(
            "staleness.max_versions must be 0 with mode=on_policy (its staleness bound is 0; leave one of "
            f"the two out), got {config.staleness.max_versions}"
        )
    return config


def _load_preset(name: str) -> DictConfig:
    """Returns the defaults with the preset's file on top; the defaults alone where there is no preset of this
    name."""
    path = FOLDER / "algo" / f"{name}.yaml"
    preset = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    merged = OmegaConf.merge(OmegaConf.structured(Config), preset)
    assert isinstance(merged, DictConfig)
    return merged


def _override_keys(saved: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Puts single keys on top. Raises ValueError for a value that has not the type of its key."""
    try:
        return apply_overrides(saved, overrides)
    except OmegaConfBaseException as error:
        raise ValueError(_explain_error(error, overrides)) from error


def _merge_saved(saved: DictConfig | ListConfig) -> DictConfig:
    """Puts the configuration that a run has written on the schema. Raises ValueError for a file of another
    version."""
    for old, new in RETIRED_KEYS.items():
        section, _, key = old.rpartition(".")
        value = OmegaConf.select(saved, old)
        if value is not None:
            del OmegaConf.select(saved, section)[key]
            if new is not None:
                OmegaConf.update(saved, new, value, force_add=True)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), saved)
    except OmegaConfBaseException as error:
        raise ValueError(
            "a run's config.yaml must be of this version of Slipstream, got one with "
            f"{_explain_error(error, [])}"
        ) from error
    assert isinstance(merged, DictConfig)
    return merged


def _spell_out_task(override: str) -> str:
    """Returns `task.name=NAME` for its short form `task=NAME`, and any other override as it is."""
    key, _, value = override.partition("=")
    return f"task.name={value}" if key == "task" else override


def _take_up_recipe(override: str) -> str:
    """Returns the override with a name in place of a recipe's file: `+experiment=PATH.yaml`.

    Hydra then finds the file's contents by that name, as it finds those of `configs/experiment/`. Raises
    ValueError for a file that cannot be read.
    """
    key, _, value = override.partition("=")
    path = Path(value.strip("'\"")).expanduser()
    if key.lstrip("+") != RECIPES or path.suffix not in (".yaml", ".yml"):
        return override
    try:
        recipe = OmegaConf.create(path.read_text())
    # Of the file, its bytes, OmegaConf, or the YAML package, which is OmegaConf's and not ours.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{RECIPES} must name a file with a recipe, got {value}: {reason}") from error
    if not isinstance(recipe, DictConfig):
        raise ValueError(f"{RECIPES} must name a file with sections and keys, got {value} with a list")
    for section in [str(section) for section in recipe if section != "defaults"]:
        try:
            # Hydra would not say which key it is.
            OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.masked_copy(recipe, [section]))
        except OmegaConfBaseException as error:
            raise ValueError(f"{value}: {_explain_error(error, [section])}") from error
    contents = xxhash.xxh3_64_hexdigest(OmegaConf.to_yaml(recipe).encode())
    name = re.sub(r"\W", "_", path.stem) + f"-{contents}"
    ConfigStore.instance().store(group=OWN_RECIPES, name=name, node=recipe, package="_global_")
    return f"+{OWN_RECIPES}='{name}'"


def _is_single_key(override: str) -> bool:
    """True for an override of one key, false for one that chooses a file of a group, such as `algo=grpo`."""
    key = override.partition("=")[0]
    return "." in key or key in ("mode", "role")


def _refuse_changes(saved: DictConfig | ListConfig, config: Config, keys: Sequence[str], reason: str) -> None:
    """Raises ValueError for a key whose value is no longer the saved one. Rows are those at the same place,
    however their path is spelled."""
    current = OmegaConf.create(to_yaml(config))
    for key in keys:
        before, now = OmegaConf.select(saved, key), OmegaConf.select(current, key)
        is_rows = key.startswith(f"{EVAL_SETS}.") and key.endswith(".data")
        places = [make_absolute(one, Path.resolve) if is_rows else one for one in (before, now)]
        if places[0] != places[1]:
            raise ValueError(f"{key} must stay {before} {reason}, got {now}")


def _refuse_unknown_keys(overrides: Sequence[str]) -> None:
    """Raises ValueError with each override whose key no section or group has, and the names that come
    nearest."""
    keys = list_defaults()
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    groups = {path.parent.name for path in FOLDER.glob("*/*.yaml")}
    known = {*keys, *sections, *groups, OWN_RECIPES}
    open_ended = tuple(f"{section}." for section in (*OPEN_ENDED, EVAL_SETS))
    problems = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if key in NO_KEYS:
            problems.append(f"{key} must be left out ({NO_KEYS[key]}), got {override!r}")
        elif key not in known and not key.startswith(open_ended):
            hint = find_nearest_names(key, sorted(known))
            problems.append(f"{key} must be a configuration key{hint}, got {override!r}")
        elif key in groups and (problem := _find_missing_preset(key, override.partition("=")[2])):
            problems.append(problem)
    if problems:
        raise ValueError("\n".join(problems))


def _find_missing_preset(group: str, name: str) -> str | None:
    """Returns the complaint about a group that has no file of this name; None where it has one."""
    presets = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
    if not re.fullmatch(r"\w+", name) or name in presets:
        return None
    own = " (or PATH.yaml, a file of your own)" if group == RECIPES else ""
    return f"{group} must be one of {', '.join(presets)}{own}, got {name!r}"


def _explain_error(error: Exception, overrides: Sequence[str]) -> str:
    """Returns Hydra's complaint in one line, with the key that it is about.

    A complaint about a value's type takes the form "KEY must be RULE, got VALUE".
    """
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    reason = " ".join(str(root).split("full_key")[0].split("Config search path")[0].split())
    key = getattr(root, "full_key", None) or " ".join(overrides)
    if found := re.match(r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)", reason):
        kind = {"Integer": "a whole number", "Float": "a number"}[found[2]]
        return f"{key} must be {kind}, got {found[1]!r}"
    if isinstance(root, InterpolationResolutionError | GrammarParseError):
        return f"{key} must have a backslash before a `${{` that is a part of the text, got: {reason}"
    if found := re.match(r"Key '(.*)' not in '(\w+)'", reason):
        if not str(key).startswith(f"{EVAL_SETS}."):
            hint = find_nearest_names(str(key), list(list_defaults()))
            return f"{key} must be a configuration key{hint}, got {found[1]!r}"
        part = RewardConfig if found[2] == "RewardConfig" else EvalSetConfig
        hint = find_nearest_names(found[1], [field.name for field in dataclasses.fields(part)])
        return f"{key} must be a key of an evaluation set{hint}, got {found[1]!r}"
    if found := re.match(r"Value '(.*)' is not a valid bool", reason):
        return f"{key} must be true or false, got {found[1]!r}"
    if found := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", reason):
        return f"{key} must be one of {found[2]}, got {found[1]!r}"
    for pattern, rule in WRONG_KINDS.items():
        if found := re.match(pattern, reason):
            return f"{key} must be {rule}, got {found[1]}"
    if re.match(r"field '.*' is not Optional", reason):
        return f"{key} must have a value, got null"
    if found := re.match(
        r"(?:Invalid type assigned|Merge error): \w+ is not a subclass of \w+\. value: (.*)", reason
    ):
        return f"{key} must be followed by a key of this section, got {found[1].strip()!r}"
    return f"{key}: {reason}"
