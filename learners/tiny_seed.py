"""The seed of the tiny model's initial weights, which the environment may set."""

import os

SEED_VARIABLE = "SLIPSTREAM_TINY_SEED"


def read_seed() -> int:
    """Returns the seed of the initial weights: the environment's SLIPSTREAM_TINY_SEED, or 0.

    Raises ValueError for anything but a whole number below 2^32.
    """
    given = os.environ.get(SEED_VARIABLE, "0")
    if not (given.isascii() and given.isdigit()) or int(given) >= 2**32:
        raise ValueError(f"{SEED_VARIABLE} must be a whole number from 0 to {2**32 - 1}, got {given!r}")
    return int(given)
