"""docs/migrate.md names keys that exist, with the defaults that they have."""

import re
from collections.abc import Iterator
from enum import Enum

from omegaconf import OmegaConf
from pages import ROOT

from configs.eval import EvalSetConfig
from configs.load import FOLDER, list_defaults
from configs.schema import Config

PAGE = ROOT / "docs/migrate.md"
SET = "eval.sets.NAME."
SECTIONS = {field for field in Config.__dataclass_fields__ if "." not in field}


def list_rows() -> Iterator[tuple[str, str, str]]:
    """Yields (their setting, our cell, our default) of each row of the page's tables of settings."""
    is_settings = False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4:
            is_settings = False
        elif cells[2] == "Slipstream":
            is_settings = True
        elif is_settings and set(cells[0]) != {"-"}:
            yield cells[0], cells[2], cells[3]


def find_keys(text: str) -> list[tuple[str, str | None]]:
    """Returns the keys of ours within backticks, each with the value that it is given."""
    words = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+|\.NAME)*)(?:=([^`]*))?`", text)
    return [(key, value or None) for key, value in words if key.partition(".")[0] in SECTIONS]


def write_default(key: str) -> str:
    is_of_set = key.startswith(SET)
    value = getattr(EvalSetConfig(), key.removeprefix(SET)) if is_of_set else list_defaults()[key]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value)


def check_key(key: str, value: str | None) -> None:
    if key == "algo" and value is not None:
        assert (FOLDER / "algo" / f"{value}.yaml").exists(), value
        return
    if f"{key}.".startswith(SET):
        assert key.removeprefix(SET) in (*EvalSetConfig.__dataclass_fields__, SET[:-1]), key
        return
    assert key in list_defaults() or any(one.startswith(f"{key}.") for one in list_defaults()), key
    if value is not None:
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist([f"{key}={value}"]))


def test_every_key_that_the_page_names_exists() -> None:
    # Other systems' settings stand in the first two cells of a table, and in blocks of text.
    ours = re.sub(r"```text\n.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    ours = re.sub(r"^\|[^|\n]*\|[^|\n]*\|(?=[^|\n]*\|[^|\n]*\|$)", "", ours, flags=re.MULTILINE)
    found = find_keys(ours)
    assert len(found) > 100
    for key, value in found:
        check_key(key, value)


def test_the_tables_have_our_defaults() -> None:
    rows = list(list_rows())
    assert len(rows) > 100
    for theirs, ours, default in rows:
        keys = find_keys(ours)
        if not default:
            continue
        assert keys, f"{theirs}: a default of no key"
        assert write_default(keys[0][0]) == default, f"{theirs}: {keys[0][0]}"


def test_a_row_with_one_plain_key_says_its_default() -> None:
    for theirs, ours, default in list_rows():
        keys = find_keys(ours)
        if len(keys) == 1 and keys[0][1] is None and keys[0][0] in list_defaults():
            assert default, f"{theirs} -> {ours}"
