"""A disk that may lose power at any sync, and the facts that must survive it."""

import os
import random
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from buffer_lives import submit_group

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.segments import Reader


class WatchedDisk:
    """Watches what is synced in a folder, and makes copies of the folder as a loss of power may leave it.

    The synced bytes of a file stay. Of the bytes that changed since, none stay, all, or as many zeros. A name
    stays when its folder was synced; a name that is new or gone since then may be either. The first contents
    of the folder stay.
    """

    moment: Callable[[], None]

    def __init__(self, root: Path) -> None:
        self.root, self.moment = root, lambda: None
        """`moment` is called before each sync, in the thread that asks for it."""
        self.lock = threading.RLock()
        self.bytes: dict[int, bytes] = {}
        """Synced bytes by inode."""
        self.names: dict[int, dict[str, int]] = {}
        """Inodes by name of the files and folders in each synced folder, by the folder's inode."""
        self.held: dict[int, int] = {}
        """An open descriptor of each inode, so that its number is not used again."""
        for folder, _, files in os.walk(root):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                opened = os.open(path, os.O_RDONLY)
                self._keep_inode(opened)
                os.close(opened)
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> "WatchedDisk":
        self.patch.setattr(os, "fsync", self.sync_inode)
        self.patch.setattr(os, "fdatasync", self.sync_inode)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        for opened in self.held.values():
            os.close(opened)

    def sync_inode(self, file: int) -> None:
        with self.lock:
            self.moment()
            self._keep_inode(file)

    def _keep_inode(self, file: int) -> None:
        inode = self._hold_inode(f"/proc/self/fd/{file}")
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            self.bytes[inode] = self._read_inode(inode)
            return
        with os.scandir(file) as entries:
            self.names[inode] = {
                entry.name: self._hold_inode(f"/proc/self/fd/{file}/{entry.name}") for entry in entries
            }

    def _hold_inode(self, path: str) -> int:
        opened = os.open(path, os.O_RDONLY)
        inode = os.fstat(opened).st_ino
        if self.held.setdefault(inode, opened) != opened:
            os.close(opened)
        return inode

    def _read_inode(self, inode: int) -> bytes:
        return Path(f"/proc/self/fd/{self.held[inode]}").read_bytes()

    def lose_power(self, into: Path, rng: random.Random) -> None:
        """Fills `into` with what the disk might hold when everything starts again."""
        with self.lock:
            self._restore_folder(self.root.stat().st_ino, self.root, into, rng)

    def _restore_folder(self, folder: int, now: Path, into: Path, rng: random.Random) -> None:
        into.mkdir()
        kept = self.names.get(folder, {})
        present = {path.name: self._hold_inode(str(path)) for path in now.iterdir()} if now.is_dir() else {}
        for name in sorted(kept.keys() | present.keys()):
            inode = kept.get(name, -1)
            if inode != present.get(name, -1):
                inode = rng.choice([inode, present.get(name, -1)])
            if inode < 0:
                continue
            if stat.S_ISDIR(os.fstat(self.held[inode]).st_mode):
                self._restore_folder(inode, now / name, into / name, rng)
                continue
            synced, written = self.bytes.get(inode, b""), self._read_inode(inode)
            zeros = synced + bytes(max(0, len(written) - len(synced)))
            (into / name).write_bytes(rng.choice([synced, written, zeros]))


@dataclass
class KnownToCallers:
    """Facts that a buffer's callers may rely on, because they were acknowledged."""

    accepted: dict[int, e.Accepted] = field(default_factory=dict)
    handed: dict[int, list[int]] = field(default_factory=dict)
    """The groups of each step that was trained."""
    checkpoint: int = 0
    """The learner goes back to this step: its oldest checkpoint."""
    opening: bool = False
    """A buffer is being opened, and may hold damaged groups that it has yet to reject."""

    def make_copy(self) -> "KnownToCallers":
        return KnownToCallers(dict(self.accepted), dict(self.handed), self.checkpoint, self.opening)

    def live_until(self, buffer: Buffer, last: int, checkpoint_every: int = 2) -> None:
        """Lives up to step `last`. Facts that are noted after a commit are acknowledged."""
        for step in range(buffer.progress.next_step, last):
            buffer.progress.publish_version(step, f"w{step}")
            while (group := self.accept_group(buffer, step)) is not None:
                buffer.commit()
                self.accepted[group] = buffer.book.pool.get_content(group)
            self.train_step(buffer, step)
            if (step + 1) % checkpoint_every == 0:
                self.checkpoint = max(
                    0, step + 1 - checkpoint_every
                )  # the learner keeps the newest two, and says so then
                buffer.progress.keep_checkpoint(step + 1, self.checkpoint)
                self.write_state_before_groups_are_synced(buffer, step + 1)
            buffer.commit()

    def accept_group(self, buffer: Buffer, version: int) -> int | None:
        if (lease := buffer.lease_next("g")) is None:
            return None
        assert submit_group(buffer, lease, version) == "accepted"
        return lease.group

    def write_state_before_groups_are_synced(self, buffer: Buffer, version: int) -> None:
        """Lets the state's thread finish before that of commits has begun, as a slow disk may."""
        answer = threading.Event()
        buffer.journal._disk.submit(answer.wait)
        buffer.progress.publish_version(version, f"w{version}")
        group = self.accept_group(buffer, version)
        assert group is not None
        done = buffer.start_commit()
        buffer.journal._state_written.result()
        answer.set()
        done.result()
        self.accepted[group] = buffer.book.pool.get_content(group)

    def train_step(self, buffer: Buffer, step: int) -> None:
        handout = buffer.progress.hand_out(step)
        assert handout is not None, step
        trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={})
        )
        buffer.commit()
        self.handed[step] = handout.groups

    def check_buffer(self, buffer: Buffer) -> None:
        """Trains the steps since the checkpoint again, with the same groups; all other accepted groups
        must still wait."""
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
            self.train_step(buffer, step)
            assert self.handed[step] == expected
