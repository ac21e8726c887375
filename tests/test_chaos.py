"""A short run of `scripts/bench/chaos.py` loses nothing while processes are killed, and its audit can
fail."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from buffers import events as e
from buffers.event_log import read_events
from buffers.run_status import RunStatus
from chaos import ChaosHarness
from slipstream_bench.audit import AuditReport, audit_run, restore_journal
from slipstream_bench.chaos_roles import hash_training_step, make_config

SEED = 1


@pytest.fixture(scope="module")
def survivor_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run with 15 kills and at least one of each other fault."""
    folder = tmp_path_factory.mktemp("chaos")
    harness = ChaosHarness(folder, SEED, long_log=4000)
    harness.run(15)
    assert harness.kills.total() >= 15
    assert {"server", "server at a rotation", "server while it recovers"} < set(harness.kills)
    assert {"second opener", "full disk", "stall"} <= set(harness.faults)
    assert all(process.poll() is not None for process in harness.processes.values())
    assert harness.problems == [] and harness.status is not None
    (folder / "status.json").write_bytes(msgspec.json.encode(harness.status))
    restore_journal(folder)
    yield folder


def audit_folder(folder: Path) -> AuditReport:
    status = msgspec.json.decode((folder / "status.json").read_bytes(), type=RunStatus)
    return audit_run(folder, make_config(folder, SEED), hash_training_step, status)


def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whatever_is_killed(
    survivor_folder: Path,
) -> None:
    found = audit_folder(survivor_folder)
    assert found.problems == []
    assert found.figures["groups acknowledged to producers"] > 50 and found.figures["steps trained"] > 10


def rewrite_log(folder: Path, change: Callable[[list[e.AnyEvent]], list[e.AnyEvent]]) -> None:
    """Replaces the log by the changed events, with checksums that fit."""
    events = change(list(read_events(folder / "journal")))
    shutil.rmtree(folder / "journal/state")
    shutil.rmtree(folder / "journal/log")
    (folder / "journal/log").mkdir()
    (folder / "journal/log/000000.jsonl").write_bytes(b"".join(map(e.encode_line, events)))


def forget_an_acknowledgement(folder: Path) -> str:
    with open(folder / "producer-0.acknowledged", "a") as file:
        file.write("123456789 999999\n")
    return "acknowledged group 999999 .* is lost"


def change_a_checkpoint(folder: Path) -> str:
    path = min(folder.glob("checkpoints/*.json"), key=lambda path: int(path.stem))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "another"}))
    return "is not the state that the journal leads to"


def damage_a_group(folder: Path) -> str:
    event = next(event for event in read_events(folder / "journal") if isinstance(event, e.Accepted))
    path = folder / "journal" / f"{event.segment:06d}.arrow"
    data = bytearray(path.read_bytes())
    data[event.offset + event.size - 9] ^= 1
    path.write_bytes(data)
    return "cannot be read"


def hand_out_other_groups_after_a_rewind(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        last = max(i for i, event in enumerate(events) if isinstance(event, e.Trained))
        trained = events[last]
        assert isinstance(trained, e.Trained)
        swapped = e.Trained(
            trained.step, trained.groups[::-1], trained.trained[::-1], trained.excluded, trained.staleness
        )
        return [*events[: last + 1], e.Rewound(trained.step), swapped]

    rewrite_log(folder, change_events)
    return "trained other groups than the buffer handed out"


def lose_an_accepted_group(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        last = max(i for i, event in enumerate(events) if isinstance(event, e.Accepted))
        return events[:last] + events[last + 1 :]

    rewrite_log(folder, change_events)
    return "acknowledged group .* is lost|its log says"


def train_a_group_that_never_came(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        return [event for event in events if not (isinstance(event, e.Accepted) and event.due == 1)]

    rewrite_log(folder, change_events)
    return "was trained at step 1 and never accepted"


def train_groups_twice(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        done = [event for event in events if isinstance(event, e.Trained)]
        last, before = done[-1], next(event for event in done if event.step == done[-1].step - 1)
        again = msgspec.structs.replace(before, step=last.step)
        handed = e.Handed(last.step, before.groups)
        events = [event for event in events if not (isinstance(event, e.Handed) and event.step == last.step)]
        place = events.index(last)
        return [*events[:place], handed, again, *events[place + 1 :]]

    rewrite_log(folder, change_events)
    return "was trained 2 times"


def skip_a_prompt(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        return [
            msgspec.structs.replace(event, prompt=(event.prompt + 1) % 50)
            if isinstance(event, e.Accepted) and event.group == 3
            else event
            for event in events
        ]

    rewrite_log(folder, change_events)
    return "epoch 0 has a prompt twice"


def forget_a_lease(folder: Path) -> str:
    def change_events(events: list[e.AnyEvent]) -> list[e.AnyEvent]:
        first = next(event for event in events if isinstance(event, e.Accepted))
        return [event for event in events if not (isinstance(event, e.Leased) and event.lease == first.lease)]

    rewrite_log(folder, change_events)
    return "the log cannot be applied"


@pytest.mark.parametrize(
    "doctor_folder",
    [
        forget_an_acknowledgement,
        change_a_checkpoint,
        damage_a_group,
        hand_out_other_groups_after_a_rewind,
        lose_an_accepted_group,
        train_a_group_that_never_came,
        train_groups_twice,
        skip_a_prompt,
        forget_a_lease,
    ],
)
def test_the_audit_names_what_is_wrong(
    survivor_folder: Path, tmp_path: Path, doctor_folder: Callable[[Path], str]
) -> None:
    shutil.copytree(
        survivor_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("socket", "second", "log_alone")
    )
    wrong = doctor_folder(tmp_path / "copy")
    found = audit_folder(tmp_path / "copy")
    assert any(re.search(wrong, text) for text in found.problems), found.problems
