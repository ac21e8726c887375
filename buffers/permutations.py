"""Permutations of 0 .. N - 1 by a key: a table where N is small, a cipher where a table would be large."""

from collections.abc import Callable, Sequence
from math import isqrt

import numpy as np
import xxhash

LARGEST_TABLE = 1 << 22
"""Rows up to which a permutation is a table, of 4 bytes a row."""
NUM_ROUNDS = 8

Permutation = Callable[[int], int]
"""Maps a place to the number that stands there."""


def make_permutation(size: int, key: Sequence[int], largest_table: int = LARGEST_TABLE) -> Permutation:
    """Returns a permutation of 0 .. size - 1 that follows from the key (whole numbers of at least 0)."""
    if size > largest_table:
        return CipherPermutation(size, key)
    table = np.random.default_rng(list(key)).permutation(size).astype(np.uint32)
    return lambda place: int(table[place])


class CipherPermutation:
    """A permutation without a table: a Feistel network over a × a ≥ N (Black and Rogaway, 2002, "Ciphers with
    arbitrary finite domains"), walked until it comes back below N.

    a is the least whole number with a × a ≥ N, so fewer than 2 √N + 1 numbers lie outside, and a place needs
    a second walk with a chance below 2 / √N + 1 / N.
    """

    def __init__(self, size: int, key: Sequence[int]) -> None:
        self._size, self._side = size, isqrt(size - 1) + 1
        self._key = repr(tuple(key)).encode()

    def __call__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"place must be in 0..{self._size - 1}, got {place}")
        number = self._encipher(place)
        while number >= self._size:
            number = self._encipher(number)
        return number

    def _encipher(self, number: int) -> int:
        """Maps 0 .. a² - 1 onto itself: each round adds a hash of one half to the other, modulo a."""
        left, right = divmod(number, self._side)
        for turn in range(NUM_ROUNDS):
            hashed = xxhash.xxh3_64_intdigest(b"%s %d %d" % (self._key, turn, right))
            left, right = right, (left + hashed) % self._side
        return left * self._side + right
