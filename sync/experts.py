"""Where the experts of a mixture lie in a vLLM model.

vLLM keeps all experts of a layer in two parameters: `w13` [E, 2I, H], each expert's gate above its
up-projection, and `w2` [E, H, I]. On a GPU (Triton's kernel) they are as published. vLLM's CPU kernels pad I
and keep each expert's elements in another order, once the model is built, so an update in the published order
would leave garbage. `find_element_places` finds that order. Every published tensor is written to its
elements' places and digested from there, so that the digest covers what the kernel reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sync.digest import tensor_digest
from sync.rank_slices import RankSlice

Pack = Callable[[Tensor], Tensor]
"""Maps [1, rows, columns] to the same elements in the order of a kernel."""
WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """The place of one published tensor in one expert's matrix."""

    parameter: str
    """Name of the parameter, [experts, rows, columns]."""
    expert: int
    shape: tuple[int, ...]
    """Shape of what is held."""
    published_shape: tuple[int, ...]
    """Shape that must be published."""
    held: RankSlice | None
    """This rank's part of the published tensor; None: all of it."""
    first: int
    """First row of the matrix, where the matrix is as published."""
    elements: Tensor | None
    """Flat positions [numel] in the expert's matrix, in the published order; None: rows from `first` on."""

    def read_tensor(self, parameter: Tensor) -> Tensor:
        """Returns what the engine holds, in the published order."""
        matrix = parameter[self.expert]
        if self.elements is None:
            return matrix[self.first : self.first + self.shape[0], : self.shape[1]]
        return matrix.view(-1)[self.elements].view(self.shape)

    def write_tensor(self, parameter: Tensor, source: Tensor) -> str:
        """Writes a published tensor to its place; returns the digest of what is there afterwards."""
        if self.elements is None:
            self.read_tensor(parameter).copy_(source)
        else:
            parameter[self.expert].view(-1)[self.elements] = source.reshape(-1)
        return tensor_digest(self.read_tensor(parameter))


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer of a vLLM model."""

    prefix: str
    """Name of the module that holds `w13_weight` and `w2_weight`."""
    published: str
    """Prefix of the published tensors, before the expert's number."""
    gate: str
    up: str
    down: str
    num_experts: int
    hidden: int
    intermediate: int
    """Size of this rank's part, before any padding."""
    dtype: torch.dtype
    w13: tuple[int, int]
    """Rows and columns of an expert's matrix in `w13_weight`, padded."""
    w2: tuple[int, int]
    pack: Pack | None
    """Puts a matrix into the order of the kernel that reads it; None: the order is the published one."""
    rank: int = 0
    """The rank, and the number of ranks that divide `intermediate`."""
    num_ranks: int = 1

    def list_places(
        self, cache: dict[tuple[int, int, torch.dtype], Tensor]
    ) -> Iterator[tuple[str, ExpertPlace]]:
        """Yields each published tensor's name and place. `cache`: the order of elements by shape, shared by
        all layers."""
        up_proj, down_proj = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        parts = (
            (self.gate, "w13_weight", self.w13, up_proj, 0, 0),
            (self.up, "w13_weight", self.w13, up_proj, 0, self.w13[0] // 2),
            (self.down, "w2_weight", self.w2, down_proj, 1, 0),
        )
        for leaf, parameter, matrix, shape, dim, first in parts:
            published, held = shape, None
            if self.num_ranks > 1:
                total, begin = self.intermediate * self.num_ranks, self.intermediate * self.rank
                published = (self.hidden, total) if dim else (total, self.hidden)
                held = RankSlice(dim, total, ((begin, self.intermediate),))
            elements = None
            if self.pack is not None:
                key = (*matrix, self.dtype)
                if key not in cache:
                    cache[key] = find_element_places(*matrix, self.dtype, self.pack)
                elements = cache[key][first : first + shape[0], : shape[1]].reshape(-1)
            for expert in range(self.num_experts):
                name = f"{self.published}.{expert}.{leaf}.weight"
                matrices = f"{self.prefix}.{parameter}"
                yield name, ExpertPlace(matrices, expert, shape, published, held, first, elements)


def find_element_places(rows: int, columns: int, dtype: torch.dtype, pack: Pack) -> Tensor:
    """Returns where each element of a matrix lies after `pack`: flat positions, [rows, columns] int64.

    It packs the elements' numbers instead of weights. A number that does not fit into an element is packed in
    several words of the element's size, one after the other. Raises RuntimeError unless `pack` moves every
    element to a place of its own and changes none.
    """
    bits, word = 8 * dtype.itemsize, WORD_TYPES[dtype.itemsize]
    numbers = torch.arange(rows * columns)
    found = torch.zeros_like(numbers)
    for shift in range(0, 32, bits):
        words = ((numbers >> shift) & ((1 << bits) - 1)).to(word)
        packed = pack(words.view(dtype).view(1, rows, columns)).contiguous().view(-1).view(word)
        found |= (packed.long() & ((1 << bits) - 1)) << shift
    if not torch.equal(found.sort().values, numbers):
        raise RuntimeError(
            f"vLLM must keep experts as a new order of their elements, got another form for {dtype}"
        )
    places = torch.empty_like(numbers)
    places[found] = numbers
    return places.view(rows, columns)
