"""A file of rows on this host, and the kinds of such files."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

DEFAULT_SPLITS = {"train": "train", "eval": "test"}
"""The split of a folder that `data.train` and `data.eval` take where they name none."""


class FileKind(StrEnum):
    lines = "lines"
    """JSON lines, plain or compressed."""
    parquet = "parquet"
    arrow = "arrow"
    """A stream of Arrow record batches, as `datasets` writes them."""


class FilesMissing(ValueError):
    """A path leads to no file."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    path: Path
    kind: FileKind
