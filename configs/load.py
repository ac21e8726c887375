"""From command-line overrides to a checked, typed `Config`. Hydra composes; past this module there is no
DictConfig."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checks import find_config_problems
from configs.schema import Config, Mode

FOLDER = Path(__file__).parent
OPEN_ENDED = ("task.args", "buffer.sampler_args")
"""Sections whose keys the schema cannot know: they are arguments of a class that the user names."""
FIXED_BY_JOURNAL = ("run.seed", "task.name", "learner.groups_per_step", "learner.samples_per_prompt")
RETIRED_KEYS = {"generators.score_timeout_s": "episodes.score_timeout_s", "generators.score_threads": None}
"""Keys of older runs, and those that took their place."""
FIXED_BY_RECORD = ("learner.groups_per_step", "learner.samples_per_prompt", "model.path")


def load_config(overrides: Sequence[str]) -> Config:
    """Composes `config.yaml` with the overrides. Raises ValueError with every problem, named by key, rule and
    value."""
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


def check_config(composed: DictConfig | ListConfig) -> Config:
    """Turns a composed configuration into a typed one. Raises ValueError with every rule that it breaks."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    if problems := find_config_problems(config):
        raise ValueError("\n".join(problems))
    return config


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


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


def find_nearest_names(name: str, known: Sequence[str]) -> str:
    """Returns the known names that look like this one, in brackets; empty where none does."""
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(nearest)})" if nearest else ""


@lru_cache(maxsize=64)
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    """Composes once for the same overrides, because it takes a tenth of a second. Callers must not change the
    result."""
    _refuse_unknown_keys(overrides)
    _store_schema()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        try:
            # Hydra wants a `++` where the schema cannot know the key.
            prefixed = [f"++{one}" if one.startswith(OPEN_ENDED) else one for one in overrides]
            return compose("config", overrides=prefixed)
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


def _override_keys(saved: DictConfig | ListConfig, overrides: Sequence[str]) -> DictConfig | ListConfig:
    """Puts single keys on top. Raises ValueError for a value that has not the type of its key."""
    try:
        return OmegaConf.merge(saved, OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        raise ValueError(_explain_error(error, overrides)) from error


def _merge_saved(saved: DictConfig | ListConfig) -> DictConfig | ListConfig:
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
        return OmegaConf.merge(OmegaConf.structured(Config), saved)
    except OmegaConfBaseException as error:
        raise ValueError(
            "a run's config.yaml must be of this version of Slipstream, got one with "
            f"{_explain_error(error, [])}"
        ) from error


def _is_single_key(override: str) -> bool:
    """True for an override of one key, false for one that chooses a file of a group, such as `algo=grpo`."""
    key = override.partition("=")[0]
    return "." in key or key in ("mode", "role")


def _refuse_changes(saved: DictConfig | ListConfig, config: Config, keys: Sequence[str], reason: str) -> None:
    """Raises ValueError for a key whose value is no longer the saved one."""
    for key in keys:
        before, now = OmegaConf.select(saved, key), OmegaConf.select(OmegaConf.structured(config), key)
        if before != now:
            raise ValueError(f"{key} must stay {before} {reason}, got {now}")


def _refuse_unknown_keys(overrides: Sequence[str]) -> None:
    """Raises ValueError with each override whose key no section or group has, and the names that come
    nearest."""
    keys = list_defaults()
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    groups = {path.parent.name for path in FOLDER.glob("*/*.yaml")}
    known = {*keys, *sections, *groups}
    problems = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if key not in known and not key.startswith(tuple(f"{section}." for section in OPEN_ENDED)):
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
    return f"{group} must be one of {', '.join(presets)}, got {name!r}"


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
    if found := re.match(r"Value '(.*)' is not a valid bool", reason):
        return f"{key} must be true or false, got {found[1]!r}"
    if found := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", reason):
        return f"{key} must be one of {found[2]}, got {found[1]!r}"
    if re.match(r"field '.*' is not Optional", reason):
        return f"{key} must have a value, got null"
    if found := re.match(r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)", reason):
        return f"{key} must be followed by a key of this section, got {found[1].strip()!r}"
    return f"{key}: {reason}"
