"""Where the tiny model is kept. A run that finds it there starts without torch, which takes seconds to import."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import xxhash

from sync.locks import hold_lock

SEED = "SLIPSTREAM_TINY_SEED"
RECIPE = Path(__file__).with_name("tiny.py")
"""How the model is made: a change there is another model."""
PATIENCE_S = 600.0
"""A process that makes the model is waited for so long; then this one makes its own."""


def prepare_tiny_model(solved: Iterator[tuple[str, str]], cache: Path | None = None) -> Path:
    """The folder of the model, made at the first call (half a minute) and kept in the cache.

    `solved`: (question, answer), without end. Cache: `~/.cache/slipstream/models`, or the environment's SLIPSTREAM_CACHE.
    Raises ValueError if SLIPSTREAM_TINY_SEED is set to anything but a whole number.
    """
    seed = _seed()
    cache = (
        cache or Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream")) / "models"
    )
    sample = list(islice(solved, 2000))
    recipe = f"{RECIPE.read_text()}{sample[:100]}{seed}"
    folder = cache / f"tiny-{xxhash.xxh3_64_hexdigest(recipe.encode())}"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            with suppress(OSError):  # the lock spares work; without it two processes make the same model
                lock.enter_context(hold_lock(cache / ".making.lock", "makes the tiny model", PATIENCE_S))
            if not (folder / "config.json").exists():
                _make(solved, [question for question, _ in sample], seed, folder)
    return folder


def _make(solved: Iterator[tuple[str, str]], texts: list[str], seed: int, folder: Path) -> None:
    from learners import tiny  # here: importing torch takes seconds

    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    tiny.make_tiny_model(solved, texts, seed, temporary)
    try:
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary)
        if not (folder / "config.json").exists():  # else another process was faster
            raise


def _seed() -> int:
    """The seed of the initial weights: the environment's SLIPSTREAM_TINY_SEED, or 0."""
    given = os.environ.get(SEED, "0")
    if not (given.isascii() and given.isdigit()) or int(given) >= 2**32:
        raise ValueError(f"{SEED} must be a whole number from 0 to {2**32 - 1}, got {given!r}")
    return int(given)
