"""The cache of the tiny model.

A run that finds the model there starts without torch, which takes seconds to import.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

import xxhash

from configs.disk import find_cache, make_cache
from learners.text_game import TextGame
from learners.tiny_seed import read_seed
from sync.locks import hold_lock

RECIPE = Path(__file__).with_name("tiny.py")
"""The file that makes the model.

Its text is part of the model's name in the cache: a change there makes another model.
"""
RECIPE_OF_PLAYERS = Path(__file__).with_name("tiny_player.py")
PATIENCE_S = 600.0
"""How long this process waits for another one that makes the model, before it makes its own."""


def prepare_tiny_model(solved: Iterator[tuple[str, str]], cache: Path | None = None) -> Path:
    """Returns the folder of the model. The first call makes the model (half a minute), and the cache keeps
    it.

    `solved`: pairs of question and answer, without end. The cache is `~/.cache/slipstream/models`, or
    `models` in the environment's SLIPSTREAM_CACHE. Raises ValueError if SLIPSTREAM_TINY_SEED is set to
    anything but a whole number.
    """
    seed, sample = read_seed(), list(islice(solved, 2000))

    def make(folder: Path) -> None:
        from learners.tiny import make_tiny_model  # here: importing torch takes seconds

        make_tiny_model(solved, [question for question, _ in sample], seed, folder)

    return _find_or_make(f"{RECIPE.read_text()}{sample[:100]}{seed}", make, cache)


def prepare_tiny_player(
    conversations: Iterator[list[str]], open_game: Callable[[int], TextGame], cache: Path | None = None
) -> Path:
    """Returns the folder of a tiny model that begins with episodes of several turns, as `prepare_tiny_model`
    does.

    `conversations`: episodes of a weak player, without end: the environment's text, the reply, and so on by
    turns. `open_game` begins the game of a number.
    """
    seed, sample = read_seed(), list(islice(conversations, 500))
    texts = [text for conversation in sample for text in conversation[::2]]

    def make(folder: Path) -> None:
        from learners.tiny_player import make_tiny_player  # here: importing torch takes seconds

        make_tiny_player(conversations, open_game, texts, seed, folder)

    recipe = f"{RECIPE.read_text()}{RECIPE_OF_PLAYERS.read_text()}{sample[:100]}{seed}"
    return _find_or_make(recipe, make, cache)


def _find_or_make(recipe: str, make: Callable[[Path], None], cache: Path | None) -> Path:
    cache = cache or find_cache("models")
    folder = cache / f"tiny-{xxhash.xxh3_64_hexdigest(recipe.encode())}"
    if not (folder / "config.json").exists():
        make_cache(cache)
        with ExitStack() as lock:
            # The lock only spares work: without it, two processes make the same model.
            with suppress(OSError):
                lock.enter_context(hold_lock(cache / ".making.lock", "makes the tiny model", PATIENCE_S))
            if not (folder / "config.json").exists():
                _make_in_cache(make, folder)
    return folder


def _make_in_cache(make: Callable[[Path], None], folder: Path) -> None:
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    make(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        shutil.rmtree(temporary)
        # Another process may have been faster, and its model is as good.
        if not (folder / "config.json").exists():
            raise
