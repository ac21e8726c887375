"""The rows that one rank publishes, copied out of its model, so that training may change the model while they
are digested and written.

    model ── copy_parts: training waits ──▶ staging ── write_rows, digest_chunks: beside training ──▶ the file
"""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import xxhash

from sync.digest import CHUNK_BYTES, digest_pieces
from sync.file_layout import FileLayout, FileSpan, Fragment, SpanDigests
from sync.stream import TensorPart

ALIGNMENT = 64
"""Each span begins in the staging memory at a multiple of so many bytes."""
PIECE_BYTES = 8 * CHUNK_BYTES
"""Bytes that are written and digested at a time: what a core's own cache holds."""

ExchangeBytes = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Sends a message to each rank; returns those that the ranks have sent to this one, by rank."""


class StagedRows:
    """One rank's rows of one version at a time, in memory that stays for the next version."""

    def __init__(self, layout: FileLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._spans = layout.own_spans(rank)
        self._begins = [span.begin for span in self._spans]
        self._staged_at: list[int] = []
        """By span, where it begins in the staging memory."""
        size = 0
        for span in self._spans:
            self._staged_at.append(size)
            size += -(-(span.end - span.begin) // ALIGNMENT) * ALIGNMENT
        self.num_bytes = sum(span.end - span.begin for span in self._spans)
        """Bytes of the rank's rows."""
        # Written once, so that no page of it is missing when training waits for the copy.
        self._memory = torch.empty(size, dtype=torch.uint8).fill_(0)
        if size and torch.cuda.is_available():
            # Not `pin_memory=True`, which takes the next power of two.
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            )
        self._bytes = memoryview(self._memory.numpy())
        self.copy_s = 0.0
        """Seconds that the last copy took."""
        self.largest_part = 0
        """Bytes of the largest part of the last version."""
        self.num_done = 0
        """Bytes written so far, over all versions."""

    def copy_parts(self, parts: Iterable[TensorPart]) -> None:
        """Copies a version's parts. They must be those that the layout was made of.

        Parts on a GPU are copied one after the other without a wait in between.
        """
        began, num_bytes, on_device = time.perf_counter(), 0, False
        for part in parts:
            item = part.published_dtype.itemsize
            size = part.elements.numel() * item
            on_device = on_device or part.elements.is_cuda
            if size:
                begin = self._find_place(part, item, size)
                place = self._memory[begin : begin + size].view(part.published_dtype)
                place.copy_(part.elements.reshape(-1), non_blocking=True)
            num_bytes, self.largest_part = num_bytes + size, max(self.largest_part, size)
        if on_device:
            torch.cuda.synchronize()
        if num_bytes != self.num_bytes:
            raise RuntimeError(f"a rank must yield its {self.num_bytes} bytes again, got {num_bytes}")
        self.copy_s = time.perf_counter() - began

    def _find_place(self, part: TensorPart, item: int, size: int) -> int:
        begin = self._layout.places[part.name][0] + part.begin * item
        number = bisect_right(self._begins, begin) - 1
        if number < 0 or begin + size > self._spans[number].end:
            raise RuntimeError(f"a rank must yield the same rows again, got others of {part.name}")
        return self._staged_at[number] + begin - self._spans[number].begin

    def _view_bytes(self, number: int, begin: int, end: int) -> memoryview:
        """Returns bytes of a span, from one place in the file to another."""
        shift = self._staged_at[number] - self._spans[number].begin
        return self._bytes[begin + shift : end + shift]

    # ---- beside training

    def exchange_fragments(self, exchange: ExchangeBytes, size: int) -> dict[int, bytes]:
        """Sends the bytes of chunks that begin on other ranks, of `size` ranks; returns what has come of
        others for chunks that begin here, by where the chunk begins.

        Collective.
        """
        to_send: list[list[memoryview]] = [[] for _ in range(size)]
        due: dict[int, list[Fragment]] = {}
        for fragment in self._layout.fragments:
            if fragment.sender == self._rank:
                number = bisect_right(self._begins, fragment.begin) - 1
                to_send[fragment.owner].append(self._view_bytes(number, fragment.begin, fragment.end))
            if fragment.owner == self._rank:
                due.setdefault(fragment.sender, []).append(fragment)
        received = exchange([b"".join(one) for one in to_send])
        arrived: list[tuple[int, bytes]] = []
        for sender, fragments in due.items():
            at = 0
            for fragment in fragments:
                end = at + fragment.end - fragment.begin
                arrived.append((fragment.begin, received[sender][at:end]))
                at = end
        rests: dict[int, bytes] = {}
        for begin, data in sorted(arrived):
            number = bisect_right(self._begins, begin) - 1
            chunk = _last_chunk(self._spans[number])
            rests[chunk] = rests.get(chunk, b"") + data
        return rests

    def write_rows(self, path: Path, rests: dict[int, bytes], *, synced: bool = False) -> list[SpanDigests]:
        """Writes the rows to their places in the file, which is there; returns the digests of each span.

        `rests`: see `exchange_fragments`. `synced`: other hosts write to the file too, on a file system that
        may be NFS. Then each write goes to the server at once, with these very bytes: with O_DSYNC alone an
        NFS client never sends the rest of a page from its cache, which would undo what another host has
        written there. Raises OSError.
        """
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_DSYNC if synced else 0))
        try:
            return [self._write_span(file, number, rests) for number in range(len(self._spans))]
        finally:
            os.close(file)

    def _write_span(self, file: int, number: int, rests: dict[int, bytes]) -> SpanDigests:
        span = self._spans[number]
        at, end = span.begin, min(span.first_chunk, span.end)
        pieces: list[bytes] = []
        while at < span.end:
            self._write_bytes(file, number, at, end)
            head = end - at if at < span.first_chunk else 0
            pieces += digest_pieces(self._view_bytes(number, at, end), head)
            at, end = end, min(end + PIECE_BYTES, span.end)
        part = xxhash.xxh3_128_digest(b"".join(pieces))
        chunks = pieces[len(pieces) - span.num_chunks :]
        if chunks and (rest := rests.get(chunk := _last_chunk(span))):
            chunks[-1] = xxhash.xxh3_128_digest(b"".join((self._view_bytes(number, chunk, span.end), rest)))
        return SpanDigests(b"".join(chunks), part)

    def _write_bytes(self, file: int, number: int, begin: int, end: int) -> None:
        left, at = self._view_bytes(number, begin, end), self._layout.room + begin
        while left:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
            self.num_done += written


def _last_chunk(span: FileSpan) -> int:
    """Returns where the last chunk begins that begins in a span."""
    return span.first_chunk + (span.num_chunks - 1) * CHUNK_BYTES
