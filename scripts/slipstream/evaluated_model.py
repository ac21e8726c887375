"""The model that an evaluation alone asks: a run's checkpoint, an export, or any Hugging Face folder.

    outputs/NAME        ─▶ its newest checkpoint, or that of --step, written as a model folder for the time
    a model folder      ─▶ as it is
    tiny                ─▶ the tiny model of the task

The tensors are then published as a learner publishes them, and the engine takes them up and attests them. So
the digest is that of the run's own publication where the tensors are the same, in the same order.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from configs.schema import Config
from generators.user_code.process_control import die_with_parent
from learners import checkpoint
from slipstream.preparation import claim_folder, explain_download, resolve_model
from sync.publisher import Publisher
from sync.stream import TensorPart, stream_tensor

WORK_PREFIX = ".model-"
"""Begins the names of folders for exported checkpoints, beside the evaluations."""
MODEL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Ends of the names of a model folder's files that decide its samples beside the weights: configuration,
tokenizer, templates and code."""
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""A model folder has one of these. Without, transformers makes a tokenizer that knows no word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model or a run, as the command line names it."""

    text: str
    run: Path | None = None
    """The run's folder; None for a model."""
    step: int | None = None
    """The checkpoint of a run."""

    @property
    def version(self) -> int:
        """A run's version; -1 for a model folder, which has none."""
        return -1 if self.step is None else self.step

    @property
    def name(self) -> str:
        """Names the folder of results."""
        if self.run is not None:
            return f"{self.run.resolve().name}-step_{self.step}"
        return "tiny" if self.text == "tiny" else Path(self.text).resolve().name


def find_target(text: str, step: int | None) -> Target:
    """Raises ValueError for what is neither a run nor a model."""
    path = Path(text)
    is_run = text != "tiny" and (path / "config.yaml").is_file()
    if text != "tiny" and not is_run and not (path / "config.json").is_file():
        raise ValueError(
            "MODEL-OR-RUN must be a run's folder (with a config.yaml), a Hugging Face folder (with a "
            f"config.json), or tiny, got {text!r}{explain_download(text)}"
        )
    if not is_run:
        if step is not None:
            raise ValueError(f"--step must be left out for a model, which has no steps, got {step}")
        return Target(text=text)
    kept = sorted(found.manifest.step for found in checkpoint.find_checkpoints(path / "checkpoints"))
    if not kept:
        raise ValueError(f"the run must hold a checkpoint, got {path} without one")
    if step is not None and step not in kept:
        raise ValueError(f"--step must be one of {kept} (the checkpoints kept), got {step}")
    return Target(text=text, run=path, step=kept[-1] if step is None else step)


def bring_model(target: Target, config: Config, outputs: Path) -> tuple[Path, Path | None]:
    """Returns the target's model folder, and the folder to delete afterwards, if any.

    Raises ValueError for a model that cannot be had.
    """
    if target.run is None:
        folder = resolve_model(config)
        if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
            raise ValueError(f"a model folder must have a tokenizer (tokenizer.json), got {folder} without")
        return folder, None
    outputs.mkdir(parents=True, exist_ok=True)
    sweep_work(outputs)
    work = outputs / f"{WORK_PREFIX}{target.name}-{os.getpid()}"
    work.mkdir(exist_ok=True)
    claim_folder(work, "the checkpoint's export")
    # A process of its own: the learner's engine and vLLM get in each other's way.
    command = [sys.executable, "-P", "-m", "slipstream.export", str(target.run), str(work / "model")]
    done = subprocess.run(
        [*command, "--step", str(target.step)],
        capture_output=True,
        text=True,
        # A user's Ctrl-C is for this process, which then stops between two things.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        raise ValueError(done.stderr.strip()[-4000:] or f"the export has ended with {done.returncode}")
    return work / "model", work


def sweep_work(outputs: Path) -> None:
    """Deletes exports that killed evaluations have left."""
    for lock in outputs.glob(f"{WORK_PREFIX}*/.lock"):
        try:
            claim_folder(lock.parent, "the checkpoint's export")
        except (ValueError, OSError):
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)


def publish_model(folder: Path, publisher: Publisher, dtype: str, version: int) -> str:
    """Publishes the tensors of a model folder in `dtype`; returns the manifest's path.

    Raises ValueError for a folder without safetensors.
    """
    return publisher.publish_version(max(0, version), read_tensors(folder, getattr(torch, dtype))).locator


def read_tensors(folder: Path, dtype: torch.dtype) -> Iterator[TensorPart]:
    """Yields the tensors of a model folder in the order of its files, a piece at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"a model folder must have its weights in .safetensors files, got {folder} without")
    is_tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if is_tied and name == "lm_head.weight":
                    continue
                tensor = file.get_tensor(name)
                yield from stream_tensor(name, tensor, dtype if tensor.is_floating_point() else tensor.dtype)


def digest_files(folder: Path) -> dict[str, str]:
    """Returns digests of the files of a model folder beside its weights, by name."""
    return {
        path.name: xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.suffix in MODEL_FILES and path.is_file()
    }


def read_longest_context(folder: Path) -> int:
    """Returns how many tokens a model folder's configuration allows. Raises ValueError where it does not
    say."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("max_position_embeddings"), int):
            return int(part["max_position_embeddings"])
    raise ValueError(
        "generators.max_model_len must be said for a model whose config.json has no max_position_embeddings, "
        f"got {folder}"
    )
