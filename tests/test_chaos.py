"""Processes are killed at random, and nothing is lost: the short form of `scripts/chaos.py`, and proof that its audit can fail."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import Harness, audit

from buffers import events as e
from buffers.journal import read_events

SEED = 1


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What 25 kills have left."""
    folder = tmp_path_factory.mktemp("chaos")
    harness = Harness(folder, SEED)
    harness.run(25)
    assert harness.kills.total() == 25 and set(harness.kills) == {"server", "producer", "consumer"}
    assert all(process.poll() is not None for process in harness.processes.values())
    yield folder


def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whatever_is_killed(survivor: Path) -> None:
    found = audit(survivor, SEED)
    assert found.wrong == []
    assert found.figures["groups acknowledged to producers"] > 50 and found.figures["steps trained"] > 10


def rewrite(folder: Path, change: Callable[[list[e.AnyEvent]], list[e.AnyEvent]]) -> None:
    """Writes another log in the place of the true one, with checksums that fit."""
    events = change(list(read_events(folder / "journal")))
    (folder / "journal" / "log.jsonl").write_bytes(b"".join(map(e.encode, events)))


def forget_an_acknowledgement(folder: Path) -> str:
    with open(folder / "producer-0.acknowledged", "a") as file:
        file.write("123456789 999999\n")
    return "acknowledged group 999999 .* is lost"


def train_something_else(folder: Path) -> str:
    name = max(folder.glob("checkpoints/*.json"), key=lambda path: int(path.stem))
    name.write_text(json.dumps(json.loads(name.read_text()) | {"state": "another"}))
    return "is not what the journal leads to"


def damage_a_group(folder: Path) -> str:
    event = next(event for event in read_events(folder / "journal") if isinstance(event, e.Accepted))
    path = folder / "journal" / f"{event.segment:06d}.arrow"
    data = bytearray(path.read_bytes())
    data[event.offset + event.size - 9] ^= 1
    path.write_bytes(data)
    return "cannot be read"


def hand_out_other_groups_after_a_rewind(folder: Path) -> str:
    def change(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        last = max(i for i, event in enumerate(events) if isinstance(event, e.Trained))
        trained = events[last]
        assert isinstance(trained, e.Trained)
        swapped = e.Trained(
            trained.step, trained.groups[::-1], trained.trained[::-1], trained.excluded, trained.staleness
        )
        return [*events[: last + 1], e.Rewound(trained.step), swapped]

    rewrite(folder, change)
    return "was handed out anew with other groups"


@pytest.mark.parametrize(
    "doctor",
    [forget_an_acknowledgement, train_something_else, damage_a_group, hand_out_other_groups_after_a_rewind],
)
def test_the_audit_names_what_is_wrong(survivor: Path, tmp_path: Path, doctor: Callable[[Path], str]) -> None:
    shutil.copytree(survivor, tmp_path / "copy", ignore=shutil.ignore_patterns("socket"))
    wrong = doctor(tmp_path / "copy")
    found = audit(tmp_path / "copy", SEED)
    assert any(re.search(wrong, text) for text in found.wrong), found.wrong
