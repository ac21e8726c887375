"""What the disk was not asked to keep may be lost with the power, in any mixture; what was acknowledged may not."""

import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from buffer_lives import LIFE_SETTINGS, copy_killed, live_steps, submit_group

from buffers import events as e
from buffers import journal as journal_module
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.event_log import read_events
from buffers.journal import Journal
from buffers.recovery import read_journal
from buffers.segments import Reader, is_closed, segment_numbers
from configs.load import load_config
from configs.schema import Config

SMALL = 3000
"""Bytes: three groups."""


class Disk:
    """Watches what is synced in a folder, and tells what a loss of power may leave of it.

    Of a file, what was there when it was synced is kept; of what has changed since, nothing, all, or as many zeros. A name is
    kept when its folder was synced; a name that is new, or gone, since then may be either. What the folder holds at first is kept.
    """

    moment: Callable[[], None]

    def __init__(self, root: Path) -> None:
        self.root, self.moment = root, lambda: None
        """`moment` is called before each sync, in the thread that asks for it."""
        self.lock = threading.RLock()
        self.bytes: dict[int, bytes] = {}
        """What was synced, by inode."""
        self.names: dict[int, dict[str, int]] = {}
        """Of each folder that was synced: the inodes of its files and folders by name."""
        self.held: dict[int, int] = {}
        """An open descriptor of each inode, so that its number is not used again."""
        for folder, _, files in os.walk(root):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                opened = os.open(path, os.O_RDONLY)
                self._keep(opened)
                os.close(opened)
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Disk":
        self.patch.setattr(os, "fsync", self.sync)
        self.patch.setattr(os, "fdatasync", self.sync)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        for opened in self.held.values():
            os.close(opened)

    def sync(self, file: int) -> None:
        with self.lock:
            self.moment()
            self._keep(file)

    def _keep(self, file: int) -> None:
        inode = self._hold(f"/proc/self/fd/{file}")
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            self.bytes[inode] = self._read(inode)
            return
        with os.scandir(file) as entries:
            self.names[inode] = {
                entry.name: self._hold(f"/proc/self/fd/{file}/{entry.name}") for entry in entries
            }

    def _hold(self, path: str) -> int:
        opened = os.open(path, os.O_RDONLY)
        inode = os.fstat(opened).st_ino
        if self.held.setdefault(inode, opened) != opened:
            os.close(opened)
        return inode

    def _read(self, inode: int) -> bytes:
        return Path(f"/proc/self/fd/{self.held[inode]}").read_bytes()

    def lose_power(self, into: Path, rng: random.Random) -> None:
        """Makes `into` what the disk might hold when everything starts again."""
        with self.lock:
            self._restore(self.root.stat().st_ino, self.root, into, rng)

    def _restore(self, folder: int, now: Path, into: Path, rng: random.Random) -> None:
        into.mkdir()
        kept = self.names.get(folder, {})
        present = {path.name: self._hold(str(path)) for path in now.iterdir()} if now.is_dir() else {}
        for name in sorted(kept.keys() | present.keys()):
            inode = kept.get(name, -1)
            if inode != present.get(name, -1):
                inode = rng.choice([inode, present.get(name, -1)])
            if inode < 0:
                continue
            if stat.S_ISDIR(os.fstat(self.held[inode]).st_mode):
                self._restore(inode, now / name, into / name, rng)
                continue
            synced, written = self.bytes.get(inode, b""), self._read(inode)
            zeros = synced + bytes(max(0, len(written) - len(synced)))
            (into / name).write_bytes(rng.choice([synced, written, zeros]))


@dataclass
class AcknowledgedLeases:
    """What a buffer's callers may rely on."""

    accepted: dict[int, e.Accepted] = field(default_factory=dict)
    handed: dict[int, list[int]] = field(default_factory=dict)
    """The groups of each step that was trained."""
    checkpoint: int = 0
    """The learner goes back to this step: its oldest checkpoint."""
    opening: bool = False
    """A buffer is being opened, and may hold damaged groups that it has yet to reject."""

    def copy(self) -> "AcknowledgedLeases":
        return AcknowledgedLeases(dict(self.accepted), dict(self.handed), self.checkpoint, self.opening)

    def go_on(self, buffer: Buffer, last: int, checkpoint_every: int = 2) -> None:
        """Lives up to step `last`. What follows a line that commits is acknowledged."""
        for step in range(buffer.progress.next_step, last):
            buffer.progress.publish_version(step, f"w{step}")
            while (group := self.accept(buffer, step)) is not None:
                buffer.commit()
                self.accepted[group] = buffer.book.pool.get_content(group)
            self.train(buffer, step)
            if (step + 1) % checkpoint_every == 0:
                self.checkpoint = max(
                    0, step + 1 - checkpoint_every
                )  # the learner keeps the newest two, and says so then
                buffer.progress.keep_checkpoint(step + 1, self.checkpoint)
                self.write_state_before_groups_are_synced(buffer, step + 1)
            buffer.commit()

    def accept(self, buffer: Buffer, version: int) -> int | None:
        if (lease := buffer.lease_next("g")) is None:
            return None
        assert submit_group(buffer, lease, version) == "accepted"
        return lease.group

    def write_state_before_groups_are_synced(self, buffer: Buffer, version: int) -> None:
        """As it may come when the disk is slow: the state's thread is done before that of commits has begun."""
        answer = threading.Event()
        buffer.journal._disk.submit(answer.wait)
        buffer.progress.publish_version(version, f"w{version}")
        group = self.accept(buffer, version)
        assert group is not None
        done = buffer.start_commit()
        buffer.journal._state_written.result()
        answer.set()
        done.result()
        self.accepted[group] = buffer.book.pool.get_content(group)

    def train(self, buffer: Buffer, step: int) -> None:
        handout = buffer.progress.hand_out(step)
        assert handout is not None, step
        trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        buffer.commit()
        self.handed[step] = handout.groups

    def check(self, buffer: Buffer) -> None:
        """The learner trains again what it had trained since its checkpoint; all else that was accepted still waits."""
        assert buffer.progress.next_step == self.checkpoint and buffer.book.ledger.closes()
        reader, wanted = Reader(buffer.journal.folder), set(self.accepted)
        for step, groups in self.handed.items():
            wanted -= set(groups) if step < self.checkpoint else set()
        assert wanted <= buffer.book.pool.groups.keys(), (
            f"groups {wanted - buffer.book.pool.groups.keys()} are lost"
        )
        for group in wanted if self.opening else buffer.book.pool.groups:
            assert reader.is_intact(buffer.book.pool.get_content(group)), (
                f"the bytes of group {group} are lost"
            )
        for step in range(self.checkpoint, max([-1, *self.handed]) + 1):
            buffer.progress.publish_version(step, f"again{step}")
            expected = self.handed[step]
            self.train(buffer, step)
            assert self.handed[step] == expected


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(LIFE_SETTINGS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
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
    tmp_path: Path, quick: None, seed: int, retention: str
) -> None:
    rng = random.Random(seed)
    config = load_config([*LIFE_SETTINGS, "buffer.durability=fsync", f"buffer.retention={retention}"])
    folder, known = tmp_path / "journal", AcknowledgedLeases()
    folder.mkdir()
    for life in range(3):
        images: list[tuple[Path, AcknowledgedLeases]] = []
        with Disk(folder) as disk:

            def lose_power(
                disk: Disk = disk,
                life: int = life,
                images: list[tuple[Path, AcknowledgedLeases]] = images,
                known: AcknowledgedLeases = known,
            ) -> None:
                if rng.random() < 0.2 or not images:
                    images.append((tmp_path / f"{life}-{len(images)}", known.copy()))
                    disk.lose_power(images[-1][0], rng)

            disk.moment, known.opening = lose_power, True
            buffer = Buffer(config, folder, resume_step=known.checkpoint if life else None)
            known.check(buffer)
            buffer.commit()
            known.opening = False
            known.go_on(buffer, buffer.progress.next_step + 7)
            buffer.close()
        for image, then in images:
            again = Buffer(config, shutil.copytree(image, tmp_path / "again"), resume_step=then.checkpoint)
            then.copy().check(again)
            again.close()
            shutil.rmtree(tmp_path / "again")
        folder, known = rng.choice(images)


def test_what_is_committed_first_is_kept_with_the_folders_that_it_lies_in(
    tmp_path: Path, quick: None
) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    config = load_config([*LIFE_SETTINGS, "buffer.durability=fsync"])
    with Disk(folder) as disk:
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
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    present: list[set[int]] = []
    replace = os.replace

    def watch(source: Path, target: Path) -> None:
        replace(source, target)
        present.append(segment_numbers(tmp_path / "journal"))

    monkeypatch.setattr(os, "replace", watch)
    buffer = Buffer(load_config([*LIFE_SETTINGS, "buffer.retention=checkpoints"]), tmp_path / "journal")
    live_steps(buffer, 0, 6)
    dropped = [
        set(event.segments) for event in read_events(tmp_path / "journal") if isinstance(event, e.Dropped)
    ]
    assert dropped and all(any(numbers <= then for then in present) for numbers in dropped)
    monkeypatch.setattr(journal_module, "write_state", fail)
    buffer.progress.publish_version(6, "w6")
    with pytest.raises(OSError, match="no state"):
        live_steps(buffer, 6, 8)
    last = [event for event in read_events(tmp_path / "journal") if isinstance(event, e.Dropped)][-1]
    assert last.segments and set(last.segments) <= segment_numbers(tmp_path / "journal")
    with pytest.raises(OSError, match="no state"):
        buffer.close()


def fail(*_: object, **__: object) -> None:
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
def test_what_the_disk_may_have_lost_is_looked_at_when_a_journal_is_opened_and_nothing_else(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, segment: str, boot: str
) -> None:
    if boot == "another":
        monkeypatch.setattr(journal_module, "boot_id", lambda: "an earlier start")
    buffer = Buffer(config, tmp_path / "journal")
    live_steps(buffer, 0, 1)
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
