"""Finds the files of a source: files, folders, globs, and folders that `datasets` has written.

A folder with splits gives one of them: `FOLDER@SPLIT`, or else `train` for `data.train` and `test` for
`data.eval`. Splits are subfolders of a `DatasetDict`, or files whose names begin with `train`, `test` or
`validation`, as the hub has them.
"""

import glob
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from configs.data import HUB
from generators.data.found_file import DEFAULT_SPLITS, FileKind, FilesMissing, FoundFile
from generators.data.hub import fetch_files

ENDINGS = {
    ".jsonl": FileKind.lines,
    ".jsonl.gz": FileKind.lines,
    ".jsonl.zst": FileKind.lines,
    ".parquet": FileKind.parquet,
    ".arrow": FileKind.arrow,
}
SPLIT_NAME = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")


def find_files(key: str, paths: Sequence[str], role: str) -> list[FoundFile]:
    """Returns the files of paths on this host, in order. `role` is train or eval.

    Raises ValueError that names `key` for a path that leads to no file.
    """
    found = []
    for path in paths:
        try:
            found += _find_path(key, path, role)
        except OSError as error:
            raise ValueError(f"{key} must be a path that can be read, got {path[:300]!r}: {error}") from error
    return found


def _find_path(key: str, path: str, role: str) -> list[FoundFile]:
    if path.startswith(HUB):
        return fetch_files(key, path, role)
    place, split = Path(path), None
    if not place.exists() and "@" in place.name:
        name, _, split = place.name.rpartition("@")
        place = place.with_name(name)
    if place.is_dir():
        return _find_in_folder(key, place, split, role)
    if place.is_file():
        if split is not None:
            raise ValueError(f"{key} must name a split of a folder only, got {path!r}")
        return [FoundFile(place, _find_kind(key, place))]
    if glob.has_magic(path):
        found = sorted(Path(one) for one in glob.glob(path, recursive=True) if Path(one).is_file())
        if found:
            return [FoundFile(one, _find_kind(key, one)) for one in found]
        raise FilesMissing(f"{key} must be a pattern that files match, got {path!r}, which none does")
    raise FilesMissing(f"{key} must be a file, a folder or a pattern that is there, got {path!r}")


def _find_kind(key: str, path: Path) -> FileKind:
    kind = read_kind(path)
    if kind is None:
        raise ValueError(f"{key} must have files {', '.join(ENDINGS)}, got {str(path)!r}")
    return kind


def read_kind(path: Path) -> FileKind | None:
    return next((kind for ending, kind in ENDINGS.items() if path.name.endswith(ending)), None)


def _find_in_folder(key: str, folder: Path, split: str | None, role: str) -> list[FoundFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = {name: folder / name for name in _read_json(key, folder / "dataset_dict.json")["splits"]}
        chosen = _choose_split(key, folder, splits, split, role)
        return _find_in_folder(key, splits[chosen], None, role)
    if (folder / "state.json").is_file():
        files = [folder / one["filename"] for one in _read_json(key, folder / "state.json")["_data_files"]]
    else:
        files = sorted(
            path
            for path in folder.rglob("*")
            if read_kind(path) is not None and not _is_hidden(path.relative_to(folder)) and path.is_file()
        )
        by_split: dict[str, list[Path]] = {}
        for path in files:
            begins = SPLIT_NAME.match(path.name) or SPLIT_NAME.match(path.relative_to(folder).parent.name)
            by_split.setdefault(begins[1] if begins else "", []).append(path)
        if split is None and len(by_split) > 1 and (others := by_split.get("")):
            named = ", ".join(f"{folder}@{name}" for name in by_split if name)
            raise ValueError(
                f"{key} must be a folder whose files all begin with the name of a split, or none of them (or "
                f"else {named}, or a pattern), got {folder}, where {others[0].name} does not"
            )
        if split is not None or len(by_split) > 1:
            files = by_split[_choose_split(key, folder, by_split, split, role)]
    if not files:
        raise FilesMissing(f"{key} must be a folder with files {', '.join(ENDINGS)}, got {str(folder)!r}")
    return [FoundFile(path, _find_kind(key, path)) for path in files]


def _is_hidden(path: Path) -> bool:
    """True for the copies that editors keep, such as `.ipynb_checkpoints/rows-checkpoint.jsonl`."""
    return any(part.startswith(".") for part in path.parts)


def _choose_split(key: str, folder: Path, splits: Collection[str], split: str | None, role: str) -> str:
    chosen = split or DEFAULT_SPLITS[role]
    if chosen not in splits:
        names = ", ".join(name or "(no split)" for name in splits)
        raise ValueError(
            f"{key} must name a split of the folder ({folder}@SPLIT), got {chosen!r}, and the folder has: "
            f"{names}"
        )
    return chosen


def _read_json(key: str, path: Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{key} must have a readable {path.name}, got {path}: {error}") from error
    return dict(found)
