"""Files of rows for tests, and the arguments of the task `dataset` for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: Sequence[Any], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **options)
    return str(path)


def make_arguments(train: Any, *parts: dict[str, Any], held_out: Any = None, **data: Any) -> dict[str, Any]:
    """Returns the arguments of a dataset whose reward has these parts."""
    return {"data": {"train": train, "eval": held_out, **data}, "reward": {"parts": list(parts)}}
