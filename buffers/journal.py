"""The journal: every accepted group on disk, the log of its fate, and the state that the log has led to.

    journal/000000.arrow        groups, an Arrow record batch each (`buffers.segments`)
    journal/log/000000.jsonl    events, a JSON line each (`buffers.event_log`)
    journal/state/000000.state  the buffer's state before that file of the log (`buffers.state`)

    open: lock ─▶ recover: newest state, tail of the log
               ─▶ begin: set torn tails aside, write the state, begin a log file
    run:  append_batch, note_event ─▶ commit ─▶ … ─▶ rotate: a new log file, the state in a thread ─▶ …

`recover` changes nothing, so an opening that is refused, or killed half-way, leaves the journal as it was.
`begin` may be killed at any moment: the next opening does the rest, and nothing is done twice.
"""

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from buffers import events as e
from buffers.event_log import LogPlace, log_folder, log_numbers, log_path, read_events
from buffers.files import cut_file, naming_full_disk, sync_file, sync_folder, sync_path
from buffers.recovery import Recovery, read_journal
from buffers.segments import (
    Reader,
    Segment,
    close_torn_segment,
    create_segment,
    segment_numbers,
    segment_path,
)
from buffers.state import (
    State,
    encode_state,
    obsolete_states,
    state_numbers,
    state_path,
    write_state,
)
from configs.buffer import Durability
from configs.disk import write_all
from configs.host import boot_id

log = logging.getLogger("slipstream.buffer")

LOCK_S = 0.5
"""Seconds that an opener waits for the lock. Somebody may just be looking whether it is held."""
ROTATE_LINES = 50_000
"""Lines after which the log rotates. Recovery reads about that many."""
ROTATE_BYTES = 1 << 30
"""Bytes of groups after which the log rotates. Recovery may have to verify about that many."""
ROTATE_S = 10.0
"""Least seconds between two rotations that `ROTATE_BYTES` asks for."""
MANY_STATES = 8
"""Number of states at which an opening deletes the old ones.

A life that ends before it rotates leaves one more.
"""


class Journal:
    """The writer of one folder; one process at a time.

    `append_batch` writes a group while it is still in the processor's cache, `note_event` gathers events, and
    `commit` makes all of it durable at once. Commits and states are written in a thread each.
    """

    def __init__(self, folder: Path, durability: Durability, segment_bytes: int) -> None:
        """Locks the folder and changes nothing else in it. `recover` and `begin` come next.

        Raises ValueError when another process writes this journal.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._durability, self._syncs = durability, durability is Durability.fsync
        self._segment_bytes = segment_bytes
        self._lock = lock_journal(folder)
        self.mark = f"{boot_id()} {secrets.token_hex(8)}"
        self.began_at = 0.0
        """When this life began, in Unix seconds.

        It is later than any life before, even where the clock was set back.
        """
        self._number = -1
        """Number of the log file that is being written."""
        self._log = -1
        self._log_size = 0
        self._segment: Segment | None = None
        self._next_segment = 0
        self._unsynced = False
        self._folders_unsynced: set[Path] = set()
        self._touched: set[Path] = set()
        """Segments that were written to since the last state. The next state vouches for them."""
        self._lines_since = self._bytes_since = 0
        self._rotation_is_requested = False
        self._rotated_at = time.monotonic()
        self._synced: LogPlace = (-1, 0)
        """End of the last commit that the disk has confirmed."""
        self._told: LogPlace = (-1, 0)
        """The newest such place that the log tells."""
        self._dropped: set[int] = set()
        self._doomed: list[Path] = []
        """Dropped segments. They are deleted once a state that does without them is on the disk."""
        self._lines: list[bytes] = []
        self._broken = False
        self._disk, self._background = (
            ThreadPoolExecutor(1, "journal"),
            ThreadPoolExecutor(1, "journal-state"),
        )
        self._state_written: Future[None] = Future()
        self._state_written.set_result(None)

    # ---- opening

    def recover(self) -> Recovery:
        """Returns the contents of the folder. Changes nothing. Raises what `read_journal` raises."""
        return read_journal(self.folder)

    def begin(self, found: Recovery, state: State) -> list[str]:
        """Sets torn tails aside, closes torn segments, writes the state that recovery has led to and begins a
        log file.

        Returns words for each thing that was set aside.
        """
        told = self._set_torn_tails_aside(found)
        self._next_segment = found.next_segment
        self.began_at = max(time.time(), found.last_began.at + 1 if found.last_began is not None else 0.0)
        self._number = 1 + max([-1, *log_numbers(self.folder), *state_numbers(self.folder)])
        log_folder(self.folder).mkdir(exist_ok=True)
        (self.folder / "state").mkdir(exist_ok=True)
        for unfinished in (self.folder / "state").glob("*.unfinished"):
            unfinished.unlink()
        if self._syncs:
            sync_folder(self.folder)
        state.next_segment, state.open_segment = self._next_segment, None
        # Lives that end before they rotate leave their states behind.
        are_many = len(state_numbers(self.folder)) >= MANY_STATES
        write_state(self.folder, self._number, encode_state(state), sync=self._syncs or are_many)
        for old in obsolete_states(state_numbers(self.folder)) if are_many else ():
            state_path(self.folder, old).unlink()
        with naming_full_disk(self.folder / ".lock"):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, self.mark.encode(), 0)
        self._open_log(found.tail.end, state)
        return told

    def _set_torn_tails_aside(self, found: Recovery) -> list[str]:
        told: list[str | None] = []
        for number in reversed(found.tail.torn_files):
            told.append(cut_file(log_path(self.folder, number), 0, sync=self._syncs))
        if found.tail.torn is not None:
            number, byte = found.tail.torn
            told.append(cut_file(log_path(self.folder, number), byte, sync=self._syncs))
        for number in found.dropped:
            self.discard_file(segment_path(self.folder, number))
        for number in sorted(found.unclosed - found.dropped):
            path = segment_path(self.folder, number)
            told.append(close_torn_segment(path, found.ends.get(number, 0), sync=self._syncs))
        if (
            self._syncs
        ):  # the state vouches for groups that an earlier life has written and did not live to sync
            for number in found.ends:
                sync_path(segment_path(self.folder, number))
        return [what for what in told if what is not None]

    def _open_log(self, previous: LogPlace, state: State) -> None:
        path = log_path(self.folder, self._number)
        with naming_full_disk(path):
            self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC)
        self._log_size = 0
        self._folders_unsynced.add(log_folder(self.folder))
        at = max(time.time(), self.began_at)
        began = e.Began(
            self._number, *previous, self._next_segment, state.terms, str(self._durability), boot_id(), at
        )
        self._lines.insert(0, e.encode_line(began))
        self._write_lines()
        if (
            self._syncs
        ):  # so that a hole in what follows is known for one: the first line says how the file is written
            sync_file(self._log, path)
            sync_folder(log_folder(self.folder))
        self._lines_since = self._bytes_since = 0
        self._rotated_at = time.monotonic()

    # ---- writing

    def append_batch(self, message: memoryview) -> tuple[int, int, int]:
        """Writes a record batch, an Arrow IPC message; returns (segment, offset, xxh3-64).

        Raises DiskFull.
        """
        try:
            if self._segment is None:
                self._segment = create_segment(self.folder, self._next_segment)
                self._next_segment += 1
                self._folders_unsynced.add(self.folder)
            offset, xxh3 = self._segment.append(message)
        except Exception:
            self._broken = True
            raise
        self._unsynced = True
        self._touched.add(self._segment.path)
        self._bytes_since += len(message)
        return self._segment.number, offset, xxh3

    def note_event(self, event: e.AnyEvent) -> None:
        self._lines.append(e.encode_line(event))

    def commit(self) -> None:
        """Returns once all batches and events so far are where `durability` wants them."""
        self.start_commit().result()

    def start_commit(self) -> "Future[None]":
        """Starts a commit. The future is done once all batches and events so far are where `durability` wants
        them.

        It raises what the disk raised. More batches and events may come in before it is done.
        """
        files: list[tuple[int, Path]] = []
        if self._segment is not None and self._unsynced:
            files.append((self._segment.file, self._segment.path))
            self._unsynced = False
        if self._lines:
            if (synced := self._synced) > self._told:
                self._told = synced
                self._lines.insert(0, e.encode_line(e.Synced(*self._told)))
            self._write_lines()
            files.append((self._log, log_path(self.folder, self._number)))
        done: Future[None] = Future()
        if self._syncs:
            done = self._disk.submit(
                self._sync, files, self._folders_unsynced, (self._number, self._log_size)
            )
            self._folders_unsynced = set()
        else:
            done.set_result(None)
        if self._segment is not None and self._segment.size >= self._segment_bytes:
            self._close_segment()
        return done

    def _write_lines(self) -> None:
        data = b"".join(self._lines)
        self._lines_since += len(self._lines)
        self._lines.clear()
        try:
            write_all(self._log, data, log_path(self.folder, self._number))
        except Exception:
            self._broken = True
            raise
        self._log_size += len(data)

    def _sync(self, files: list[tuple[int, Path]], folders: set[Path], end: LogPlace) -> None:
        """Syncs files, then folders, in the disk's thread.

        After a failure the journal counts as broken: a second fsync may report success for data that the disk
        has lost.
        """
        try:
            for file, path in files:
                sync_file(file, path)
            for folder in folders:
                sync_folder(folder)
        except Exception:
            self._broken = True
            raise
        self._synced = end

    # ---- rotating

    def request_rotation(self) -> None:
        """Asks for a rotation as soon as one may be made."""
        self._rotation_is_requested = True

    def wants_rotation(self, num_entries: int) -> bool:
        """True when a rotation was requested, or when recovery would have to read much without one.

        One state is written at a time. `num_entries`: groups that the state would hold.
        """
        if not self._state_written.done():
            return False
        due = (
            self._rotation_is_requested
            or self._bytes_since >= ROTATE_BYTES
            and time.monotonic() - self._rotated_at >= ROTATE_S
        )
        return due or self._lines_since >= max(ROTATE_LINES, num_entries // 4)

    def rotate(self, state: State, *, keep_logs: bool) -> None:
        """Begins a new log file and writes the state in a thread.

        Once the state is on the disk, older states are deleted, and without `keep_logs` the log before them.
        All events must be committed.
        """
        assert not self._lines, "events were noted and not committed"
        self._rotation_is_requested = False
        self._state_written.result()  # raises what went wrong with the one before
        old = self._log
        previous = (self._number, self._log_size)
        if self._segment is not None:
            state.open_segment = (self._segment.number, self._segment.size)
        state.next_segment = self._next_segment
        self._number += 1
        self._open_log(previous, state)
        self._disk.submit(os.close, old)  # after the commits under way
        touched, self._touched = self._touched, set()
        if self._segment is not None:
            self._touched.add(self._segment.path)
        touched.add(log_path(self.folder, previous[0]))
        doomed, self._doomed = self._doomed, []
        self._state_written = self._background.submit(
            self._write_state, self._number, encode_state(state), touched, doomed, keep_logs
        )

    def _write_state(
        self, number: int, state: bytes, touched: set[Path], doomed: list[Path], keep_logs: bool
    ) -> None:
        """Writes a state, in a thread.

        It vouches for the groups that it names, so they go to the disk first.
        """
        if self._broken:
            return
        if self._syncs:
            for path in touched:
                sync_path(path)
            sync_folder(self.folder)
            sync_folder(log_folder(self.folder))
        write_state(
            self.folder, number, state, sync=True
        )  # whatever the durability: what it replaces is deleted now
        for path in doomed:
            self.discard_file(path)
        for old in obsolete_states(state_numbers(self.folder)):
            state_path(self.folder, old).unlink(missing_ok=True)
        if not keep_logs:
            oldest = min(state_numbers(self.folder))
            for old in log_numbers(self.folder):
                if old < oldest:
                    self.discard_file(log_path(self.folder, old))

    def close(self, state: State | None = None) -> None:
        """Commits and closes.

        With `state` it leaves that behind, so that the next opening need not read the log.
        """
        try:
            if self._log >= 0 and not self._broken:
                self.commit()
                self._close_segment()
                if state is not None:
                    self._state_written.result()
                    self.rotate(state, keep_logs=True)
                    self._state_written.result()
        finally:
            self._disk.shutdown()
            self._background.shutdown()
            if self._log >= 0:
                os.close(self._log)
            os.close(self._lock)

    # ---- segments

    def discard_file(self, path: Path) -> None:
        """Deletes a file that nothing needs any more."""
        path.unlink(missing_ok=True)

    def drop_segments(self, segments: list[int]) -> None:
        """Marks closed segments as not needed any more. The next `rotate` deletes them."""
        self.note_event(e.Dropped(segments))
        self._dropped.update(segments)
        self._doomed += [segment_path(self.folder, number) for number in segments]

    def closed_segments(self) -> set[int]:
        """Returns the segments that are in the folder and are not written any more."""
        return (
            segment_numbers(self.folder)
            - self._dropped
            - ({self._segment.number} if self._segment else set())
        )

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.write_footer()
            self._disk.submit(os.close, self._segment.file)  # after the commit under way
            self._segment = None


def lock_journal(folder: Path, wait_s: float = LOCK_S) -> int:
    """Locks a journal and returns the descriptor of the lock file. Closing it gives the journal up.

    Raises ValueError when another process has the lock for longer than `wait_s` seconds.
    """
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ValueError(
                    f"the journal must have one writer, got {folder}, which another process writes"
                ) from error
            time.sleep(0.02)


def is_on_this_host(folder: Path, mark: str) -> bool:
    """True when `folder` holds, on this very host, the journal whose `Journal.mark` this is, so that it
    may be mapped."""
    try:
        return mark.startswith(boot_id()) and (folder / ".lock").read_text() == mark
    except OSError:
        return False


def read_groups(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yields every group in the journal, in the order of acceptance. Raises DamagedGroup."""
    reader = Reader(folder)
    dropped = {
        number for event in read_events(folder) if isinstance(event, e.Dropped) for number in event.segments
    }
    for event in read_events(folder):
        if isinstance(event, e.Accepted) and event.segment not in dropped:
            yield reader.read(event)
