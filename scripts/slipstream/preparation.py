"""Prepares a run before anything starts: a folder of its own, the packages and the user's code, and a
model."""

import asyncio
import dataclasses
import fcntl
import os
import shutil
import socket
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from buffers.files import replace_file
from buffers.journal import lock_journal
from buffers.samplers import load_sampler
from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.load import to_yaml
from configs.schema import Config
from generators.tasks import load_task
from generators.user_code.task_kinds import read_num_prompts
from learners import checkpoint

PREDECESSOR_S = 10.0
"""Seconds that a resumed run waits for the roles of its killed predecessor to end."""


def prepare_run(config: Config) -> tuple[Config, Path, int | None]:
    """Claims the run's folder. For a new run it also checks packages and user code, and makes the tiny model.

    Returns the resolved configuration, the folder, and the step to resume from: None for a new run, 0 for a
    resumed run without a checkpoint, which keeps its groups. Raises ValueError, in the words of the
    configuration, for what cannot be.
    """
    if config.run.resume is not None:
        folder = Path(config.run.resume)
        step = _find_resume_step(config, folder)
        _keep_changes(config, folder, step)
        return config, folder, step
    name = config.run.name or _make_name(config)
    folder = Path(config.run.outputs) / name
    _clear_folder(config, folder)
    _check_packages(config)
    # A simulated engine makes no prompts: its run does not wait for the imports of the task.
    is_simulated = config.generators.engine is EngineKind.simulated
    task = None if is_simulated else load_task(config.task.name, config.task.args)
    load_sampler(config.buffer.sampler, config.buffer.sampler_args)
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(
            config.task,
            size=config.task.size if config.task.size is not None else read_num_prompts(task),
        ),
        learner=dataclasses.replace(
            config.learner, decay_steps=config.learner.decay_steps or config.run.steps
        ),
        run=dataclasses.replace(config.run, name=name),
        model=dataclasses.replace(config.model, path=str(resolve_model(config))),
    )
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, "run.name")
    replace_file(folder / "config.yaml", to_yaml(config).encode())
    return config, folder, None


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
    # A folder with nothing but the lock is of a run that was refused or stopped before it wrote its
    # configuration.
    if not (folder / "config.yaml").is_file() and {path.name for path in folder.iterdir()} != {".lock"}:
        raise ValueError(
            f"run.overwrite must name the folder of a run, got {folder}, which holds other files"
        )
    claim_folder(folder, "run.overwrite")
    shutil.rmtree(folder)


def _check_packages(config: Config) -> None:
    needed = {
        "learner.engine=megatron": ("megatron", config.learner.engine is LearnerKind.megatron),
        "learner.lora.rank": ("peft", config.learner.lora.rank is not None),
        "learner.fsdp.liger": ("liger_kernel", config.learner.fsdp.liger),
    }
    for setting, (package, is_needed) in needed.items():
        if is_needed and find_spec(package) is None:
            raise ValueError(
                f"{setting} needs the package {package} (scripts/launch.sh installs it), got none"
            )


def claim_folder(folder: Path, setting: str) -> None:
    """Makes the run's folder this process's, as long as it lives. `setting` is the key that has named the
    folder.

    Raises ValueError, before anything in the folder is touched, when another command runs there, or a role of
    one does.
    """
    # The lock is held by an open file, which is never closed: it ends with the process, however the process
    # ends.
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The roles of a killed command end a moment after it. The buffer among them holds the journal's lock.
        if (folder / "journal").is_dir():
            os.close(lock_journal(folder / "journal", wait_s=PREDECESSOR_S))
    except (BlockingIOError, ValueError) as error:
        owner = os.pread(lock, 100, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise ValueError(
            f"{setting} must name a run that has ended, got {folder}, where {owner} is at work"
        ) from error
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
        )
    return path.resolve()


def _prepare_tiny_model(config: Config) -> Path:
    """Returns the folder of the tiny model that is warm-started for the task."""
    from generators.text_play import TextPlay, join_messages
    from learners.tiny_cache import prepare_tiny_model, prepare_tiny_player

    name, args = config.task.name, config.task.args
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
