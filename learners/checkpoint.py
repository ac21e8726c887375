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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


def save(folder: Path, manifest: CheckpointManifest, write: Callable[[Path], None], keep: int, *, first_rank: bool) -> Path:
    """Writes `folder/step_<k>` by `write(subfolder)`, which every rank calls; keeps the newest `keep`."""
    final = folder / f"step_{manifest.step}"
    temporary = folder / f".step_{manifest.step}.tmp"
    if first_rank:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    write(temporary / "engine")
    if first_rank:
        with open(temporary / "manifest.json", "wb") as file:
            file.write(msgspec.json.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old.folder)
    return final


def complete(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. What has no readable manifest of its own step is passed over."""
    found = []
    for path in folder.glob("step_*"):
        try:
            manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=CheckpointManifest)
        except (OSError, msgspec.DecodeError):
            continue
        if path.name == f"step_{manifest.step}" and (path / "engine").is_dir():
            found.append(Checkpoint(path, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.step)


def latest(folder: Path) -> Checkpoint | None:
    return next(reversed(complete(folder)), None)
