"""The weights of a model's folder, as all ranks of an engine read them.

Each rank reads what it needs from its own host's files. Where a host lacks them, or holds another model, the
first rank reads for all: it sends every tensor to everybody, some rows at a time.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from learners.model_files import ModelFiles, StoredTensor
from learners.world import World

log = logging.getLogger("slipstream.learner")

BUCKET_BYTES = 64 << 20
"""Most bytes of a tensor that are read at a time."""


class FilesReport(msgspec.Struct, frozen=True):
    """Message of each rank to all: what it has found in the model's folder."""

    host: str
    fingerprint: str
    """See `ModelFiles.take_fingerprint`; empty where there is a problem."""
    problem: str = ""


class LoadReport(msgspec.Struct, frozen=True):
    """Message of each rank to all: how its part of the loading has ended."""

    host: str
    error: str = ""
    """Empty where it has ended well."""
    is_mendable: bool = False
    """True for an error that a user can mend: a ValueError."""


class ModelSource:
    """The tensors of one folder. Every method that says so is collective."""

    def __init__(
        self,
        folder: Path,
        world: World,
        on_progress: Callable[[], None] = lambda: None,
        *,
        everywhere: bool = False,
    ) -> None:
        """Opens the files. Collective.

        `world`: the engine's ranks, in a world whose collectives wait as long as files are read.
        `on_progress` is called now and then while the rank reads, or waits for others that do. `everywhere`:
        every host must have the files, the same ones.

        Raises ValueError, on all ranks, where the first rank has no files that can be read, or with
        `everywhere` another one has not.
        """
        self._world, self._files, self.on_progress = world, None, on_progress
        self.failure: Exception | None = None
        """First error of this rank's part of the loading."""
        problem = fingerprint = ""
        try:
            self._files = ModelFiles(folder)
            # One rank has nobody to agree with.
            fingerprint = self._files.take_fingerprint() if world.size > 1 else "its own"
        except ValueError as error:
            problem = str(error)
        own = FilesReport(os.uname().nodename, fingerprint, problem)
        reports = [
            msgspec.json.decode(one, type=FilesReport)
            for one in world.gather_messages(msgspec.json.encode(own))
        ]
        if reports[0].problem:
            raise ValueError(reports[0].problem)
        others = [report for report in reports if report.fingerprint != reports[0].fingerprint]
        if others and everywhere:
            raise ValueError(
                f"model.path must be the same model on every host of the learner's ranks, got {folder} on "
                f"{others[0].host} {_describe_difference(others[0])}"
            )
        self.is_sent = bool(others)
        """True where the first rank reads for all."""
        for host in {report.host: report for report in others}.values() if world.rank == 0 else ():
            log.warning(
                "%s on %s %s: the first rank sends the weights to all",
                folder,
                host.host,
                _describe_difference(host),
            )
        self.entries = self._share_entries() if self.is_sent else self.files.entries
        """The model's tensors by name."""

    @property
    def files(self) -> ModelFiles:
        """The files of this rank's host, where it has them."""
        assert self._files is not None, "this host lacks the files"
        return self._files

    def _share_entries(self) -> dict[str, StoredTensor]:
        own = msgspec.json.encode(self.files.entries) if self._world.rank == 0 else b""
        told = self._world.gather_messages(own)[0]
        return msgspec.json.decode(told, type=dict[str, StoredTensor])

    def read_rows(self, name: str, start: int, end: int) -> Tensor:
        """Returns some rows of a tensor, which may only be read. Collective where `is_sent`.

        An error of the files becomes `failure`, and the rows are then empty memory: a rank must not leave the
        others waiting.
        """
        self.on_progress()
        entry = self.entries[name]
        rows: Tensor | None = None
        if not self.is_sent or self._world.rank == 0:
            with self.note_failure():
                rows = self.files.read_slice(name, *([slice(start, end)] if entry.shape else []))
                rows = rows.contiguous() if self.is_sent else rows
        if rows is None:
            rows = entry.make_rows(end - start)
        if self.is_sent and rows.numel():
            self._world.broadcast_tensor(rows.view(-1).view(torch.uint8))
        return rows

    @contextmanager
    def note_failure(self) -> Iterator[None]:
        """Ends the context at an error, which `raise_failures` then raises."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error

    def raise_failures(self) -> None:
        """Raises on all ranks where one of them has failed: its own error there, elsewhere one of the same
        kind with its text. Collective."""
        failure = self.failure
        own = LoadReport(
            os.uname().nodename,
            "" if failure is None else f"{type(failure).__name__}: {failure}",
            isinstance(failure, ValueError),
        )
        told = self._world.gather_messages(msgspec.json.encode(own), self.on_progress)
        if failure is not None:
            raise failure
        for rank, one in enumerate(told):
            report = msgspec.json.decode(one, type=LoadReport)
            if report.error:
                kind = ValueError if report.is_mendable else RuntimeError
                raise kind(f"rank {rank} on {report.host} could not load the model: {report.error}")


def _describe_difference(report: FilesReport) -> str:
    return "holds another model" if report.fingerprint else f"cannot be read ({report.problem})"
