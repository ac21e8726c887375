"""Prepares the rows of `data`: finds the files, streams each into the cache once, and selects the rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from generators.data.cache import digest_value, find_cache, find_digest, make_folder
from generators.data.file_search import find_files
from generators.data.found_file import FoundFile
from generators.data.row_files import read_rows
from generators.data.row_store import write_store
from generators.data.selection import LengthLimit, Report, select_rows
from generators.data.sources import RowSource, read_sources

FORMAT = 1
"""Number of the form that rows have in the cache."""
REPORTED_ROWS = 1024


def report_nothing(what: str, done: int, total: int | None) -> None:
    pass


def prepare_data(
    data: Mapping[str, Any],
    limit: LengthLimit | None = None,
    report: Report = report_nothing,
    stores: Mapping[tuple[str, str], str] | None = None,
) -> list[dict[str, Any]]:
    """Prepares what `data` names. Returns a record for each source of files, for `data.prepared`.

    Without a limit no prompt is too long. `stores` are folders of the cache that hold the rows, by split and
    source: then no file is read. Raises ValueError that names the key, or the file and the row.
    """
    records = []
    for split in ("train", "eval"):
        holds_out = split == "train" and data.get("eval") is None
        for source in read_sources(data, split):
            if source.path:
                store = None if stores is None else stores[split, source.name]
                record = _prepare_source(split, source, limit, holds_out, report, store)
                _check_kept(f"data.{split}", source, record, limit, holds_out)
                records.append(record)
    return records


def _prepare_source(
    split: str,
    source: RowSource,
    limit: LengthLimit | None,
    holds_out: bool,
    report: Report,
    store_name: str | None,
) -> dict[str, Any]:
    if store_name is None:
        files = find_files(f"data.{split}", source.path, split)
        store, counts = _cache_rows(f"data.{split}", source, files, report)
        places = [(str(file.path), count) for file, count in zip(files, counts, strict=True)]
    else:
        store, places = find_cache() / store_name, []

    def locate(index: int) -> str:
        for path, count in places:
            if index < count:
                return f"{path}, row {index}"
            index -= count
        return f"{store}, row {index}"

    kept, meta = select_rows(source, store, limit, holds_out=holds_out, locate=locate, report=report)
    return {"split": split, "name": source.name, "store": store.name, "kept": kept.name, **meta}


def _cache_rows(
    key: str, source: RowSource, files: list[FoundFile], report: Report
) -> tuple[Path, list[int]]:
    """Returns the folder of the cache that holds the rows of these files, one behind the other, and how many
    each file has."""
    digests = [find_digest(file) for file in files]

    def write(folder: Path) -> dict[str, Any]:
        counts: list[int] = []

        def read_all() -> Iterator[bytes]:
            for file in files:
                counts.append(0)
                for text in read_rows(file):
                    if counts[-1] % REPORTED_ROWS == 0:
                        report(f"{source.name}: reading {file.path.name}", sum(counts), None)
                    counts[-1] += 1
                    yield text

        if not write_store(folder, read_all()):
            raise ValueError(f"{key} must have a row, got {', '.join(source.path)}, which has none")
        if [find_digest(file) for file in files] != digests:
            raise ValueError(f"{key} must stay as it is while it is read, got another content meanwhile")
        return {"counts": counts}

    folder, meta = make_folder(name_store(digests), write)
    return folder, meta["counts"]


def name_store(digests: Sequence[str]) -> str:
    """Returns the name of the folder of the cache that holds the rows of files with these digests."""
    return f"rows-{digest_value(FORMAT, digests)}"


def _check_kept(
    key: str, source: RowSource, record: Mapping[str, Any], limit: LengthLimit | None, holds_out: bool
) -> None:
    """Raises ValueError where no row is left for a split."""
    num_left = record["num_taken"] + record["num_held_out"]
    if not num_left:
        assert limit is not None, record
        raise ValueError(
            f"{key} must have a prompt of at most {limit.tokens} tokens (data.max_prompt_tokens, or "
            f"generators.max_model_len less sampling.max_tokens), got {record['num_rows']} rows of source "
            f"{source.name!r} that are all longer"
        )
    if holds_out and not min(record["num_taken"], record["num_held_out"]):
        raise ValueError(
            f"{key} must have two prompts or more where data.eval is null, got one in {num_left} rows of "
            f"source {source.name!r}"
        )


def count_repeats(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns how many training rows have the prompt of an earlier one, and how many rows of `data.eval` have
    the prompt of a training row."""
    train = [_load_hashes(record) for record in records if record["split"] == "train"]
    held_out = [_load_hashes(record) for record in records if record["split"] == "eval"]
    known = np.unique(np.concatenate([*train, np.zeros(0, np.uint64)]))
    num_repeated = sum(map(len, train)) - len(known)
    return num_repeated, sum(int(np.isin(hashes, known).sum()) for hashes in held_out)


def _load_hashes(record: Mapping[str, Any]) -> np.ndarray:
    """Returns the hashes of the prompts that a run takes of a source."""
    folder = find_cache() / record["kept"]
    hashes: np.ndarray = np.load(folder / "hashes.npy", mmap_mode="r")[np.load(folder / "taken.npy")]
    return hashes
