"""The rows of a run: prepared when it begins, the same when it is resumed, and there on every host."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from configs.schema import Config
from generators.data.cache import find_cache, find_digest, read_meta
from generators.data.file_search import find_files
from generators.data.found_file import FilesMissing
from generators.data.prepare import name_store, prepare_data
from generators.data.selection import LengthLimit, Report
from generators.data.sources import DEFAULTS, read_sources

log = logging.getLogger("slipstream.data")

SAY_S = 10.0
"""Seconds between two lines about work that takes long."""
FileLists = dict[str, list[list[Any]]]
"""By split and source (`train/math`), for each file its path, its bytes and their digest."""


def make_limit(config: Config) -> LengthLimit:
    """Returns the longest prompt of a run. Importing the tokenizer takes seconds."""
    from transformers import AutoTokenizer

    from generators.rendering.prompts import PromptEncoder

    tokens = config.data.max_prompt_tokens or config.generators.max_model_len - config.sampling.max_tokens
    return LengthLimit(PromptEncoder(AutoTokenizer.from_pretrained(config.model.path)), tokens)


def list_files(data: Mapping[str, Any]) -> FileLists:
    """Returns the files that `data` names, as they are now. Raises ValueError for a path without files."""
    return {
        f"{split}/{source.name}": [
            [str(file.path), file.path.stat().st_size, find_digest(file)]
            for file in find_files(f"data.{split}", source.path, split)
        ]
        for split in ("train", "eval")
        for source in read_sources(data, split)
        if source.path
    }


def list_prepared_files(data: Mapping[str, Any]) -> FileLists:
    """Returns the files that the prepared rows of `data` come from. Raises ValueError where they have changed
    since they were read."""
    found = list_files(data)
    for record in data["prepared"]:
        files = found[f"{record['split']}/{record['name']}"]
        if name_store([digest for _, _, digest in files]) != record["store"]:
            raise ValueError(
                f"data.{record['split']} must stay as it is until the run has begun, got another content in "
                f"{', '.join(path for path, _, _ in files)}"
            )
    return found


def resume_data(
    config: Config, began: Mapping[str, Any], before: FileLists, report: Report
) -> list[dict[str, Any]]:
    """Returns the records of a resumed run's rows, which are those that it began with. `began` is the section
    `data` that it has had so far, `before` its files.

    Files that have moved are found where `data.train` says. Where they are gone, the cache serves as long as
    it has their rows. Raises ValueError that names a file that has changed or is lost, the key that makes
    other prompts of the rows, or the source that would give other rows.
    """
    data, recorded = asdict(config.data), config.data.prepared
    _check_sources(config, data)
    _check_names(recorded, data)
    _check_shapes(began, data)
    stores = None
    try:
        now = list_files(data)
    except FilesMissing as error:
        stores = {(record["split"], record["name"]): record["store"] for record in recorded}
        if any(read_meta(find_cache() / store) is None for store in stores.values()):
            raise ValueError(
                f"{error}, and {find_cache()} has lost the rows that the run began with"
            ) from error
        log.warning("%s; the run goes on with the rows in %s", error, find_cache())
    else:
        for name, files in now.items():
            if problem := _find_change(before.get(name, []), files):
                raise ValueError(
                    f"the files of a resumed run must be as they were when it began, got {problem}"
                )
    records = prepare_data(data, make_limit(config), report, stores)
    check_records(recorded, records, "in a resumed run (its order of prompts is made so)")
    return records


def _check_names(recorded: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> None:
    """Raises ValueError where the sources of files are not those of the records."""
    names = [f"{record['split']}/{record['name']}" for record in recorded]
    now = [
        f"{split}/{source.name}"
        for split in ("train", "eval")
        for source in read_sources(data, split)
        if source.path
    ]
    if sorted(now) != sorted(names):
        raise ValueError(
            f"data.train and data.eval must name the sources that the run began with ({', '.join(names)}), "
            f"got {', '.join(now)}"
        )


def _check_shapes(began: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raises ValueError where a source would make other prompts or answers of its rows, or is of another task
    or level."""
    for split in ("train", "eval"):
        before = {source.name: source for source in read_sources(began, split)}
        for source in read_sources(data, split):
            for key in (*DEFAULTS, "task", "args", "level") if source.name in before else ():
                was, now = getattr(before[source.name], key), getattr(source, key)
                if was != now:
                    raise ValueError(
                        f"{'data.' if key in DEFAULTS else ''}{key} of the source {source.name!r} of "
                        f"data.{split} must stay {json.dumps(was)} in a resumed run (its prompts are made "
                        f"so), got {json.dumps(now)}"
                    )


def _check_sources(config: Config, data: Mapping[str, Any]) -> None:
    """Raises ValueError where the sources to train on are not those that the order of prompts is made of."""
    before = [(one["name"], float(one["weight"])) for one in config.task.sources]
    now = [(source.name, source.weight) for source in read_sources(data, "train")]
    if before and now != before:
        shown, got = (
            ", ".join(f"{name} with weight {weight:g}" for name, weight in sources)
            for sources in (before, now)
        )
        raise ValueError(
            f"data.train must name the sources that the run began with, in their order ({shown}), got {got}"
        )


def _find_change(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str | None:
    """Returns what has become of the first file that is not as it was; None where the contents are the same,
    wherever they lie."""
    if [digest for _, _, digest in before] == [digest for _, _, digest in now]:
        return None
    current = {path: (size, digest) for path, size, digest in now}
    for path, size, digest in before:
        if path not in current and digest not in {one for _, one in current.values()}:
            return f"{path}, which is gone"
        if path in current and current[path][1] != digest:
            return f"{path}, which has changed (from {size:,} to {current[path][0]:,} bytes)"
    added = [path for path, _, digest in now if digest not in {one for _, _, one in before}]
    return f"{added[0]}, which is new" if added else "them in another order"


def check_records(
    recorded: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], where: str
) -> None:
    """Raises ValueError that names the first source which does not give the recorded rows."""
    found = {(record["split"], record["name"]): record for record in records}
    for record in recorded:
        other = found[record["split"], record["name"]]
        if record["digest"] != other["digest"] or record["num_rows"] != other["num_rows"]:
            raise ValueError(
                f"data.{record['split']} and the limit to prompts (data.max_prompt_tokens, "
                "generators.max_model_len, sampling.max_tokens) must give the same rows of source "
                f"{record['name']!r} {where}, got {other['num_taken']:,} of {other['num_rows']:,} rows in "
                f"place of {record['num_taken']:,} of {record['num_rows']:,}"
            )


def bring_rows(config: Config) -> None:
    """Prepares the run's rows on this host where its cache lacks them.

    Raises ValueError where the files of this host give other rows than those of the run.
    """
    recorded = config.data.prepared
    if all(is_in_cache(record) for record in recorded):
        return
    records = prepare_data(asdict(config.data), make_limit(config), LogReport())
    check_records(recorded, records, "on every host")
    for record, other in zip(recorded, records, strict=True):
        if record["store"] != other["store"] or record["kept"] != other["kept"]:
            raise ValueError(
                f"data.{record['split']} must be the same files, and the model the same, on every host, got "
                f"others for source {record['name']!r} on this one"
            )


def name_folders(config: Config) -> list[str]:
    """Returns the names of the folders of the cache that hold the rows of a run and its evaluation sets."""
    records = [*config.data.prepared, *(row for one in config.eval.sets.values() for row in one.prepared)]
    return list(dict.fromkeys(record[part] for record in records for part in ("store", "kept")))


def is_in_cache(record: Mapping[str, Any]) -> bool:
    """True when the cache of this host holds the rows of a record."""
    return all(read_meta(find_cache() / record[part]) is not None for part in ("store", "kept"))


class LogReport:
    """Logs how far a long preparation has come."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            log.info("%s: %s", what, f"{done:,}" if total is None else f"{done:,} of {total:,}")
