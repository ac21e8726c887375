"""A loss of power may cost anything that was not synced, in any mixture, and nothing that was
acknowledged."""

import os
import random
import shutil
from pathlib import Path

import pytest
from buffer_lives import LIFE_SETTINGS, copy_killed, live_steps
from watched_disk import KnownToCallers, WatchedDisk

from buffers import events as e
from buffers import journal as journal_module
from buffers.buffer import Buffer
from buffers.event_log import read_events
from buffers.journal import Journal
from buffers.recovery import read_journal
from buffers.segments import Reader, is_closed, segment_numbers
from configs.buffer import Durability
from configs.load import load_config
from configs.schema import Config

SMALL = 3000
"""Bytes: three groups."""


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(LIFE_SETTINGS)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments, and a disk that nobody waits for."""
    opened = Journal.__init__
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(
        Journal, "__init__", lambda self, folder, durability, _: opened(self, folder, durability, SMALL)
    )


@pytest.mark.parametrize("retention", ["all", "checkpoints"])
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_of_power_at_any_moment_costs_nothing_that_was_acknowledged(
    tmp_path: Path, quick_disk: None, seed: int, retention: str
) -> None:
    rng = random.Random(seed)
    config = load_config([*LIFE_SETTINGS, "buffer.durability=fsync", f"buffer.retention={retention}"])
    folder, known = tmp_path / "journal", KnownToCallers()
    folder.mkdir()
    for life in range(3):
        images: list[tuple[Path, KnownToCallers]] = []
        with WatchedDisk(folder) as disk:

            def lose_power(
                disk: WatchedDisk = disk,
                life: int = life,
                images: list[tuple[Path, KnownToCallers]] = images,
                known: KnownToCallers = known,
            ) -> None:
                if rng.random() < 0.2 or not images:
                    images.append((tmp_path / f"{life}-{len(images)}", known.make_copy()))
                    disk.lose_power(images[-1][0], rng)

            disk.moment, known.opening = lose_power, True
            buffer = Buffer(config, folder, resume_step=known.checkpoint if life else None)
            known.check_buffer(buffer)
            buffer.commit()
            known.opening = False
            known.live_until(buffer, buffer.progress.next_step + 7)
            buffer.close()
        for image, then in images:
            again = Buffer(config, shutil.copytree(image, tmp_path / "again"), resume_step=then.checkpoint)
            then.make_copy().check_buffer(again)
            again.close()
            shutil.rmtree(tmp_path / "again")
        folder, known = rng.choice(images)


def test_what_is_committed_first_is_kept_with_the_folders_that_it_lies_in(
    tmp_path: Path, quick_disk: None
) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    config = load_config([*LIFE_SETTINGS, "buffer.durability=fsync"])
    with WatchedDisk(folder) as disk:
        buffer = Buffer(config, folder)
        buffer.progress.publish_version(0, "w0")
        buffer.commit()
        for seed in range(20):
            disk.lose_power(tmp_path / f"lost-{seed}", random.Random(seed))
        buffer.close()
    for seed in range(20):
        again = Buffer(config, tmp_path / f"lost-{seed}")
        assert again.progress.version == 0
        again.close()


def test_segments_go_when_a_state_that_forgets_them_is_on_the_disk_and_not_before(
    tmp_path: Path, quick_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    present: list[set[int]] = []
    replace = os.replace

    def note_segments(source: Path, target: Path) -> None:
        replace(source, target)
        present.append(segment_numbers(tmp_path / "journal"))

    monkeypatch.setattr(os, "replace", note_segments)
    buffer = Buffer(load_config([*LIFE_SETTINGS, "buffer.retention=checkpoints"]), tmp_path / "journal")
    live_steps(buffer, 0, 6)
    dropped = [
        set(event.segments) for event in read_events(tmp_path / "journal") if isinstance(event, e.Dropped)
    ]
    assert dropped and all(any(numbers <= then for then in present) for numbers in dropped)
    monkeypatch.setattr(journal_module, "write_state", fail_to_write)
    buffer.progress.publish_version(6, "w6")
    with pytest.raises(OSError, match="no state"):
        live_steps(buffer, 6, 8)
    last = [event for event in read_events(tmp_path / "journal") if isinstance(event, e.Dropped)][-1]
    assert last.segments and set(last.segments) <= segment_numbers(tmp_path / "journal")
    with pytest.raises(OSError, match="no state"):
        buffer.close()


def fail_to_write(*_: object, **__: object) -> None:
    raise OSError("no state")


def test_the_segment_that_a_state_found_open_is_closed_though_nothing_came_after(
    tmp_path: Path, config: Config
) -> None:
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 2)
    killed = copy_killed(buffer, tmp_path / "killed")
    expected = set(buffer.book.pool.groups)
    buffer.close()
    found = read_journal(killed)
    assert found.state is not None and not any(
        isinstance(line.event, e.Accepted) for line in found.tail.lines
    )
    with open(killed / "000000.arrow", "ab") as file:
        file.write(b"torn" * 10)
    again = Buffer(config, killed)
    assert (
        is_closed(killed / "000000.arrow")
        and (killed / f"000000.arrow.cut-{found.ends[0]}").read_bytes() == b"torn" * 10
    )
    reader = Reader(killed)
    assert set(again.book.pool.groups) == expected and all(
        reader.is_intact(again.book.pool.get_content(group)) for group in expected
    )
    again.close()


@pytest.mark.parametrize("segment", ["open", "closed"])
@pytest.mark.parametrize("boot", ["same", "another"])
@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_what_the_disk_or_a_copy_may_have_lost_is_looked_at_when_a_journal_is_opened_and_nothing_else(
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    segment: str,
    boot: str,
    durability: str,
) -> None:
    """A journal of another host is a copy. Its name of host and boot is another one too."""
    config.buffer.durability = Durability(durability)
    if boot == "another":
        monkeypatch.setattr(journal_module, "boot_id", lambda: "an earlier start")
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 1)
    buffer.progress.publish_version(1, "w1")
    buffer.commit()  # under `fsync` it tells that the groups before it are on the disk
    folder = copy_killed(buffer, tmp_path / "killed")
    waiting = set(buffer.book.pool.groups)
    buffer.close()
    if segment == "closed":
        shutil.copy(tmp_path / "journal/000000.arrow", folder)
    looked: set[int] = set()
    is_intact = Reader.is_intact
    monkeypatch.setattr(
        Reader, "is_intact", lambda self, one: (looked.add(one.group), is_intact(self, one))[1]
    )
    again = Buffer(config, folder)
    assert looked == (set() if (segment, boot) == ("closed", "same") else waiting)
    again.close()
