"""`chaos.py` reads and damages the journal of a running server through this module, from outside."""

from collections.abc import Callable
from pathlib import Path

from buffers import events as e

LogPlace = tuple[int, int]
"""(number of a file of the log, byte offset in it)."""
EventTest = Callable[[e.AnyEvent], bool]
"""True for an event of the kind that the harness waits for."""


class ChaosLog:
    """Reads the log of the journal in `folder` while a server writes it."""

    def __init__(self, folder: Path) -> None:
        self._journal, self._discarded = folder / "journal", folder / "discarded"

    def list_begun_files(self) -> set[str]:
        """Returns the names of the segments and log files that the journal has now."""
        return {path.name for path in (*self._journal.glob("*.arrow"), *self._journal.glob("log/*.jsonl"))}

    def count_trained_steps(self) -> int:
        """Returns the number of trained steps, read from the newest files of the log."""
        files = sorted(self.find_files())
        events = self.read_since((files[-3:][0], 0))[0] if files else []
        return max((event.step + 1 for event in events if isinstance(event, e.Trained)), default=0)

    def find_files(self) -> dict[int, Path]:
        """Returns every file of the log by number, the discarded ones included."""
        places = (self._discarded / "log", self._journal / "log")
        return {int(path.stem): path for place in places for path in place.glob("*.jsonl")}

    def read_since(self, place: LogPlace) -> tuple[list[e.AnyEvent], LogPlace]:
        """Returns the events that the log received since `place`, and the place behind them."""
        events: list[e.AnyEvent] = []
        for number, path in sorted(self.find_files().items()):
            if number < place[0]:
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(place[1] if number == place[0] else 0)
                    for line in file:
                        if (event := e.decode_line(line)) is not None:
                            events.append(event)
                    place = (number, file.tell())
            except FileNotFoundError:
                # Retention discarded the file a moment ago.
                continue
        return events, place


def holds_any_byte(event: e.Accepted, places: list[tuple[int, int]]) -> bool:
    """True when one of the places (segment, byte offset) lies within the group."""
    return any(
        segment == event.segment and event.offset <= place < event.offset + event.size
        for segment, place in places
    )


def flip_bit(path: Path, place: int, bit: int) -> None:
    """Flips bit `bit` (0 to 7) of the byte at offset `place`."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def is_trained(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Trained)


def is_accepted(event: e.AnyEvent) -> bool:
    return isinstance(event, e.Accepted)
