"""The order of prompts: which source, and which row of it, a group asks.

It is a function of the seed and the group's number alone, so it survives restarts and passes over no prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import numpy as np
import xxhash

from buffers.permutations import LARGEST_TABLE, Permutation, make_permutation
from buffers.terms import SourceTerms

LARGEST_BLOCK = 1_000_000
"""Groups of a block at most, and so the largest ratio of all weights to one."""
LARGEST_MIXED_TABLE = 1 << 16
"""Rows up to which the epochs of one source among several are tables (`permutations.LARGEST_TABLE`)."""
SHUFFLE = 1
"""Begins the key of a block's shuffle, so that it differs from the keys of epochs."""


def encode_index(source: int, row: int, num_sources: int) -> int:
    """Returns the index by which a lease names a row of a source."""
    return row * num_sources + source


def decode_index(index: int, num_sources: int) -> tuple[int, int]:
    """Returns (source, row) of the index of a prompt."""
    row, source = divmod(index, num_sources)
    return source, row


class PromptOrder:
    """Gives group g prompt `prompt_index(g)`.

    Several sources share the groups by their weights w (their sum is 1). Groups come in blocks of B, the
    least whole number with B w ≥ 1 for each source. After b blocks the sources up to s have had
    ⌊b B (w_0 + … + w_s)⌋ groups together, in exact fractions, so each has had fewer than one group more or
    less than b B w. Within its block the groups are shuffled.

    A source without end (`size` None) is walked through in order: 0, 1, 2, … A source of N prompts is walked
    through in epochs of N groups, each in an order of its own. Every prompt is leased once an epoch, whatever
    fails or is rejected.
    """

    def __init__(self, sources: Sequence[SourceTerms], seed: int) -> None:
        """Raises ValueError for a source that gets less than one group in `LARGEST_BLOCK`."""
        self.sources, self._seed = tuple(sources), seed
        weights = [Fraction(str(float(one.weight))) for one in sources]
        total = sum(weights)
        self._cumulative = [sum(weights[: place + 1], Fraction(0)) / total for place in range(len(weights))]
        for source, weight in zip(sources, weights, strict=True):
            if weight * LARGEST_BLOCK < total:
                raise ValueError(
                    f"the weight of a source must be at least 1/{LARGEST_BLOCK} of the sum of all, got "
                    f"{source.weight:g} of {float(total):g} for {source.name!r}"
                )
        self._block_size = ceil(total / min(weights))
        self._blocks: OrderedDict[int, tuple[np.ndarray, np.ndarray, list[int]]] = OrderedDict()
        """By number of the newest blocks: the source of each group, its place among the block's groups of
        that source, and the groups that each source has had before the block."""
        self._epochs: list[OrderedDict[int, Permutation]] = [OrderedDict() for _ in sources]
        """By source: orders of the epochs under way."""

    def prompt_index(self, group: int) -> int:
        source, ordinal = self._locate_group(group)
        return encode_index(source, self.find_row(source, ordinal), len(self.sources))

    def find_source(self, group: int) -> int:
        """Returns the source whose turn it is."""
        return self._locate_group(group)[0]

    def find_row(self, source: int, ordinal: int) -> int:
        """Returns the row that a source's group number `ordinal`, counted from 0, asks."""
        size = self.sources[source].size
        if size is None:
            return ordinal
        epoch, place = divmod(ordinal, size)
        orders = self._epochs[source]
        if epoch not in orders:
            if len(orders) > 1:  # groups of two epochs may be under way at once
                orders.popitem(last=False)
            orders[epoch] = self._make_epoch(source, size, epoch)
        return orders[epoch](place)

    def _make_epoch(self, source: int, size: int, epoch: int) -> Permutation:
        if len(self.sources) == 1:
            return make_permutation(size, [self._seed, epoch], LARGEST_TABLE)
        # By name: a source's own order does not depend on its neighbors.
        name = xxhash.xxh3_64_intdigest(self.sources[source].name.encode())
        return make_permutation(size, [self._seed, epoch, name], LARGEST_MIXED_TABLE)

    def _locate_group(self, group: int) -> tuple[int, int]:
        """Returns the source of a group, and how many groups the source has had before."""
        if len(self.sources) == 1:
            return 0, group
        number, place = divmod(group, self._block_size)
        if number not in self._blocks:
            if len(self._blocks) > 1:
                self._blocks.popitem(last=False)
            self._blocks[number] = self._make_block(number)
        sources, places, before = self._blocks[number]
        source = int(sources[place])
        return source, before[source] + int(places[place])

    def _make_block(self, number: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        before, after = (self._count_groups(n * self._block_size) for n in (number, number + 1))
        counts = [end - start for start, end in zip(before, after, strict=True)]
        # 4 bytes a group each, of which a block may have a million.
        sources = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        np.random.default_rng([self._seed, number, SHUFFLE]).shuffle(sources)
        places = np.empty_like(sources)
        in_order = np.argsort(sources, kind="stable")
        places[in_order] = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        return sources, places, before

    def _count_groups(self, num_groups: int) -> list[int]:
        """Returns how many of the first groups, a multiple of the block, each source gets."""
        ends = [num_groups * share.numerator // share.denominator for share in self._cumulative]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]
