"""The cache of the tiny model.

A run that finds the model there starts without torch, which takes seconds to import.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import xxhash

from learners.tiny_seed import read_seed
from sync.locks import hold_lock

RECIPE = Path(__file__).with_name("tiny.py")
"""The file that makes the model.

Its text is part of the model's name in the cache: a change there makes another model.
"""
PATIENCE_S = 600.0
"""How long this process waits for another one that makes the model, before it makes its own."""


def prepare_tiny_model(solved: Iterator[tuple[str, str]], cache: Path | None = None) -> Path:
    """Returns the folder of the model. The first call makes the model (half a minute), and the cache keeps
    it.

    `solved`: pairs of question and answer, without end. The cache is `~/.cache/slipstream/models`, or
    `models` in the environment's SLIPSTREAM_CACHE. Raises ValueError if SLIPSTREAM_TINY_SEED is set to
    anything but a whole number.
    """
    seed = read_seed()
    cache = (
        cache or Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream")) / "models"
    )
    sample = list(islice(solved, 2000))
    recipe = f"{RECIPE.read_text()}{sample[:100]}{seed}"
    folder = cache / f"tiny-{xxhash.xxh3_64_hexdigest(recipe.encode())}"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            # The lock only spares work: without it, two processes make the same model.
            with suppress(OSError):
                lock.enter_context(hold_lock(cache / ".making.lock", "makes the tiny model", PATIENCE_S))
            if not (folder / "config.json").exists():
                _make_in_cache(solved, [question for question, _ in sample], seed, folder)
    return folder


def _make_in_cache(solved: Iterator[tuple[str, str]], texts: list[str], seed: int, folder: Path) -> None:
    from learners import tiny  # here: importing torch takes seconds

    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    tiny.make_tiny_model(solved, texts, seed, temporary)
    try:
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary)
        # Another process may have been faster, and its model is as good.
        if not (folder / "config.json").exists():
            raise
