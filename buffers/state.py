"""The buffer's state on disk. Recovery reads it and the log's tail instead of the whole log.

    journal/state/<number>.state    the result of all that happened before file <number> of the log

    8 bytes magic | 16 bytes xxh3-128 of the rest | msgpack of `State`

The newest two are kept. When one is damaged, recovery uses the one before and reads more of the log.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from buffers import events as e
from buffers.evaluation_statistics import EvaluationResult
from buffers.files import list_numbers, replace_file
from buffers.run_status import StepRecord

log = logging.getLogger("slipstream.buffer")

MAGIC = b"SLIPST01"
NUM_KEPT = 2
"""States that are kept in the folder."""


class AttemptState(msgspec.Struct, array_like=True):
    """One lease of one group (`attempts.Attempt`).

    Its deadline is not kept: after a restart it begins anew.
    """

    lease: int
    group: int
    generator: str
    num_tokens: int
    fate: str


class GroupState(msgspec.Struct, array_like=True):
    """A group that may still be trained, or was trained and may have to be again (`groups.GroupRecord`)."""

    number: int
    due: int
    num_failures: int
    num_uses: int
    attempts: list[int]
    content: e.Accepted | None
    prompt: int = -1
    """Index of the prompt; -1 in a state of before: then the order of prompts tells it."""


class StepState(msgspec.Struct, array_like=True):
    """A trained step that a rewind may undo (`history.TrainedStep`)."""

    trained: e.Trained
    is_first: list[bool]
    """For each group of the step, True when no step before had trained it."""


class PlacesState(msgspec.Struct, array_like=True):
    """The fields of `places.Places`."""

    next_place: int
    freed: list[int]
    extra: dict[int, int]
    filled: dict[int, int]
    filled_through: int


class LedgerState(msgspec.Struct, array_like=True):
    """The fields of `ledger.Ledger`."""

    generated: int
    leased: int
    tokens: dict[str, int]
    groups: dict[str, int]
    staleness: dict[int, int]
    replayed: int


class SourceState(msgspec.Struct, array_like=True):
    """The fields of `supply.SourceAccount`."""

    leased: int
    trained: int
    rejected: int
    rewards: list[float]


class CurriculumState(msgspec.Struct):
    """The knowledge of prompts that a curriculum has; each kind uses its part (`buffers.curriculum`)."""

    next_row: list[int] = []
    origins: dict[int, str] = {}
    """Prompts under way, the oldest first. The values say nothing any more."""
    again: dict[int, int] = {}
    """Groups beyond the first that ask a prompt under way."""
    queues: list[dict[str, bytes]] = []
    """By source and pool: the prompts, little-endian 64-bit numbers."""
    begun_early: list[int] = []
    level: int = 0
    recent: list[float] = []


class SupplyState(msgspec.Struct):
    """The account of each source, and the curriculum (`supply.PromptSupply`)."""

    sources: list[SourceState]
    curriculum: CurriculumState
    verdicts: list[str] = []
    """On the latest complete groups: why each was rejected, empty for those kept (`refills.RefillRecord`)."""
    rejected_in_a_row: int = 0


class StepRecordsState(msgspec.Struct, array_like=True):
    """The contents of `step_records.StepRecords`."""

    count: int
    began_at: float | None
    newest: list[StepRecord]


class BookState(msgspec.Struct, kw_only=True):
    """The contents of a `book.Book`."""

    version: int
    newest_version: int
    next_step: int
    trained_twice: int
    quarantined: int
    quarantine: dict[int, str]
    groups: list[GroupState]
    """Open and complete groups in the order of their numbers."""
    retired: list[GroupState]
    """Groups that are used up, and come back if the steps that trained them are undone."""
    attempts_under_way: list[AttemptState]
    attempts_ended: list[AttemptState]
    """The newest ended attempts, oldest first."""
    next_group: int
    places: PlacesState
    handed: dict[int, tuple[list[int], list[float]]]
    """By step: the groups that it was handed, and their weights."""
    trained: list[StepState]
    oldest_checkpoint: int
    ledger: LedgerState
    supply: SupplyState | None = None
    """None in a state of before."""


class State(msgspec.Struct, kw_only=True):
    """Everything that a buffer goes on from."""

    terms: dict[str, str | int | float | None]
    """The terms that the book was kept by when this was written."""
    book: BookState
    manifest_locator: str
    """Where the manifest of the newest version is."""
    unevaluated: list[int]
    """Versions whose evaluation is not finished."""
    carried_evaluations: list[tuple[int, str]] = []
    """(version, set) of those that are evaluated on a version at which they were not due; -1 for the next."""
    unevaluated_locators: dict[int, str] = {}
    """Where the manifests of those versions are."""
    num_evaluations: int = 0
    """Number of the newest result; the last of `evaluations` need not be it, because a rewind undoes
    results."""
    evaluation_numbers: list[int] = []
    """Numbers of the results; empty in a state of before: then they count from 1."""
    evaluations: list[EvaluationResult] = []
    """Results of the evaluations that are finished."""
    step_records: StepRecordsState | None = None
    """None in a state of before."""
    next_segment: int
    """Segments from this number on have not been written yet."""
    open_segment: tuple[int, int] | None
    """(number, bytes) of the segment that was being written."""


def state_path(journal: Path, number: int) -> Path:
    return journal / "state" / f"{number:06d}.state"


def state_numbers(journal: Path) -> list[int]:
    """Returns the numbers of the states in the folder, in order."""
    return list_numbers(journal / "state", ".state")


def write_state(journal: Path, number: int, state: bytes, *, sync: bool) -> None:
    """Writes an encoded state; it appears whole, and with `sync` on the disk. Raises DiskFull."""
    replace_file(state_path(journal, number), MAGIC + xxhash.xxh3_128_digest(state) + state, sync=sync)


def encode_state(state: State) -> bytes:
    return _encoder.encode(state)


def read_state(journal: Path, number: int) -> State | None:
    """Returns a state; None, and a line in the log, when the file is damaged."""
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
    """Returns the newest whole state and its number; (0, None) when there is none."""
    for number in reversed(state_numbers(journal)):
        if (state := read_state(journal, number)) is not None:
            return number, state
    return 0, None


def obsolete_states(numbers: Iterable[int]) -> list[int]:
    """Returns all numbers but those of the newest states, which are kept."""
    return sorted(numbers)[:-NUM_KEPT]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)
