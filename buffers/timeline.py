"""The timeline of a role: spans of what it does when, in a file of its own in the run's folder.

    the role's loop ── begin_activity("training step 7") ──▶ writes the activity before, which ends now ──┐
    its threads ────── span(Track.publication, "writing and digesting version 7") ── written when it ends ─┤
                                                                                                          ▼
                                                                                timeline/learner-0.json

The file is in Chrome's trace event format, an array of JSON with an event a line, which ui.perfetto.dev opens
as it is: the format needs no closing bracket. A line is written when its span ends, so a role that is killed
loses the spans under way, and the activity before. A file that is full becomes `<role>.before.json`, in place
of the one before it.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from configs.disk import write_all

log = logging.getLogger("slipstream.timeline")

FOLDER = "timeline"
"""Folder of the files of all roles, in the run's."""
MAX_FILE_BYTES = 2 << 20
"""Bytes of a file that is full: 15,000 spans, about. A role has two files at most."""
MAX_NAME = 200
"""Characters of a span's name that are kept."""
SHORT_S = 0.001
"""Seconds below which an activity is not written: the loop of an idle generator has a thousand of them a
second."""
NUMBERED = re.compile(r"\b(step|version) (\d+)\b")


class Track(StrEnum):
    """A row of a role's timeline: what one of its threads does."""

    activity = "activity"
    """The role's own loop, as its heartbeat tells it."""
    publication = "publication"
    checkpoint = "checkpoint"
    weights = "weights"
    """Versions that come to a generator."""


TRACK_NUMBERS = {track: 1 + number for number, track in enumerate(Track)}


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A number that all readers of JSON have exactly; a file with another is damaged."""


class TimedSpan(msgspec.Struct):
    """A span, as a complete event of the format."""

    name: str
    cat: Track
    ts: Count
    """Microseconds since 1970 at which it began, by the clock of its host."""
    dur: Count
    """Microseconds."""
    pid: int = 1
    """Number of the role in its file."""
    tid: int = 1
    """Number of the track."""
    args: dict[str, Count] = {}
    """Step and version that its name tells."""
    ph: str = "X"


class Label(msgspec.Struct):
    """An event of the format that names a process or a thread, or says which comes first."""

    name: str
    pid: int
    tid: int
    args: dict[str, str | int]
    ph: str = "M"


def make_labels(role: str, number: int = 1) -> list[Label]:
    """Returns the events that name a role and its tracks. `number` is the role's, in the order of roles."""
    labels = [
        Label("process_name", number, 0, {"name": role}),
        Label("process_sort_index", number, 0, {"sort_index": number}),
    ]
    for track, at in TRACK_NUMBERS.items():
        labels.append(Label("thread_name", number, at, {"name": track}))
        labels.append(Label("thread_sort_index", number, at, {"sort_index": at}))
    return labels


class Activity(NamedTuple):
    """An activity of a role's loop, and when it began."""

    name: str
    since: float
    """Seconds since 1970."""
    began: float
    """The same moment by the timer that measures how long it lasts."""


class Timeline:
    """Writes the spans of one role. All methods may be called from any thread.

    A file that cannot be written ends the timeline, and not the role: its log says so.
    """

    def __init__(
        self,
        run: Path | None = None,
        role: str = "",
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Goes on with the file that the role has in the folder of the run; `run` None: writes nothing.
        `clock` tells when a span begins, `timer` measures how long it lasts."""
        self._path = None if run is None else run / FOLDER / f"{role}.json"
        self._role, self._clock, self._timer, self._max_bytes = role, clock, timer, max_file_bytes
        self._lock = threading.Lock()
        self._file: int | None = None
        self._size = 0
        self._present: Activity | None = None
        self._before: tuple[Activity, float] | None = None
        """The activity before the present one, and when it ended by `timer`: it goes on if the present one is
        short."""
        with self._lock, self._give_up_on_error():
            self._open_file()

    def begin_activity(self, activity: str) -> None:
        """Notes what the role's loop does from now on; empty: nothing."""
        if self._path is None:
            return
        fresh = Activity(activity, self._clock(), self._timer())
        with self._lock:
            if (ended := self._present) is not None and fresh.began - ended.began >= SHORT_S:
                self._write_before()
                self._before = ended, fresh.began
            elif self._before is not None:
                before, ended_at = self._before
                if before.name == activity and fresh.began - ended_at < SHORT_S:
                    fresh, self._before = before, None
            self._present = fresh if activity else None
            if not activity:
                self._write_before()

    @contextlib.contextmanager
    def span(self, track: Track, name: str) -> Iterator[None]:
        """Writes a span that lasts as long as the context, also where that raises."""
        since, began = self._clock(), self._timer()
        try:
            yield
        finally:
            if self._path is not None:
                with self._lock:
                    self._write_span(make_span(track, name, since, self._timer() - began))

    def close(self) -> None:
        """Ends the activity. Spans that threads end later are lost."""
        self.begin_activity("")
        with self._lock:
            self._drop_file()
            self._path = None

    # ---- with the lock

    def _write_before(self) -> None:
        if self._before is not None:
            (name, since, began), ended_at = self._before
            self._before = None
            self._write_span(make_span(Track.activity, name, since, ended_at - began))

    def _write_span(self, span: TimedSpan) -> None:
        if self._file is None:
            return
        with self._give_up_on_error():
            if self._size > self._max_bytes:
                self._change_files()
            self._write_events([span])

    def _write_events(self, events: list[TimedSpan] | list[Label]) -> None:
        assert self._file is not None
        lines = b"".join(msgspec.json.encode(event) + b",\n" for event in events)
        write_all(self._file, lines)
        self._size += len(lines)

    def _change_files(self) -> None:
        assert self._path is not None
        self._drop_file()
        os.replace(self._path, self._path.with_suffix(".before.json"))
        self._open_file()

    def _open_file(self) -> None:
        """Opens the file, and cuts off what a killed role, or a full disk, has left of a line."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._file).st_size
        tail_at = max(0, size - 16 * MAX_NAME)
        self._size = tail_at + os.pread(self._file, size - tail_at, tail_at).rfind(b"\n") + 1
        os.ftruncate(self._file, self._size)
        if not self._size:
            write_all(self._file, b"[\n")
        self._write_events(make_labels(self._role))

    def _drop_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    @contextlib.contextmanager
    def _give_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("the timeline ends here, and the role goes on: %s", error)
            self._drop_file()


def make_span(track: Track, name: str, since: float, lasted: float) -> TimedSpan:
    """Returns a span that began at `since`, in seconds since 1970, and lasted so many seconds."""
    name = name[:MAX_NAME]
    numbers = {what: int(number) for what, number in NUMBERED.findall(name)}
    return TimedSpan(name, track, round(since * 1e6), round(lasted * 1e6), 1, TRACK_NUMBERS[track], numbers)


def read_spans(path: Path, max_bytes: int = 2 * MAX_FILE_BYTES) -> list[TimedSpan]:
    """Returns the whole spans of the last `max_bytes` of a file; none where it is missing. Lines that are
    something else are passed over."""
    spans = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):
                span = msgspec.json.decode(line.rstrip().rstrip(b","), type=TimedSpan)
                if span.ph == "X":
                    spans.append(span)
    return spans
