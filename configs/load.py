"""From command-line overrides to a checked, typed `Config`. Hydra composes; past this module there is no DictConfig."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config

FOLDER = Path(__file__).parent


def load(overrides: Sequence[str]) -> Config:
    """Composes `config.yaml` with the overrides. Raises ValueError with every problem, named by field, rule and value."""
    return check(_compose(tuple(overrides)))


@lru_cache(maxsize=64)
def _compose(overrides: tuple[str, ...]) -> DictConfig:
    """Nobody changes what it returns. It takes a tenth of a second, and tests ask for the same again and again."""
    if problems := _unknown(overrides):
        raise ValueError("\n".join(problems))
    _store_schema()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        try:
            # The arguments of a task or a sampler are open-ended: Hydra wants a `++` where the schema cannot know the key.
            return compose(
                "config",
                overrides=[
                    f"++{o}" if o.startswith(("task.args", "buffer.sampler_args")) else o for o in overrides
                ],
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_explain(error, overrides)) from error


def resumed_folder(overrides: Sequence[str]) -> Path | None:
    """The folder of the run that the overrides resume; None where they begin one. What they say is checked by `resume`, not here."""
    said = [
        override.partition("=")[2] for override in overrides if override.partition("=")[0] == "run.resume"
    ]
    return Path(said[-1].strip("'\"")) if said and said[-1] != "null" else None


def parse(text: str) -> Config:
    """A `config.yaml` that a run has written."""
    return check(_merge(OmegaConf.create(text)))


def resume(folder: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run in `folder`, with overrides on top. Refuses changes that its journal cannot bear."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"run.resume must be the folder of a run, got {folder} without a config.yaml")
    if problems := _unknown(overrides):
        raise ValueError("\n".join(problems))
    saved = OmegaConf.create(path.read_text())
    if groups := [
        o for o in overrides if "." not in o.partition("=")[0] and o.partition("=")[0] not in ("mode", "role")
    ]:
        raise ValueError(f"a resumed run takes single keys only, got {groups}")
    config = check(_changed(_merge(saved), overrides))
    for key in ("run.seed", "task.name", "learner.groups_per_step", "learner.samples_per_prompt"):
        before, now = OmegaConf.select(saved, key), OmegaConf.select(OmegaConf.structured(config), key)
        if before != now:
            raise ValueError(f"{key} must stay {before} in a resumed run (its journal is made so), got {now}")
    return config


def study(folder: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run in `folder`, changed for training on what it has recorded: another algorithm
    (`algo=NAME`), other hyperparameters. Refuses what the recorded data fixes."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"the run must be a folder with a config.yaml, got {folder}")
    if problems := _unknown(overrides):
        raise ValueError("\n".join(problems))
    saved = OmegaConf.load(path)
    assert isinstance(saved, DictConfig)
    single = [override for override in overrides if "." in override.partition("=")[0]]
    for override in overrides:
        group, _, name = override.partition("=")
        if override in single:
            continue
        if not (FOLDER / group / f"{name}.yaml").is_file() or group != "algo":
            raise ValueError(f"a study takes algo=NAME and single keys, got {override!r}")
        own, other = _preset(saved.algo.name), _preset(name)
        saved["algo"] = other.algo
        for key in ("lr", "minibatches"):  # what the run has as its preset has it
            if saved.learner[key] == own.learner[key]:
                saved.learner[key] = other.learner[key]
    config = check(_changed(_merge(saved), single))
    for key in ("learner.groups_per_step", "learner.samples_per_prompt", "model.path"):
        before, now = OmegaConf.select(saved, key), OmegaConf.select(OmegaConf.structured(config), key)
        if before != now:
            raise ValueError(f"{key} must stay {before} (the recorded data is made so), got {now}")
    return config


def _preset(name: str) -> DictConfig:
    """The defaults under the preset's file; the defaults alone where there is none of this name."""
    path = FOLDER / "algo" / f"{name}.yaml"
    said = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
    merged = OmegaConf.merge(OmegaConf.structured(Config), said)
    assert isinstance(merged, DictConfig)
    return merged


def _changed(saved: DictConfig | ListConfig, overrides: Sequence[str]) -> DictConfig | ListConfig:
    """With single keys on top. Raises ValueError for what has not the type of its key."""
    try:
        return OmegaConf.merge(saved, OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, overrides)) from error


def _merge(saved: DictConfig | ListConfig) -> DictConfig | ListConfig:
    """The configuration that a run has written. Raises ValueError for a file of another version."""
    try:
        return OmegaConf.merge(OmegaConf.structured(Config), saved)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"a run's config.yaml must be of this version of Slipstream, got one with {_explain(error, [])}"
        ) from error


def check(composed: DictConfig | ListConfig) -> Config:
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    if problems := config.problems():
        raise ValueError("\n".join(problems))
    return config


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


@cache
def _store_schema() -> None:
    """Lets `config.yaml` name the schema in its defaults."""
    ConfigStore.instance().store(name="schema", node=Config)


@cache
def fields() -> Mapping[str, object]:
    """Every field by its dotted name, with its default."""
    found: dict[str, object] = {}

    def walk(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            value = OmegaConf.select(node, key)
            if OmegaConf.get_type(node, key) not in (None, dict) and isinstance(value, DictConfig):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    walk(OmegaConf.structured(Config), "")
    return found


def _unknown(overrides: Sequence[str]) -> list[str]:
    """A problem for each override whose key no field or group has, with the names that come nearest."""
    names = fields()
    known = {
        *names,
        *(name.rpartition(".")[0] for name in names),
        *(p.parent.name for p in FOLDER.glob("*/*.yaml")),
    } - {""}
    problems = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if key not in known and not key.startswith(("task.args.", "buffer.sampler_args.")):
            near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.5)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            problems.append(f"{key} must be a configuration key{hint}, got {override!r}")
    return problems


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's complaint in one line."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    reason = " ".join(str(root).split("full_key")[0].split("Config search path")[0].split())
    return f"{getattr(root, 'full_key', None) or ' '.join(overrides)}: {reason}"
