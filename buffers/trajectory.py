"""The trajectory: the one record that crosses between processes.

The Arrow schema is derived from the dataclass and is wire, disk and batch format at once. One group is one record batch.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, get_type_hints

import numpy as np
import pyarrow as pa

from buffers.arrow_ipc import BadMessage, check_record_batch

SCHEMA_VERSION = 1
LONG = 2000
"""Tokens of a group from which on it is faster to look at each by itself."""

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
    """The batch as an Arrow IPC message. The schema does not travel: both sides know it, and name its version."""
    return batch.serialize()


def decode(data: bytes | memoryview | pa.Buffer) -> pa.RecordBatch:
    """The batch of a message, without a copy. Raises `Malformed`; never allocates what a message merely claims."""
    return _decode(memoryview(data).cast("B"))[0]


def _decode(view: memoryview) -> tuple[pa.RecordBatch, memoryview, list[list[int]]]:
    """(batch, body of the message, [offset, length] of each buffer)."""
    try:
        body, buffers = check_record_batch(view)
        batch = pa.ipc.read_record_batch(pa.py_buffer(view), SCHEMA)
        batch.validate(full=True)
    except (BadMessage, pa.ArrowException, OSError, ValueError) as error:
        raise Malformed(f"not an Arrow record batch of schema version {SCHEMA_VERSION}: {error}") from error
    return batch, body, buffers


def flat(batch: pa.RecordBatch | pa.Table, column: str) -> np.ndarray:
    """All values of a list column, row after row, in one array."""
    values = batch.column(column)
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return values.flatten().to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True)
class Expected:
    """The group that a lease is for."""

    group: int
    due: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the buffer needs to know of a group."""

    num_tokens: int
    """Sampled tokens."""
    oldest: int
    newest: int
    """Versions of its oldest and its newest sampled token."""
    reward_mean: float
    reward_std: float
    """Population standard deviation; 0 exactly when all rewards are equal."""
    versions: dict[int, int]
    """Sampled tokens by version; empty: all of them at `oldest`."""


def check_groups(
    data: bytes | memoryview | pa.Buffer, expected: Sequence[Expected], *, num_samples: int, newest_version: int
) -> tuple[pa.RecordBatch, list[Facts | Malformed]]:
    """The batch of a message, and of each expected group, in order, its facts or what is wrong with it.

    A whole, finite, consistent group has `num_samples` rows, 0 first, and versions up to `newest_version`. All groups are
    checked at once; only where a rule is broken, each by itself. Raises `Malformed` when the message cannot be read or has
    another number of rows.
    """
    batch, body, buffers = _decode(memoryview(data).cast("B"))
    if batch.num_rows != len(expected) * num_samples or not expected:
        raise Malformed(
            f"samples must be 0..{num_samples - 1} for each of {len(expected)} groups, got {batch.num_rows} rows"
        )
    try:
        return batch, list(_check(body, buffers, expected, num_samples, newest_version))
    except Malformed as error:
        if len(expected) == 1:
            return batch, [Malformed(f"group {expected[0].group}: {error}")]
    verdicts: list[Facts | Malformed] = []
    for number, one in enumerate(expected):
        alone = encode(batch.slice(number * num_samples, num_samples))
        verdicts += check_groups(alone, [one], num_samples=num_samples, newest_version=newest_version)[1]
    return batch, verdicts


def _check(
    body: memoryview, buffers: list[list[int]], expected: Sequence[Expected], num_samples: int, newest_version: int
) -> Iterator[Facts]:
    """Raises Malformed with the first rule that some group breaks."""
    num_groups = len(expected)
    n = num_groups * num_samples

    def column(name: str, plus: int, dtype: type, count: int) -> np.ndarray:
        """[count] of a column's buffer: its values (1), or for a list its offsets (1) or values (3)."""
        offset, length = buffers[_FIRST_BUFFER[name] + plus]
        if length < count * np.dtype(dtype).itemsize:
            raise Malformed(f"column `{name}` must have {count} values, got {length} bytes")
        return np.frombuffer(body, dtype, count, offset)

    def must(holds: np.bool_ | bool, rule: str) -> None:
        if not holds:
            raise Malformed(rule)

    for name, wanted in (
        ("group", [one.group for one in expected]),
        ("due", [one.due for one in expected]),
        ("prompt_id", [one.prompt for one in expected]),
    ):
        values = column(name, 1, np.int64, n).reshape(num_groups, num_samples)
        must((values == np.array(wanted)[:, None]).all(), f"column `{name}` must hold {wanted[0]}")
    samples = column("sample", 1, np.int64, n).reshape(num_groups, num_samples)
    must((samples == np.arange(num_samples)).all(), f"samples must be 0..{num_samples - 1}")
    offsets = column("tokens", 1, np.int32, n + 1)
    must(offsets[0] == 0 and (offsets[1:] > offsets[:-1]).all(), "a trajectory must hold at least one token")
    for name in ("sampled", "logprobs", "versions"):
        must((column(name, 1, np.int32, n + 1) == offsets).all(), f"`{name}` must be as long as `tokens`")
    total, starts = int(offsets[-1]), offsets[:-1:num_samples]
    bits = column("sampled", 3, np.uint8, -(-total // 8))
    logprobs, versions = column("logprobs", 3, np.float32, total), column("versions", 3, np.int32, total)
    must(column("tokens", 3, np.int32, total).min() >= 0, "tokens must be >= 0")
    lowest, highest = float(logprobs.min()), float(logprobs.max())
    must(math.isfinite(lowest) and math.isfinite(highest), "logprobs must be finite")
    must(highest <= 1e-3, "logprobs must be <= 0 (but for rounding)")
    sampled = versions >= 0
    found = np.packbits(sampled, bitorder="little")
    last = 0xFF >> (-total % 8)  # the bits of the last byte that speak of tokens
    same = found[:-1].tobytes() == bits[:-1].tobytes() and found[-1] == bits[-1] & last
    must(same, "versions must be >= 0 where sampled, and only there")
    must(not sampled[offsets[:-1]].any(), "the first token must not be sampled")
    newest = _by_group(np.maximum, versions, starts)
    must(newest.min() >= 0, "at least one token must be sampled")
    must(newest.max() <= newest_version, f"versions must be in 0..{newest_version}")
    oldest = _by_group(np.minimum, versions.view(np.uint32), starts)  # -1 becomes the largest
    num_tokens = _by_group(np.add, sampled, starts)
    rewards = column("reward", 1, np.float32, n).reshape(num_groups, num_samples).astype(float)
    must(np.isfinite(rewards).all(), "reward must be finite, and some is NaN or infinite")
    std = np.where(rewards.max(1) > rewards.min(1), rewards.std(1), 0.0)
    facts = (num_tokens, oldest, newest, rewards.mean(1), std)
    ends = [*starts[1:].tolist(), total]
    for number, (tokens, low, high, mean, deviation) in enumerate(zip(*(fact.tolist() for fact in facts), strict=True)):
        by_version = {}
        if low != high:
            found, counts = np.unique(versions[starts[number] : ends[number]], return_counts=True)
            by_version = {int(v): int(c) for v, c in zip(found, counts, strict=True) if v >= 0}
        yield Facts(tokens, low, high, mean, deviation, by_version)


def _by_group(operation: np.ufunc, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[groups]: the values from each start to the next, reduced."""
    if len(values) < LONG * len(starts):
        return operation.reduceat(values, starts, dtype=np.int64 if operation is np.add else None)
    parts = np.split(values, starts[1:])  # one by one uses vector instructions, which `reduceat` does not
    return np.array([np.count_nonzero(part) if operation is np.add else operation.reduce(part) for part in parts])


def _first_buffers() -> dict[str, int]:
    """Where each column's buffers begin among those of a record batch (Arrow format: depth first, validity before data)."""

    def count(kind: pa.DataType) -> int:
        if pa.types.is_list(kind):
            return 2 + count(kind.value_type)
        if pa.types.is_map(kind):
            return 2 + 1 + count(kind.key_type) + count(kind.item_type)
        return 3 if pa.types.is_string(kind) else 2

    counts = [count(column.type) for column in SCHEMA]
    return dict(zip(SCHEMA.names, itertools.accumulate(counts, initial=0), strict=False))


_FIRST_BUFFER = _first_buffers()
