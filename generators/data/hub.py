"""Data sets of the Hugging Face hub, by the package `datasets`: `hf:NAME[:CONFIG][@SPLIT]`.

The package downloads a data set and writes it into files of its own cache, once. Those files are read as any
others, so nothing else here knows of the hub.
"""

import re
from pathlib import Path

import pyarrow as pa

from generators.data.found_file import DEFAULT_SPLITS, FileKind, FilesMissing, FoundFile
from generators.plain_values import describe_error


def fetch_files(key: str, path: str, role: str) -> list[FoundFile]:
    """Returns the files of a data set of the hub on this host. `role` is train or eval.

    Raises ValueError that names `key`: for a missing package, and for whatever the package says.
    """
    name, _, split = path.partition(":")[2].partition("@")
    name, _, config = name.partition(":")
    split = split or DEFAULT_SPLITS[role]
    if not name or not re.fullmatch(r"\w+", split):
        raise ValueError(f"{key} must read hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG@SPLIT, got {path!r}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{key} must name files where the package `datasets` is missing (pip install 'slipstream[hub]' "
            f"brings it), got {path!r}"
        ) from error
    try:
        loaded = load_dataset(name, config or None, split=split)
    # The package and the hub complain in many ways: no network, no such name, no such split, a key needed.
    except Exception as error:
        raise FilesMissing(
            f"{key} must name a data set that can be loaded, got {path!r}: {describe_error(error)}"
        ) from error
    files = [FoundFile(Path(one["filename"]), FileKind.arrow) for one in loaded.cache_files]
    if sum(map(_count_rows, files)) != len(loaded):
        raise ValueError(
            f"{key} must name a data set that `datasets` keeps in files as it is, got {path!r} (save it with "
            "`save_to_disk`, and name the folder)"
        )
    return files


def _count_rows(file: FoundFile) -> int:
    with pa.memory_map(str(file.path)) as opened, pa.ipc.open_stream(opened) as stream:
        return sum(batch.num_rows for batch in stream)
