"""The trajectory: the one record that crosses between processes.

The Arrow schema is derived from the dataclass and is wire, disk and batch format at once. One group is one record batch.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, get_type_hints

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1

Int = Annotated[int, pa.int64()]
Text = Annotated[str, pa.string()]
Tokens = Annotated[list[int], pa.list_(pa.int32())]
Flags = Annotated[list[bool], pa.list_(pa.bool_())]
Floats = Annotated[list[float], pa.list_(pa.float32())]
Time = Annotated[float, pa.float64()]


class Malformed(ValueError):
    """A record that is not what the schema says. It is refused and counted, and never stops the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence of T tokens: prompt, sampled and environment tokens in order."""

    group: Int
    """Group number, in lease order."""
    sample: Int
    """Index within the group, 0 .. samples_per_prompt - 1."""
    due: Int
    """Step that the group is due at."""
    prompt_id: Int
    """Index of the prompt in its task."""
    task: Text
    tokens: Tokens
    """[T]"""
    sampled: Flags
    """[T]: true where the policy sampled the token. Only these are trained."""
    logprobs: Floats
    """[T]: log-probability under the behaviour policy (after temperature), 0 where not sampled."""
    versions: Tokens
    """[T]: version that sampled the token, as the engine reports it; -1 where not sampled."""
    reward: Annotated[float, pa.float32()]
    rewards: Annotated[dict[str, float], pa.map_(pa.string(), pa.float32())] = field(default_factory=dict)
    """Components of the reward by name."""
    finish_reason: Text
    """`stop` (end of sequence) or `length`."""
    generator: Text
    started_at: Time
    """Unix time in seconds: when the first token was asked for."""
    finished_at: Time
    """Unix time in seconds."""
    extra: Text = "{}"
    """Anything a task wants to keep, as JSON."""


def _derive_schema() -> pa.Schema:
    hints = get_type_hints(Trajectory, include_extras=True)
    columns = [pa.field(f.name, hints[f.name].__metadata__[0], nullable=False) for f in fields(Trajectory)]
    return pa.schema(columns, metadata={"slipstream.schema": str(SCHEMA_VERSION)})


SCHEMA = _derive_schema()


def to_batch(group: list[Trajectory]) -> pa.RecordBatch:
    """One record batch, a row a trajectory, in the given order."""
    columns = []
    for column in SCHEMA:
        values = [getattr(t, column.name) for t in group]
        if pa.types.is_map(column.type):
            values = [list(v.items()) for v in values]
        columns.append(pa.array(values, type=column.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch as an Arrow IPC stream, schema included."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode(data: bytes | memoryview) -> pa.RecordBatch:
    """The one batch of an IPC stream, without a copy. Raises `Malformed`."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            batch = reader.read_next_batch()
            batch.validate(full=True)
    except (pa.ArrowException, StopIteration, OSError, ValueError) as error:
        raise Malformed(f"not an Arrow stream of one batch: {error}") from error
    version = (batch.schema.metadata or {}).get(b"slipstream.schema", b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise Malformed(f"schema version must be {SCHEMA_VERSION}, got {version}")
    if batch.schema != SCHEMA:
        raise Malformed(f"schema must be {SCHEMA.names}, got {batch.schema.names}")
    return batch


def flat(batch: pa.RecordBatch | pa.Table, column: str) -> np.ndarray:
    """All values of a list column, row after row, in one array."""
    values = batch.column(column)
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return values.flatten().to_numpy(zero_copy_only=False)


def check_group(batch: pa.RecordBatch, *, group: int, due: int, num_samples: int, newest_version: int) -> None:
    """Raises `Malformed` unless the batch is a whole, finite, consistent group for this lease."""

    def must(holds: bool, rule: str) -> None:
        if not holds:
            raise Malformed(f"group {group}: {rule}")

    nulls = [name for name in batch.schema.names if batch.column(name).null_count]
    must(not nulls, f"columns must hold no nulls, got some in {nulls}")
    must(batch.column("group").to_pylist() == [group] * batch.num_rows, f"column `group` must hold {group}")
    must(batch.column("due").to_pylist() == [due] * batch.num_rows, f"column `due` must hold {due}")
    samples = batch.column("sample").to_pylist()
    must(samples == list(range(num_samples)), f"samples must be 0..{num_samples - 1}, got {samples}")
    lengths = batch.column("tokens").value_lengths()
    must(min(lengths.to_pylist()) >= 1, "a trajectory must hold at least one token")
    for name in ("sampled", "logprobs", "versions"):
        must(batch.column(name).value_lengths() == lengths, f"`{name}` must be as long as `tokens`")
        must(batch.column(name).flatten().null_count == 0, f"`{name}` must hold no nulls")
    sampled, logprobs, versions = (flat(batch, name) for name in ("sampled", "logprobs", "versions"))
    must(bool(flat(batch, "tokens").min() >= 0), "tokens must be >= 0")
    must(not any(row[0] for row in batch.column("sampled").to_pylist()), "the first token must not be sampled")
    must(bool(np.isfinite(logprobs).all()), "logprobs must be finite")
    must(bool((logprobs <= 1e-3).all()), "logprobs must be <= 0 (but for rounding)")
    versioned = versions[sampled]
    must(bool(((versioned >= 0) & (versioned <= newest_version)).all()), f"versions must be in 0..{newest_version}")
    for trajectory, reward in enumerate(batch.column("reward").to_pylist()):
        must(bool(np.isfinite(reward)), f"reward must be finite, got {reward} for sample {trajectory}")
