"""The rows of a source that a run takes: those with a prompt that fits, divided between training and
evaluation.

One pass over the rows checks every prompt and measures those that may be too long. It writes into the cache
`hashes.npy`, a hash of each prompt, and `taken.npy` and `held_out.npy`, the numbers of rows.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from buffers.files import replace_file
from generators.data.cache import digest_value, make_folder
from generators.data.row_store import RowStore
from generators.data.rows import hash_prompt, list_messages, shape_row
from generators.data.sources import RowSource
from generators.environment import Message

HELD_OUT = 8
"""One prompt of a source in so many is held out where `data.eval` names nothing."""
RULES = 1
"""Number of the rules that are coded here. Other rules make other folders of the cache."""
CHUNK = 256
"""Rows that are measured at a time."""
MEASURED = 1000
"""Rows at even distances that are encoded in any case, for the mean length; and as many of the longest."""
UNKNOWN = 0
"""Stands for a length that was not measured. No prompt is empty."""
Report = Callable[[str, int, int | None], None]
"""Called on the way with what is done, how many rows of it are ready, and of how many."""


class EncodesPrompts(Protocol):
    """Makes tokens of prompts as the engine gets them: `generators.rendering.prompts.PromptEncoder`."""

    def render_prompt(
        self, messages: Sequence[Message], template_args: Mapping[str, Any]
    ) -> tuple[str, str]: ...

    def count_tokens(self, rendered: Sequence[tuple[str, str]]) -> list[int]: ...

    def bound_tokens(self, messages: Sequence[Message], template_args: Mapping[str, Any]) -> int | None: ...

    def digest_rules(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The longest prompt, in the tokens of a model."""

    encoder: EncodesPrompts
    tokens: int


class RowMeasures:
    """The hash and the length of each row's prompt."""

    def __init__(self, store: RowStore, source: RowSource, limit: LengthLimit | None) -> None:
        self._store, self._source, self._limit = store, source, limit
        self._shape = source.shape
        number = len(store)
        self.hashes = np.zeros(number, "<u8")
        self.lengths = np.zeros(number, np.uint32)
        """Tokens of each prompt, `UNKNOWN` where it was not encoded, because it fits in any case."""
        self._bounds = np.zeros(number, np.uint32)
        self._step = max(1, number // MEASURED)

    def measure_chunk(self, begin: int, locate: Callable[[int], str]) -> None:
        """Measures the rows from `begin`. Raises ValueError that names a row without a prompt by `locate`."""
        encoded: dict[int, tuple[str, str]] = {}
        for index in range(begin, min(begin + CHUNK, len(self._store))):
            try:
                messages = self._read_messages(index)
                self.hashes[index] = hash_prompt(messages)
                if self._limit is not None and not self._fits_anyway(index, messages):
                    encoded[index] = self._render(messages)
            except ValueError as error:
                raise ValueError(f"{locate(index)}: {error}") from error
        self._count(encoded)

    def measure_longest(self) -> None:
        """Measures those of the others that may be the longest."""
        if self._limit is None:
            return
        unknown = np.flatnonzero(self.lengths == UNKNOWN)
        longest = unknown[np.argsort(self._bounds[unknown])[-MEASURED:]]
        for begin in range(0, len(longest), CHUNK):
            rows = map(int, longest[begin : begin + CHUNK])
            self._count({index: self._render(self._read_messages(index)) for index in rows})

    @property
    def fits(self) -> np.ndarray:
        """[n] of bool."""
        if self._limit is None:
            return np.ones(len(self._store), bool)
        found: np.ndarray = self.lengths <= self._limit.tokens
        return found

    def describe_lengths(self) -> dict[str, Any]:
        """Returns the mean length of prompts that fit, from rows at even distances, and the greatest."""
        taken = self.lengths[self.fits]
        even = self.lengths[:: self._step][self.fits[:: self._step]]
        if self._limit is None or not len(taken):
            return {"tokens_mean": None, "tokens_max": None}
        mean = float(even.mean()) if len(even) else float(taken[taken > UNKNOWN].mean())
        return {"tokens_mean": mean, "tokens_max": int(taken.max())}

    def _fits_anyway(self, index: int, messages: Sequence[Message]) -> bool:
        assert self._limit is not None
        bound = self._limit.encoder.bound_tokens(messages, self._source.chat_template_kwargs)
        if bound is None:
            return False
        self._bounds[index] = min(bound, 2**32 - 1)
        return bound <= self._limit.tokens and index % self._step > 0

    def _read_messages(self, index: int) -> list[Message]:
        return list_messages(shape_row(self._store.read_row(index), **self._shape))

    def _render(self, messages: Sequence[Message]) -> tuple[str, str]:
        assert self._limit is not None
        return self._limit.encoder.render_prompt(messages, self._source.chat_template_kwargs)

    def _count(self, rendered: Mapping[int, tuple[str, str]]) -> None:
        if self._limit is not None and rendered:
            self.lengths[list(rendered)] = self._limit.encoder.count_tokens(list(rendered.values()))


def select_rows(
    source: RowSource,
    store_folder: Path,
    limit: LengthLimit | None,
    *,
    holds_out: bool,
    locate: Callable[[int], str],
    report: Report,
) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of the cache that holds the selection, and what it says of itself.

    `holds_out` keeps one prompt in `HELD_OUT` for evaluation; `locate` names a row.

    Raises ValueError that names the row that has no prompt.
    """
    measure = None if limit is None else [limit.encoder.digest_rules(), limit.tokens]
    settings = [source.shape, dict(source.chat_template_kwargs), measure, holds_out]
    name = digest_value(RULES, store_folder.name, settings)

    def write(folder: Path) -> dict[str, Any]:
        store = RowStore(store_folder)
        measures = RowMeasures(store, source, limit)
        for begin in range(0, len(store), CHUNK):
            report(f"{source.name}: checking rows", begin, len(store))
            measures.measure_chunk(begin, locate)
        measures.measure_longest()
        fits = measures.fits
        held_out = hold_out(measures.hashes, fits) if holds_out else np.zeros(len(store), bool)
        numbers = {"taken": np.flatnonzero(fits & ~held_out), "held_out": np.flatnonzero(fits & held_out)}
        digest = xxhash.xxh3_128()
        for part, found in numbers.items():
            _save_array(folder / f"{part}.npy", found.astype("<u4"))
            digest.update(found.astype("<u4").tobytes())
        _save_array(folder / "hashes.npy", measures.hashes)
        return {
            "digest": digest.hexdigest(),
            "num_rows": len(store),
            "num_taken": len(numbers["taken"]),
            "num_held_out": len(numbers["held_out"]),
            "num_too_long": int((~fits).sum()),
            **measures.describe_lengths(),
        }

    return make_folder(f"kept-{name}", write)


def _save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array as `np.save` does, and on a full disk raises DiskFull."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    replace_file(path, buffer.getbuffer())


def hold_out(hashes: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Returns which rows are held out, [n] of bool: one prompt in `HELD_OUT`, but neither none nor all."""
    prompts = np.unique(hashes[fits])
    held_out = prompts[prompts % HELD_OUT == 0]
    if not len(held_out):
        held_out = prompts[:1]
    if len(held_out) == len(prompts):
        held_out = held_out[:-1]
    found: np.ndarray = np.isin(hashes, held_out)
    return found
