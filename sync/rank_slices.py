"""The part of a published tensor that one rank of a tensor-parallel engine holds.

A rank takes its parts out of the verified file, and digests them twice: as they are in the file, and as they
arrive. Nobody publishes digests of parts, so the first stands for the published one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sync.digest import StreamDigest, raw_bytes

CHUNK_BYTES = 1 << 19
"""Bytes that are copied and digested at a time: what a core's own cache holds."""


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Some rows, or some columns, of a published tensor."""

    dim: int
    """0: rows. 1: columns."""
    total: int
    """Size of the published tensor along `dim`."""
    spans: tuple[tuple[int, int], ...]
    """Begin and size along `dim` of each piece. Several pieces are rows; they lie one below the other in the
    engine's parameter."""
    first: int = 0
    """First row in the parameter."""

    def fits_shape(self, shape: Sequence[int]) -> bool:
        """True for the shape of a tensor that may be cut."""
        return len(shape) > self.dim and shape[self.dim] == self.total

    def cut_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of what the rank holds."""
        held = list(shape)
        held[self.dim] = sum(size for _, size in self.spans)
        return tuple(held)

    def cut_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Returns the pieces, as views."""
        return [tensor.narrow(self.dim, begin, size) for begin, size in self.spans]


def join_slices(slices: Sequence[RankSlice]) -> RankSlice:
    """Returns the slice of a tensor that was published as several, one below the other, in one."""
    spans: list[tuple[int, int]] = []
    total = 0
    for one in slices:
        spans += [(total + begin, size) for begin, size in one.spans]
        total += one.total
    return RankSlice(0, total, tuple(spans), slices[0].first)


def digest_pieces(pieces: Sequence[Tensor]) -> str:
    """Returns the digest of the pieces, one below the other. Only a few rows are copied at a time."""
    digest = StreamDigest()
    for piece in pieces:
        for rows in split_rows(piece):
            digest.update(raw_bytes(rows))
    return digest.hexdigest()


def copy_pieces(pieces: Sequence[Tensor], place: Tensor) -> tuple[str, str]:
    """Copies the pieces to a place on the CPU, one below the other. Returns the digests of the pieces and of
    what has arrived."""
    published, held = StreamDigest(), StreamDigest()
    row = 0
    for piece in pieces:
        into = place[row : row + len(piece)] if place.dim() else place
        for source, copied in zip(split_rows(piece), split_rows(into), strict=True):
            copied.copy_(source)
            published.update(raw_bytes(source))
            held.update(raw_bytes(copied))
        row += len(piece) if place.dim() else 0
    return published.hexdigest(), held.hexdigest()


def split_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yields views of a few whole rows each."""
    if not tensor.dim() or not tensor.numel():
        yield tensor
        return
    row_bytes = tensor.itemsize * tensor[0].numel()
    yield from tensor.split(max(1, CHUNK_BYTES // row_bytes))
