"""The layout of a snapshot that several ranks write together: known before anything is written, and the same
on every rank.

Each rank says which tensors it yields and which of their bytes (`RankForms`). From what all say follow the
file's header, the place of every tensor, and who writes what.

A tensor's digest is taken of chunks (`sync.digest`), and does not depend on who writes which rows. A chunk
belongs to the rank that writes its first byte; ranks that write further bytes of it send these there
(`Fragment`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import xxhash

from sync.digest import CHUNK_BYTES
from sync.manifest import (
    MAX_ENTRIES,
    MAX_MANIFEST_BYTES,
    FilePart,
    FileParts,
    PartSource,
    TensorEntry,
    dtype_name,
)
from sync.snapshot_writer import HEADER_ROOM, encode_header, file_order, find_room
from sync.stream import TensorPart

REST_BYTES = 1 << 15
"""Room in a manifest for all but its tensors and parts: paths, names and the recipe of adapters."""


class TensorForm(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without its elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


class RankForms(msgspec.Struct, frozen=True):
    """Message of each rank to all: what it publishes of every version."""

    forms: list[TensorForm]
    spans: list[tuple[int, int, int]]
    """Bytes of a tensor: number of its form, where they begin, where they end."""


class FileSpan(NamedTuple):
    """Bytes of one tensor that one rank writes; places count from the first tensor on."""

    rank: int
    tensor: int
    """Where the tensor begins."""
    begin: int
    end: int

    @property
    def first_chunk(self) -> int:
        """Where the first of the tensor's chunks begins that does not begin before the span."""
        return self.tensor - (self.tensor - self.begin) // CHUNK_BYTES * CHUNK_BYTES

    @property
    def num_chunks(self) -> int:
        """Number of chunks that begin in the span."""
        return max(0, -(-(self.end - self.first_chunk) // CHUNK_BYTES))


class SpanDigests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of a span, as the rank that writes it tells them."""

    chunks: bytes
    """Digests, 16 bytes each, of the chunks that begin in it."""
    part: bytes
    """Xxh3-128 over the digests of its pieces: it is cut where chunks begin."""


class Fragment(NamedTuple):
    """Bytes that `sender` writes, of a chunk that begins with bytes of `owner`."""

    sender: int
    owner: int
    begin: int
    end: int


def note_forms(parts: Iterable[TensorPart]) -> RankForms:
    """Returns what a rank yields, without its elements."""
    numbers: dict[TensorForm, int] = {}
    spans: list[tuple[int, int, int]] = []
    for part in parts:
        form = TensorForm(part.name, dtype_name(part.published_dtype), part.shape)
        number = numbers.setdefault(form, len(numbers))
        begin = part.begin * form.item_bytes
        end = begin + part.elements.numel() * form.item_bytes
        if spans and spans[-1][0] == number and spans[-1][2] == begin:
            spans[-1] = (number, spans[-1][1], end)
        else:
            spans.append((number, begin, end))
    return RankForms(list(numbers), spans)


class FileLayout:
    """Where everything lies, and who writes it."""

    def __init__(self, told: Sequence[RankForms]) -> None:
        """`told`: what each rank has said. Raises RuntimeError unless the ranks yield every byte of every
        tensor once."""
        self.forms: dict[str, TensorForm] = {}
        spans: dict[str, list[tuple[int, int, int]]] = {}
        for rank, one in enumerate(told):
            for form in one.forms:
                if self.forms.setdefault(form.name, form) != form:
                    raise RuntimeError(
                        f"ranks must publish the same tensors, got {form} and {self.forms[form.name]}"
                    )
            for number, begin, end in one.spans:
                spans.setdefault(one.forms[number].name, []).append((begin, end, rank))
        self.places: dict[str, tuple[int, int]] = {}
        """Where each tensor begins and ends after the header, in the file's order."""
        self.spans: list[FileSpan] = []
        """All spans, in the file's order."""
        at = 0
        for name in file_order(self.forms):
            self.places[name] = (at, at + self.forms[name].num_bytes)
            self._add_spans(name, at, sorted(spans[name]))
            at += self.forms[name].num_bytes
        self.data_bytes = at
        header = encode_header(self.forms, self.places)
        self.room = find_room(len(header), HEADER_ROOM)
        """Bytes before the first tensor."""
        self.header = (self.room - 8).to_bytes(8, "little") + header.ljust(self.room - 8)
        self.num_bytes = self.room + at
        """Bytes of the file."""
        self.fragments = list(self._find_fragments())

    def _add_spans(self, name: str, at: int, spans: list[tuple[int, int, int]]) -> None:
        end = 0
        for begin, stop, rank in spans:
            if begin != end:
                raise RuntimeError(
                    f"ranks must publish every byte of {name} once, got bytes {begin} to {stop} by rank "
                    f"{rank} after byte {end}"
                )
            end = stop
            if stop > begin:
                last = self.spans[-1] if self.spans else None
                if last is not None and (last.rank, last.tensor, last.end) == (rank, at, at + begin):
                    self.spans[-1] = last._replace(end=at + stop)
                else:
                    self.spans.append(FileSpan(rank, at, at + begin, at + stop))
        if end != self.forms[name].num_bytes:
            raise RuntimeError(
                f"ranks must publish all {self.forms[name].num_bytes} bytes of {name}, got {end}"
            )

    def _find_fragments(self) -> Iterator[Fragment]:
        owner = -1
        for span in self.spans:
            if span.begin < span.first_chunk:
                yield Fragment(span.rank, owner, span.begin, min(span.end, span.first_chunk))
            if span.num_chunks:
                owner = span.rank

    def own_spans(self, rank: int) -> list[FileSpan]:
        return [span for span in self.spans if span.rank == rank]

    def describe_tensors(self, told: Sequence[Sequence[SpanDigests]]) -> tuple[TensorEntry, ...]:
        """Returns the manifest's entries. `told`: by rank, of each of its spans, in order.

        Raises RuntimeError where a rank says too much or too little.
        """
        digests = {begin: xxhash.xxh3_128() for begin, end in self.places.values() if begin < end}
        for span, own in self._pair_spans(told):
            digests[span.tensor].update(own.chunks)
        return tuple(
            TensorEntry(
                name,
                self.forms[name].dtype,
                self.forms[name].shape,
                digests[begin].hexdigest() if begin < end else xxhash.xxh3_128_hexdigest(b""),
            )
            for name, (begin, end) in self.places.items()
        )

    def check_manifest(self, sources: Sequence[PartSource], hosts: Sequence[int]) -> None:
        """Raises ValueError where the manifest would be larger than subscribers take. `sources`, `hosts`: see
        `describe_parts`; no sources where a host has the whole file."""
        digest = "0" * 32
        entries = [TensorEntry(form.name, form.dtype, form.shape, digest) for form in self.forms.values()]
        parts = [FilePart(self.room, 0, digest)]
        parts += [FilePart(self.room + span.end, hosts[span.rank], digest) for span in self.spans]
        held = FileParts(tuple(sources), tuple(parts)) if sources else None
        num_parts = len(parts) if sources else 0
        num_bytes = len(msgspec.json.encode(entries)) + len(msgspec.json.encode(held)) + REST_BYTES
        if num_bytes > MAX_MANIFEST_BYTES or max(len(entries), num_parts) > MAX_ENTRIES:
            longest = max(self.forms.values(), key=lambda form: len(msgspec.json.encode(form)))
            raise ValueError(
                f"the manifest of a version must have at most {MAX_MANIFEST_BYTES:,} bytes, and at most "
                f"{MAX_ENTRIES:,} tensors and parts, got about {num_bytes:,} bytes, {len(entries):,} tensors "
                f"in {num_parts:,} parts on {max(1, len(sources))} hosts; fewer hosts make fewer parts (the "
                f"longest entry: {longest.name[:200]} {list(longest.shape)})"
            )

    def describe_parts(
        self, told: Sequence[Sequence[SpanDigests]], sources: Sequence[PartSource], hosts: Sequence[int]
    ) -> FileParts:
        """Returns where all bytes are. `told`: see `describe_tensors`. `hosts`: of each rank, the number of
        the source that has its rows."""
        header = FilePart(self.room, 0, xxhash.xxh3_128_hexdigest(b""))
        parts = [
            FilePart(self.room + span.end, hosts[span.rank], own.part.hex())
            for span, own in self._pair_spans(told)
        ]
        return FileParts(tuple(sources), (header, *parts))

    def _pair_spans(self, told: Sequence[Sequence[SpanDigests]]) -> Iterator[tuple[FileSpan, SpanDigests]]:
        left = [iter(one) for one in told]
        for span in self.spans:
            own = next(left[span.rank], SpanDigests(b"", b""))
            if len(own.chunks) != 16 * span.num_chunks or len(own.part) != 16:
                raise RuntimeError(f"rank {span.rank} must digest {span.num_chunks} chunks of {span}")
            yield span, own
