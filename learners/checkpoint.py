"""Checkpoints: `step_<k>/`, complete or absent. The manifest is written last, then the folder gets its name."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec


class CheckpointManifest(msgspec.Struct, frozen=True):
    step: int
    """Steps trained; also the version held, and where the buffer goes on."""
    incarnation: str
    """The life of the learner that wrote it."""
    seed: int
    kl_coef: float = 0.0
    """Where the coefficient of the KL penalty has come to."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


def save(
    folder: Path,
    manifest: CheckpointManifest,
    write: Callable[[Path], None],
    keep: int,
    *,
    first_rank: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `folder/step_<k>` by `write(folder)`, which makes a subfolder of each model; keeps the newest `keep`. Every rank calls it.

    `barrier` must hold all ranks until each has come to it: the first one makes the folder and gives it its name.
    """
    final = folder / f"step_{manifest.step}"
    temporary = folder / f".step_{manifest.step}.tmp"
    if first_rank:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    write(temporary)
    barrier()
    if first_rank:
        with open(temporary / "manifest.json", "wb") as file:
            file.write(msgspec.json.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _sync_folder(folder)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old.folder)
    return final


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path) -> CheckpointManifest:
    """The manifest of the checkpoint in `folder`. Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=CheckpointManifest)


def complete(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. What has no readable manifest of its own step is passed over."""
    found = []
    for path in folder.glob("step_*"):
        try:
            manifest = read(path)
        except (OSError, msgspec.DecodeError):
            continue
        if path.name == f"step_{manifest.step}" and (path / "engine").is_dir():
            found.append(Checkpoint(path, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.step)


def latest(folder: Path) -> Checkpoint | None:
    return next(reversed(complete(folder)), None)
