"""The buffer's state, written now and then, so that recovery reads it and the log's tail instead of the whole log.

    journal/state/<number>.state    all that happened before file <number> of the log

    8 bytes magic | 16 bytes xxh3-128 of the rest | msgpack of `State`

The newest two are kept. One that is damaged is passed over for the one before, whose tail of the log is longer.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from buffers import events as e
from buffers.files import numbers_in, replace_file

log = logging.getLogger("slipstream.buffer")

MAGIC = b"SLIPST01"
KEPT = 2


class AttemptState(msgspec.Struct, array_like=True):
    """One lease of one group (`groups.Attempt`), without its deadline: that begins anew."""

    lease: int
    group: int
    generator: str
    num_tokens: int
    fate: str


class GroupState(msgspec.Struct, array_like=True):
    """A group that may still be trained, or was trained and may have to be again (`groups.Group`)."""

    number: int
    due: int
    num_failures: int
    uses: int
    attempts: list[int]
    content: e.Accepted | None


class StepState(msgspec.Struct, array_like=True):
    """A trained step that a rewind may undo."""

    trained: e.Trained
    first: list[bool]
    """Of each of its groups: whether this was its first time."""


class PlacesState(msgspec.Struct, array_like=True):
    next_place: int
    freed: list[int]
    extra: dict[int, int]
    filled: dict[int, int]
    filled_through: int


class LedgerState(msgspec.Struct, array_like=True):
    generated: int
    leased: int
    tokens: dict[str, int]
    groups: dict[str, int]
    staleness: dict[int, int]
    replayed: int


class BookState(msgspec.Struct, kw_only=True):
    """All that the lease book holds."""

    version: int
    newest_version: int
    num_consumed: int
    trained_twice: int
    num_rejected: dict[str, int]
    quarantined: int
    quarantine: dict[int, str]
    groups: list[GroupState]
    retired: list[GroupState]
    """Groups that are used up, and come back if the steps that trained them are undone."""
    attempts: list[AttemptState]
    dead: list[AttemptState]
    next_group: int
    places: PlacesState
    scripted: dict[int, tuple[list[int], list[float]]]
    """What steps were handed, by step: groups and their weights."""
    trained: list[StepState]
    floor_step: int
    ledger: LedgerState


class State(msgspec.Struct, kw_only=True):
    """All that a buffer goes on from."""

    terms: dict[str, str | int | float | None]
    """What the book was kept by when this was written."""
    book: BookState
    weights: str
    """Where the newest version's manifest is."""
    unscored: list[int]
    """Versions whose evaluation is not done."""
    next_segment: int
    """Segments from this number on have not been written yet."""
    open_segment: tuple[int, int] | None
    """(number, bytes) of the segment that was being written."""


def state_path(journal: Path, number: int) -> Path:
    return journal / "state" / f"{number:06d}.state"


def state_numbers(journal: Path) -> list[int]:
    """Numbers of the states in the folder, in order."""
    return numbers_in(journal / "state", ".state")


def write_state(journal: Path, number: int, state: bytes, *, sync: bool) -> None:
    """Writes an encoded state; it appears whole, and with `sync` on the disk. Raises DiskFull."""
    replace_file(state_path(journal, number), MAGIC + xxhash.xxh3_128_digest(state) + state, sync=sync)


def encode_state(state: State) -> bytes:
    return _encoder.encode(state)


def read_state(journal: Path, number: int) -> State | None:
    """None, with a word in the log, when the file is damaged."""
    path = state_path(journal, number)
    data = path.read_bytes()
    head = len(MAGIC) + 16
    if data[: len(MAGIC)] == MAGIC and xxhash.xxh3_128_digest(data[head:]) == data[len(MAGIC) : head]:
        try:
            return _decoder.decode(memoryview(data)[head:])
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path} must be of this version of Slipstream, got one that is not: {error}"
            ) from error
    log.error("%s does not match its checksum and is passed over", path)
    return None


def read_newest_state(journal: Path) -> tuple[int, State | None]:
    """The newest whole state and its number; (0, None) when there is none."""
    for number in reversed(state_numbers(journal)):
        if (state := read_state(journal, number)) is not None:
            return number, state
    return 0, None


def obsolete_states(numbers: Iterable[int]) -> list[int]:
    """All but the newest that are kept."""
    return sorted(numbers)[:-KEPT]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)
