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
from configs.parity_probe import probe_lengths
from configs.schema import Config

PROBE_FILE = ".probe"
"""Name of a file beside the journal."""


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
