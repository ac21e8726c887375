"""Announcements of versions to generators, as part of two kinds of answers."""

import dataclasses
import secrets
from pathlib import Path

import xxhash

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.files import replace_file
from configs.load import to_yaml
from configs.run import RunConfig
from configs.schema import Config
from configs.tracking import TrackingConfig

RUN_FILE = ".run"
"""Name of a file beside the journal: random characters that name the run in all its lives."""


def read_run_name(folder: Path) -> str:
    """Returns the random name of the run whose journal is in `folder`; empty where it has none yet."""
    path = folder / RUN_FILE
    return path.read_text() if path.exists() else ""


def name_run(folder: Path, config: Config) -> str:
    """Returns the name of the run whose journal is in `folder`, under what a generator needs to know of its
    configuration (`JoinedRun.run`). Raises DiskFull."""
    if not read_run_name(folder):
        replace_file(folder / RUN_FILE, secrets.token_hex(16).encode())
    # Whether it was resumed, for how many steps, and who is shown its figures, is no matter of a generator.
    told = dataclasses.replace(config, run=RunConfig(), tracking=TrackingConfig())
    return xxhash.xxh3_64_hexdigest(f"{read_run_name(folder)} {to_yaml(told)}".encode())


class Announcer:
    """Numbers the announcements, so that a generator knows which of two answers is the newer one.

    A version alone does not tell: after a rewind the newest version is lower than before.
    """

    def __init__(self, buffer: Buffer, run: str) -> None:
        """`run` names the run in every answer (`JoinedRun.run`)."""
        self._buffer, self.run = buffer, run
        # A later life of the buffer counts on from a higher number, because it begins later.
        self._number = int(1e9 * buffer.journal.began_at)
        self._evaluated: tuple[int, str] | None = None
        """The version under evaluation that was announced last."""

    def count_change(self) -> None:
        """Notes that a version was published, that the run was rewound, or that another version is
        evaluated."""
        self._number += 1

    def make_lease_grant(self, generator: str, leases: list[m.Lease]) -> m.LeaseGrant:
        version, manifest_locator = self._choose_version(generator)
        return m.LeaseGrant(
            leases=leases,
            version=version,
            manifest_locator=manifest_locator,
            announcement_number=self._number,
            ended=self._buffer.stopping is not None,
            run=self.run,
        )

    def make_standing(self, generator: str, revoked: list[int]) -> m.GeneratorStanding:
        version, manifest_locator = self._choose_version(generator)
        return m.GeneratorStanding(
            revoked=revoked,
            version=version,
            manifest_locator=manifest_locator,
            announcement_number=self._number,
            ended=self._buffer.stopping is not None,
            run=self.run,
            has_left=self._buffer.roles.has_left(generator),
        )

    def _choose_version(self, generator: str) -> tuple[int, str]:
        """Returns the version that a generator is to take up: the newest one. One that evaluates alone hears
        of the version under way, and of none (-1) between two evaluations."""
        progress, evaluated = self._buffer.progress, self._buffer.evaluations.version_under_way
        if evaluated != self._evaluated:
            self._evaluated = evaluated
            self.count_change()
        if generator not in self._buffer.roles.evaluators:
            return progress.version, progress.manifest_locator
        return (-1, "") if evaluated is None else evaluated
