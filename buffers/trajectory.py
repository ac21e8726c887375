"""The trajectory: the one record that crosses between processes.

The Arrow schema is derived from the dataclass, and is wire, disk and batch format at once. A record batch
holds whole groups, one row for each trajectory. `buffers.group_checks` has the rules that a submitted group
must keep.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, get_type_hints

import numpy as np
import pyarrow as pa

from buffers.arrow_ipc import BadMessage, check_record_batch, find_layout

SCHEMA_VERSION = 3
GREEDY = "greedy"
"""Name of the reward component that holds the reward of the greedy response to the same prompt (ReMax's
baseline)."""
EPISODE_STOPS = (
    "completed",
    "max_turns",
    "max_tokens",
    "context_overflow",
    "parse_error",
    "timeout",
    "environment_error",
)
"""The ends that an episode can have."""

Int = Annotated[int, pa.int64()]
Text = Annotated[str, pa.string()]
Tokens = Annotated[list[int], pa.list_(pa.int32())]
Flags = Annotated[list[bool], pa.list_(pa.bool_())]
Floats = Annotated[list[float], pa.list_(pa.float32())]
Shorts = Annotated[list[int], pa.list_(pa.int16())]
Experts = Annotated[Sequence[int] | np.ndarray, pa.list_(pa.int16())]
Time = Annotated[float, pa.float64()]


class MalformedGroup(ValueError):
    """Raised for rows that are not as the schema and the rules say. They are refused and counted, and never
    stop the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence of T tokens: prompt, sampled and environment tokens in order."""

    group: Int
    """Group number, in lease order."""
    sample: Int
    """Index within the group, 0 .. samples_per_prompt - 1: the number of the episode."""
    branch: Annotated[int, pa.int16()] = 0
    """Index among the token sequences of the episode: it has several where its context was rewritten."""
    due: Int
    """Step that the group is due at."""
    prompt_id: Int
    """Index of the prompt in its task."""
    task: Text
    tokens: Tokens
    """[T]: prompt, sampled and environment tokens."""
    sampled: Flags
    """[T]: true where the policy sampled the token. Only these tokens are trained."""
    logprobs: Floats
    """[T]: log-probability under the behavior policy (after temperature), 0 where not sampled."""
    versions: Tokens
    """[T]: version that sampled the token, as the engine reports it; -1 where not sampled."""
    turn: Shorts = field(default_factory=list)
    """[T]: the turn of the episode in which the token was sampled; -1 where not sampled. Empty: all sampled
    tokens are of turn 0."""
    reward: Annotated[float, pa.float32()]
    """Reward of the episode. All its branches repeat it, as they repeat `rewards` and `stop`."""
    token_rewards: Floats = field(default_factory=list)
    """[T], or empty: the reward that was paid at each token. Over an episode's branches they sum to
    `reward`."""
    rewards: Annotated[dict[str, float], pa.map_(pa.string(), pa.float32())] = field(default_factory=dict)
    """Components of the reward by name. A generator adds `GREEDY`; all others come from the task."""
    finish_reason: Text
    """`stop` (end of sequence) or `length`, as the engine ended the last reply."""
    stop: Text = ""
    """The end of the episode: a word of `EPISODE_STOPS`. `to_batch` fills an empty text by
    `finish_reason`."""
    renderer: Text = ""
    """Name and version of the renderer that made tokens of the messages; empty where none did."""
    generator: Text
    started_at: Time
    """Unix time in seconds at which the first token was asked for."""
    finished_at: Time
    """Unix time in seconds at which the trajectory was complete."""
    extra: Text = "{}"
    """Further facts that a task keeps, as JSON."""
    experts: Experts = field(default_factory=list)
    """[T · layers · k]: the experts that the engine's routers chose for each token when it went into the
    model, token by token and layer by layer (`learner.moe.router_replay`); -1 where it did not go in, as the
    last token. Empty where nothing was recorded."""


def _derive_schema() -> pa.Schema:
    hints = get_type_hints(Trajectory, include_extras=True)
    columns = [pa.field(f.name, hints[f.name].__metadata__[0], nullable=False) for f in fields(Trajectory)]
    return pa.schema(columns, metadata={"slipstream.schema": str(SCHEMA_VERSION)})


SCHEMA = _derive_schema()


def to_batch(group: list[Trajectory]) -> pa.RecordBatch:
    """Returns a record batch with one row for each trajectory, in the given order."""
    columns = []
    for column in SCHEMA:
        values = [getattr(t, column.name) for t in group]
        if column.name == "stop":
            values = [stop or infer_stop(t.finish_reason) for stop, t in zip(values, group, strict=True)]
        if pa.types.is_map(column.type):
            values = [list(v.items()) for v in values]
        columns.append(pa.array(values, type=column.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def fill_turns(
    given: np.ndarray, given_lengths: np.ndarray, lengths: np.ndarray, sampled: np.ndarray
) -> np.ndarray:
    """Returns [T] int16 the turns of all tokens, from those of the rows that tell them, row after row.

    `given_lengths` [rows] has 0 where a row tells none: its tokens are of turn 0. `lengths` [rows] counts the
    tokens, and `sampled` [T] tells the sampled ones.
    """
    if len(given) == len(sampled):
        return given
    turns = sampled.view(np.int8).astype(np.int16) - 1
    turns[(given_lengths > 0).repeat(lengths)] = given
    return turns


def infer_stop(finish_reason: str) -> str:
    """Returns the column `stop` of an episode of one turn."""
    return "max_tokens" if finish_reason == "length" else "completed"


def encode_batch(batch: pa.RecordBatch) -> pa.Buffer:
    """Returns the batch as an Arrow IPC message. The schema does not travel: both sides know it, and name its
    version."""
    return batch.serialize()


def _make_example() -> pa.RecordBatch:
    """Returns a batch of one row in which no column is empty."""
    return to_batch(
        [
            Trajectory(
                group=1,
                sample=1,
                due=1,
                prompt_id=1,
                task="t",
                tokens=[1],
                sampled=[True],
                logprobs=[-1.0],
                versions=[1],
                reward=1.0,
                finish_reason="stop",
                generator="g",
                started_at=1.0,
                finished_at=1.0,
            )
        ]
    )


USUAL_LAYOUT = find_layout(memoryview(encode_batch(_make_example())))
"""Layout of the metadata that every honest sender's messages have."""


def decode_batch(data: bytes | memoryview | pa.Buffer) -> pa.RecordBatch:
    """Returns the batch of a message, without a copy.

    Raises MalformedGroup for any other bytes. Never allocates memory that a message merely claims to need.
    """
    return decode_buffers(memoryview(data).cast("B"))[0]


def decode_buffers(view: memoryview) -> tuple[pa.RecordBatch, memoryview, list[list[int]]]:
    """Returns (batch, body of the message, [offset, length] of each buffer in it). Raises MalformedGroup."""
    try:
        body, buffers = check_record_batch(view, USUAL_LAYOUT)
        # pyarrow does not look for the last buffer where the last column is empty, so it would not miss it.
        if len(buffers) != NUM_BUFFERS:
            raise BadMessage(f"{NUM_BUFFERS} buffers are needed, got {len(buffers)}")
        batch = pa.ipc.read_record_batch(pa.py_buffer(view), SCHEMA)
        batch.validate(full=True)
    except (BadMessage, pa.ArrowException, OSError, ValueError) as error:
        raise MalformedGroup(
            f"not an Arrow record batch of schema version {SCHEMA_VERSION}: {error}"
        ) from error
    return batch, body, buffers


def flatten_column(batch: pa.RecordBatch | pa.Table, column: str) -> np.ndarray:
    """Returns all values of a list column, row after row, in one array."""
    return flatten_lists(batch.column(column)).to_numpy(zero_copy_only=False)


def flatten_lists(column: pa.ListArray | pa.ChunkedArray) -> pa.Array:
    """Returns all values of a list column as one array; a column that is one chunk is not copied."""
    if isinstance(column, pa.ListArray):
        return column.flatten()
    # Lists are not put into one array first: their offsets have 32 bits, which the experts of a large step
    # outgrow.
    parts = [chunk.flatten() for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else pa.chunked_array(parts, column.type.value_type).combine_chunks()


def place_buffers(schema: pa.Schema) -> tuple[dict[str, int], int]:
    """Returns (number of the first buffer of each column in a record batch, number of all buffers).

    Arrow's format lists buffers depth first, and the validity of a column before its data.
    """

    def count_buffers(kind: pa.DataType) -> int:
        if pa.types.is_list(kind):
            return 2 + count_buffers(kind.value_type)
        if pa.types.is_map(kind):
            return 2 + 1 + count_buffers(kind.key_type) + count_buffers(kind.item_type)
        return 3 if pa.types.is_string(kind) else 2

    *starts, total = itertools.accumulate((count_buffers(column.type) for column in schema), initial=0)
    return dict(zip(schema.names, starts, strict=True)), total


FIRST_BUFFER, NUM_BUFFERS = place_buffers(SCHEMA)
"""Number of each column's first buffer in a record batch, and of all its buffers."""
