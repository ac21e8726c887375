"""The sequences of the parity probe: how long they are, and which versions are probed."""

from configs.schema import Config

NUM_LENGTHS = 8
MAX_SAMPLED = 32
"""Tokens that an engine samples at the end of a sequence, each in a step of its own."""


def probe_lengths(config: Config) -> list[int]:
    """Returns the number of tokens of each sequence of a probe: the longest that an engine takes, half of
    that, and so on.

    Windows, caches and positions that go wrong do so beyond some length. There are at least as many sequences
    as the learner's batch has shares, because each share computes one.
    """
    count = max(NUM_LENGTHS, config.learner.num_shares)
    return [max(2, config.generators.max_model_len >> min(place, NUM_LENGTHS - 1)) for place in range(count)]


def count_sampled(length: int) -> int:
    """Returns how many tokens at the end of a sequence are sampled. The others are drawn from a seed."""
    return min(MAX_SAMPLED, length // 2)


def is_probed(config: Config, version: int) -> bool:
    """True for a version that is probed also when it is not the first of a life of the learner."""
    every = config.learner.parity_every
    return every > 0 and config.max_versions > 0 and 0 < version < config.run.steps and version % every == 0
