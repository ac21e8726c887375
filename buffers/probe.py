"""The parity probe, between an engine and the learner: what has been sampled of a learner's first version, and of some later ones,
kept until it is asked for.

    publish ─▶ an engine takes the version up, and samples sequences of many lengths ─▶ SubmitProbe ─▶ kept here
                                          the learner compares, before the next step ◀─── NextProbe ◀──┘

A probe trains nothing: it is in no lease, in no journal and not on the ledger.
"""

from collections.abc import Sequence
from pathlib import Path

from buffers import messages as m
from buffers.group_checks import ExpectedGroup, GroupFacts, check_groups
from buffers.refusal import Refusal
from buffers.trajectory import MalformedGroup
from buffers.vocabulary import read_vocabulary
from configs.schema import Config

NUM_LENGTHS = 8
MAX_SAMPLED = 32
"""Tokens sampled at the end of a sequence, each in a step of the engine of its own."""


def probe_lengths(config: Config) -> list[int]:
    """Tokens of each sequence of a probe: the longest that an engine takes, half of that, and so on. Windows, caches and positions that
    go wrong do so beyond some length. As many sequences as the learner's batch has shares, or more: each share computes one."""
    count = max(NUM_LENGTHS, config.learner.num_shares)
    return [max(2, config.generators.max_model_len >> min(place, NUM_LENGTHS - 1)) for place in range(count)]


def num_sampled(length: int) -> int:
    """How many tokens at the end of a sequence are sampled; the others are drawn from a seed."""
    return min(MAX_SAMPLED, length // 2)


def is_probed(config: Config, version: int) -> bool:
    """Is this version probed wherever it stands in a life of the learner?"""
    every = config.learner.parity_every
    return every > 0 and config.max_versions > 0 and 0 < version < config.run.steps and version % every == 0


class Probes:
    """The first probe of the newest version."""

    def __init__(self, config: Config) -> None:
        self._lengths, self._vocabulary = probe_lengths(config), read_vocabulary(Path(config.model.path))
        self._weights, self._rows = "", b""

    def take(
        self, request: m.SubmitParityProbe, payload: Sequence[memoryview], version: int, weights: str
    ) -> None:
        """`weights`: where the manifest of `version`, the newest, is. A probe of another version comes too late, and is passed over.
        Raises Refusal for what is no probe."""
        if len(payload) != 1:
            raise Refusal("malformed probe", f"a probe must carry one Arrow frame, got {len(payload)}")
        if request.manifest_locator != weights or self.rows(weights) is not None:
            return
        try:
            (facts,) = check_groups(
                payload[0], [ExpectedGroup(0, version, 0)], num_samples=len(self._lengths), newest_version=version,
                longest=max(self._lengths), vocabulary=self._vocabulary,
            ).verdicts  # fmt: skip
        except MalformedGroup as error:
            facts = error
        if not isinstance(facts, GroupFacts):
            raise Refusal("malformed probe", f"from {request.generator}: {facts}")
        if facts.oldest_version != version:
            raise Refusal(
                "malformed probe",
                f"from {request.generator}: all tokens must be of version {version}, got {facts.oldest_version}",
            )
        self._weights, self._rows = weights, bytes(payload[0])

    def rows(self, weights: str) -> bytes | None:
        """The Arrow frame of the probe of these weights; None while there is none."""
        return self._rows if self._rows and self._weights == weights else None
