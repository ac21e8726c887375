"""Prepares a run before anything starts: a folder of its own, the user's code, and a model."""

import asyncio
import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from buffers.files import UNFINISHED, naming_full_disk, replace_file
from buffers.journal import lock_journal
from buffers.limits import check_group_size
from buffers.parcels import MODEL, PARCELS
from buffers.samplers import load_sampler
from buffers.supply import PromptSupply
from buffers.terms import compare_sources, make_source_terms, make_terms
from buffers.vocabulary import read_routing
from configs.data import make_absolute
from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.load import parse_config, to_yaml
from configs.positions import check_positions
from configs.schema import Config
from generators.data.prepare import count_repeats, prepare_data
from generators.data.run_data import FileLists, list_prepared_files, make_limit, resume_data
from generators.prompt_trial import try_prompts
from generators.rewards.composition import make_reward
from generators.rewards.functions import place_functions
from generators.rewards.trial import try_reward
from generators.task_versions import compare_versions, read_versions
from generators.tasks import load_task
from generators.tasks.dataset import TaskReward
from generators.tensor_parallel import check_heads
from generators.user_code.task_kinds import find_size, read_num_prompts, read_sources
from learners import checkpoint
from slipstream.continuation import COMMAND_FILE, note_command
from slipstream.data_report import DataProgress, print_data
from slipstream.evaluation_sets import prepare_eval_sets, try_set_rewards
from slipstream.packing import pack_parcels
from slipstream.tracking.trackers import check_own_trackers

DATA_FILE = "data.json"
"""Lists the files that a run's rows come from, with their digests."""
LOCK_FILE = ".lock"
BEGUN = {LOCK_FILE, DATA_FILE, MODEL, PARCELS, COMMAND_FILE}
"""Names of what a run writes before its configuration."""
PREDECESSOR_S = 10.0
"""Seconds that a resumed run waits for the roles of its killed predecessor to end."""


def prepare_run(
    config: Config, raise_if_stopped: Callable[[], None] = lambda: None, overrides: Sequence[str] = ()
) -> tuple[Config, Path, int | None]:
    """Claims the run's folder, and prepares the rows of `data`. For a new run it also checks user code, and
    makes the tiny model. `raise_if_stopped` is called often in work that may take long. The folder keeps the
    command's `overrides`.

    Returns the resolved configuration, the folder, and the step to resume from: None for a new run, 0 for a
    resumed run without a checkpoint, which keeps its groups. Raises ValueError, in the words of the
    configuration, for what cannot be.
    """
    check_own_trackers(config)
    config = _place_folders(config)
    if config.run.resume is not None:
        folder = Path(config.run.resume)
        step = _find_resume_step(config, folder)
        for warning in compare_versions(config.task.versions):
            print(f"warning: {warning}", flush=True)
        config = _resume_task(_resume_rows(config, folder, raise_if_stopped), folder)
        config = dataclasses.replace(config, eval=prepare_eval_sets(config, raise_if_stopped))
        _keep_changes(config, folder, step)
        note_command(folder, overrides)
        pack_parcels(config, folder)
        return config, folder, step
    name = config.run.name or _make_name(config)
    folder = Path(config.run.outputs) / name
    _clear_folder(config, folder)
    config, task = resolve_config(config, raise_if_stopped)
    if config.generators.engine is not EngineKind.simulated:
        try_prompts(config)
    if _has_rows(config):
        try_reward(config, task)
    config = dataclasses.replace(
        config,
        learner=dataclasses.replace(
            config.learner, decay_steps=config.learner.decay_steps or config.run.steps
        ),
        # The old run is gone: a resumed run must not ask for that again.
        run=dataclasses.replace(config.run, name=name, overwrite=False),
        eval=prepare_eval_sets(config, raise_if_stopped),
    )
    if _has_rows(config) and config.eval.prompts and config.data.eval is not None:
        try_reward(config, task, "eval")
    try_set_rewards(config)
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, "run.name")
    if _has_rows(config):
        files: FileLists = list_prepared_files(asdict(config.data))
        replace_file(folder / DATA_FILE, json.dumps(files, indent=1).encode())
    pack_parcels(config, folder)
    note_command(folder, overrides)
    replace_file(folder / "config.yaml", to_yaml(config).encode())
    return config, folder, None


def resolve_config(config: Config, raise_if_stopped: Callable[[], None] = lambda: None) -> tuple[Config, Any]:
    """Checks user code, makes the tiny model, and prepares the rows of `data`.

    Returns the configuration with the model's folder, the rows and the sources of prompts, and the task: None
    with a simulated engine, which makes no prompts.
    """
    if _has_rows(config):
        config = _make_absolute(config)
        _check_reward(config)
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, path=str(resolve_model(config)))
        )
        config = _prepare_rows(config, raise_if_stopped)
    # A simulated run does not wait for the imports of the task.
    is_simulated = config.generators.engine is EngineKind.simulated
    task = None if is_simulated else load_task(config.task.name, config.task_arguments)
    load_sampler(config.buffer.sampler, config.buffer.sampler_args)
    resolved = dataclasses.replace(
        config,
        task=dataclasses.replace(
            config.task,
            size=find_size(task, config.task.size),
            sources=[asdict(source) for source in read_sources(task)],
            versions=read_versions(task),
        ),
        model=dataclasses.replace(config.model, path=str(resolve_model(config))),
    )
    if not is_simulated:
        check_heads(Path(resolved.model.path), config.generators.tensor_parallel)
    resolved = _limit_eval_prompts(resolved, task)
    PromptSupply(make_terms(resolved))  # refuses a curriculum that does not suit the sources
    return resolved, task


def _limit_eval_prompts(config: Config, task: Any) -> Config:
    """Returns the configuration with at most as many held-out prompts as the task has: beyond the last row
    the first follows again, and would count twice."""
    known = read_num_prompts(task, "num_eval_prompts")
    prompts = config.eval.prompts if known is None else min(config.eval.prompts, known)
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, prompts=prompts))


def _resume_task(config: Config, folder: Path) -> Config:
    """Raises ValueError where the task has not the prompts that the run began with. Returns the configuration
    with the held-out prompts that the task has."""
    if config.generators.engine is EngineKind.simulated:
        return config
    task = load_task(config.task.name, config.task_arguments)
    find_size(task, config.task.size)
    began = parse_config((folder / "config.yaml").read_text()).task
    now = dataclasses.replace(config.task, sources=[asdict(source) for source in read_sources(task)])
    problems = compare_sources(make_source_terms(began), make_source_terms(now))
    for before, source in zip(began.sources, now.sources, strict=False):
        made_of = before.get("made_of", source["made_of"])  # a run of before does not say it
        if not problems and made_of != source["made_of"]:
            problems.append(
                f"task.args must make the source {source['name']!r} of {made_of} in a resumed run, got "
                f"{source['made_of']}"
            )
    if problems:
        raise ValueError("\n".join(problems))
    return _limit_eval_prompts(config, task)


def _has_rows(config: Config) -> bool:
    """True for a run whose prompts come from `data`. A simulated engine makes none."""
    return config.task.name == "dataset" and config.generators.engine is not EngineKind.simulated


def _prepare_rows(config: Config, raise_if_stopped: Callable[[], None]) -> Config:
    with DataProgress(raise_if_stopped) as progress:
        records = prepare_data(asdict(config.data), make_limit(config), progress)
    print_data(records, *count_repeats(records))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=records))


def _make_absolute(config: Config) -> Config:
    """Returns the configuration with absolute paths of rows and reward functions, for other folders."""
    data = dataclasses.replace(
        config.data, train=make_absolute(config.data.train), eval=make_absolute(config.data.eval)
    )
    return dataclasses.replace(config, data=data, reward=place_functions(config.reward))


def _place_folders(config: Config) -> Config:
    """Returns the configuration with absolute folders of the critic and of snapshots: on a cluster, roles
    work where the node's Ray was started."""
    algo, sync = config.algo, config.sync
    if algo.critic.path is not None:
        path = str(Path(algo.critic.path).absolute())
        algo = dataclasses.replace(algo, critic=dataclasses.replace(algo.critic, path=path))
    if sync.folder is not None:
        sync = dataclasses.replace(sync, folder=str(Path(sync.folder).absolute()))
    return dataclasses.replace(config, algo=algo, sync=sync)


def _check_reward(config: Config) -> None:
    make_reward(asdict(config.reward), further={"task": TaskReward({})})


def _resume_rows(config: Config, folder: Path, raise_if_stopped: Callable[[], None]) -> Config:
    """Raises ValueError where the rows are not those that the run began with."""
    if not _has_rows(config):
        return config
    path = folder / DATA_FILE
    before: FileLists = json.loads(path.read_bytes()) if path.is_file() else {}
    began = asdict(parse_config((folder / "config.yaml").read_text()).data)
    config = _make_absolute(config)
    _check_reward(config)
    with DataProgress(raise_if_stopped) as progress:
        records = resume_data(config, began, before, progress)
    print_data(records, *count_repeats(records))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=records))


def _find_resume_step(config: Config, folder: Path) -> int:
    """Claims the folder of a run that goes on. Returns the step of its newest checkpoint, 0 when it has
    none."""
    claim_folder(folder, "run.resume")
    newest = checkpoint.find_latest(folder / "checkpoints")
    if newest is None and (damaged := sorted((folder / "checkpoints").glob("step_*"))):
        raise ValueError(
            "run.resume must hold a whole checkpoint, or none at all to go on from the beginning, got "
            f"{folder}, whose "
            f"{damaged[-1].name} is damaged: move it away to go on without it"
        )
    step = 0 if newest is None else newest.manifest.step
    if step >= config.run.steps:
        raise ValueError(
            f"run.steps must be above the checkpoint's step ({step}) to resume, got {config.run.steps}"
        )
    return step


def _keep_changes(config: Config, folder: Path, step: int) -> None:
    """Writes what a resumed run has changed, so that it holds when the run is resumed once more.

    The configuration before it stays as `config.until_step_N.yaml`: replays and readers of old steps need it.
    """
    kept, before = folder / "config.yaml", folder / f"config.until_step_{step}.yaml"
    changed = to_yaml(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=None))).encode()
    if changed == kept.read_bytes():
        return
    if not before.exists():
        replace_file(before, kept.read_bytes())
    replace_file(kept, changed)


def _make_name(config: Config) -> str:
    task = config.task.name.rpartition(":")[2]
    return f"{task}-{config.algo.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _clear_folder(config: Config, folder: Path) -> None:
    """Deletes the old run of this name where `run.overwrite` allows it, and nothing that is not a run."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not config.run.overwrite:
        raise ValueError(
            f"run.name must be new (or set run.overwrite=true, or run.resume={folder} to continue), got "
            f"{folder.name}, "
            f"which exists in {config.run.outputs}"
        )
    # Without a configuration it is of a run that was refused, stopped or killed before it had written it.
    begun = {path.name.removesuffix(UNFINISHED) for path in folder.iterdir()}
    if not (folder / "config.yaml").exists() and not {LOCK_FILE} <= begun <= {*BEGUN, "config.yaml"}:
        raise ValueError(
            f"run.overwrite must name the folder of a run, got {folder}, which holds other files"
        )
    claim_folder(folder, "run.overwrite")
    shutil.rmtree(folder)


def claim_folder(folder: Path, setting: str, rule: str = "name a run that has ended") -> None:
    """Makes the run's folder this process's, as long as it lives. `setting` is the key that has named the
    folder, `rule` what the key must do.

    Raises ValueError, before anything in the folder is touched, when another command runs there, or a role of
    one does; and DiskFull.
    """
    # The lock is held by an open file, which is never closed: it ends with the process, however the process
    # ends.
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The roles of a killed command end a moment after it. The buffer among them holds the journal's lock.
        if (folder / "journal").is_dir():
            os.close(lock_journal(folder / "journal", wait_s=PREDECESSOR_S))
    except (BlockingIOError, ValueError) as error:
        owner = os.pread(lock, 100, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise ValueError(f"{setting} must {rule}, got {folder}, where {owner} is at work") from error
    with naming_full_disk(folder / LOCK_FILE):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)


def resolve_model(config: Config) -> Path:
    """Returns the folder of the model; makes the tiny model where the cache lacks it."""
    if config.learner.engine is LearnerKind.simulated:
        return Path("simulated")
    if config.model.path == "tiny":
        return _prepare_tiny_model(config)
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model.path must be a Hugging Face model folder or `tiny`, got {path} without a config.json"
            f"{explain_download(config.model.path)}"
        )
    check_positions(json.loads((path / "config.json").read_text()), config.generators.max_model_len)
    check_group_size(config, read_routing(path, config.learner.moe.router_replay))
    return path.resolve()


def explain_download(model: str) -> str:
    """Returns how to get a model that the hub names, in brackets; empty for what looks like a path."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) or Path(model).parent.exists():
        return ""
    owner, _, name = model.rpartition("/")
    if owner == "models":
        return f" (`hf download OWNER/{name} --local-dir {model}` gets it; a recipe's file names its owner)"
    return f" (for one of the hub: `hf download {model} --local-dir models/{name}`, and name models/{name})"


def _prepare_tiny_model(config: Config) -> Path:
    """Returns the folder of the tiny model that is warm-started for the task."""
    from generators.text_play import TextPlay, join_messages
    from learners.tiny_cache import prepare_tiny_model, prepare_tiny_player

    name, args = config.task.name, config.task_arguments
    task = load_task(name, args)
    if hasattr(task, "example_conversations"):
        conversations = map(join_messages, task.example_conversations("train", seed=0))
        with asyncio.Runner() as loop:
            return prepare_tiny_player(
                conversations, lambda number: TextPlay(name, args, number, seed=1, loop=loop)
            )
    if not hasattr(task, "solved_examples"):
        raise ValueError(
            "model.path must be a folder for a task without solved questions to warm-start the tiny model on "
            f"(`solved_examples` or `example_conversations`), got tiny with task.name={name}"
        )
    return prepare_tiny_model(task.solved_examples("train", seed=0))
