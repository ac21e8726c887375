"""The buffer's part of the parity probe: it keeps an engine's samples until the learner asks for them.

    publish ─▶ an engine loads the version and samples sequences of many lengths ─▶ SubmitParityProbe
                                                                                             │
               the learner compares, before the next step ◀─ RequestParityProbe ◀─ kept here ◀┘

The learner's first version is probed, and some later ones. A probe trains nothing: it is in no lease, in no
journal and not on the ledger.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from buffers import messages as m
from buffers.files import replace_file
from buffers.group_checks import ExpectedGroup, GroupFacts, check_groups
from buffers.refusal import Refusal
from buffers.trajectory import MalformedGroup
from buffers.vocabulary import read_vocabulary
from configs.schema import Config

PROBE_FILE = ".probe"
"""Name of a file beside the journal."""
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


class KeptProbe(msgspec.Struct, array_like=True):
    """The contents of the file of a probe."""

    manifest_locator: str = ""
    """Where the manifest of the version is that has sampled it; empty where there is none."""
    rows: bytes = b""
    """Arrow frame."""


class ParityProbes:
    """Keeps the first probe of the newest version, in a file too: an engine samples it once, and another life
    of the buffer must have it."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder` is where the file is."""
        self._lengths, self._vocabulary = probe_lengths(config), read_vocabulary(Path(config.model.path))
        self._path = folder / PROBE_FILE
        data = self._path.read_bytes() if self._path.exists() else b""
        self._kept = msgspec.msgpack.decode(data, type=KeptProbe) if data else KeptProbe()

    def take_probe(
        self,
        request: m.SubmitParityProbe,
        payload: Sequence[memoryview],
        version: int,
        manifest_locator: str,
    ) -> None:
        """Keeps a probe of the newest version, `version`, whose manifest is at `manifest_locator`.

        A probe of another version comes too late and is passed over. Raises Refusal for a malformed one, and
        DiskFull.
        """
        if len(payload) != 1:
            raise Refusal("malformed probe", f"a probe must carry one Arrow frame, got {len(payload)}")
        if request.manifest_locator != manifest_locator or self.find_rows(manifest_locator) is not None:
            return
        try:
            (facts,) = check_groups(
                payload[0],
                [ExpectedGroup(0, version, 0, len(self._lengths))],
                num_samples=len(self._lengths),
                newest_version=version,
                longest=max(self._lengths),
                vocabulary=self._vocabulary,
            ).verdicts
        except MalformedGroup as error:
            facts = error
        if not isinstance(facts, GroupFacts):
            raise Refusal("malformed probe", f"from {request.generator}: {facts}")
        if facts.oldest_version != version:
            raise Refusal(
                "malformed probe",
                f"from {request.generator}: all tokens must be of version {version}, "
                f"got {facts.oldest_version}",
            )
        self._kept = KeptProbe(manifest_locator, bytes(payload[0]))
        replace_file(self._path, msgspec.msgpack.encode(self._kept), sync=False)

    def find_rows(self, manifest_locator: str) -> bytes | None:
        """Returns the Arrow frame of the probe of a version; None while there is none."""
        is_there = self._kept.rows and self._kept.manifest_locator == manifest_locator
        return self._kept.rows if is_there else None
