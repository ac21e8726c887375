"""The trajectory: the one record that crosses between processes.

The Arrow schema is derived from the dataclass and is wire, disk and batch format at once. One group is one record batch.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Annotated, get_type_hints

import numpy as np
import pyarrow as pa

from buffers.arrow_ipc import BadMessage, check_record_batch, is_aligned, layout_of

SCHEMA_VERSION = 2
GREEDY = "greedy"
"""The component of a reward that holds the reward of the greedy response to the same prompt (ReMax's baseline)."""
LONG = 2000
"""Tokens of a group from which on it is faster to look at each by itself."""

Int = Annotated[int, pa.int64()]
Text = Annotated[str, pa.string()]
Tokens = Annotated[list[int], pa.list_(pa.int32())]
Flags = Annotated[list[bool], pa.list_(pa.bool_())]
Floats = Annotated[list[float], pa.list_(pa.float32())]
Experts = Annotated[Sequence[int] | np.ndarray, pa.list_(pa.int16())]
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
    """Components of the reward by name; `GREEDY` is one that a generator adds, not the task."""
    finish_reason: Text
    """`stop` (end of sequence) or `length`."""
    generator: Text
    started_at: Time
    """Unix time in seconds: when the first token was asked for."""
    finished_at: Time
    """Unix time in seconds."""
    extra: Text = "{}"
    """Anything a task wants to keep, as JSON."""
    experts: Experts = field(default_factory=list)
    """[T · layers · k], token by token and layer by layer (`learner.moe.router_replay`): the experts that the engine's routers chose for
    the token when it went into the model; -1 where it did not, as the last one. Empty where nothing was recorded."""


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


def _one_row() -> pa.RecordBatch:
    return to_batch(
        [
            Trajectory(
                group=1, sample=1, due=1, prompt_id=1, task="t", tokens=[1], sampled=[True], logprobs=[-1.0], versions=[1],
                reward=1.0, finish_reason="stop", generator="g", started_at=1.0, finished_at=1.0,
            )
        ]
    )  # fmt: skip


_LAYOUT = layout_of(memoryview(encode(_one_row())))


def decode(data: bytes | memoryview | pa.Buffer) -> pa.RecordBatch:
    """The batch of a message, without a copy. Raises `Malformed`; never allocates what a message merely claims."""
    return _decode(memoryview(data).cast("B"))[0]


def _decode(view: memoryview) -> tuple[pa.RecordBatch, memoryview, list[list[int]]]:
    """(batch, body of the message, [offset, length] of each buffer)."""
    try:
        body, buffers = check_record_batch(view, _LAYOUT)
        if (
            len(buffers) != _NUM_BUFFERS
        ):  # pyarrow does not look for the last one, where the last column is empty
            raise BadMessage(f"{_NUM_BUFFERS} buffers are needed, got {len(buffers)}")
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
class Routing:
    """What the trajectories of a run hold in `experts`."""

    per_token: int = 0
    """Layers × experts a token; 0: nothing is recorded."""
    num_experts: int = 0


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


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in a message."""

    batch: pa.RecordBatch
    verdicts: list[Facts | Malformed]
    """Of each expected group, in order."""
    storable: bool
    """Whether the message may be stored as it came: all groups are in order, and the buffers aligned."""


def check_groups(
    data: bytes | memoryview | pa.Buffer, expected: Sequence[Expected], *, num_samples: int, newest_version: int,
    longest: int = 2**31 - 1, vocabulary: int = 2**31, routing: Routing = Routing(),
) -> Checked:  # fmt: skip
    """Reads a message, and finds of each expected group its facts or what is wrong with it.

    A whole, finite, consistent group has `num_samples` rows, 0 first, of at most `longest` tokens, each below `vocabulary`,
    versions up to `newest_version`, and experts as `routing` says. All groups are
    checked at once; only where a rule is broken, each by itself. Raises `Malformed` when the message cannot be read or has
    another number of rows.
    """
    view = memoryview(data).cast("B")
    batch, body, buffers = _decode(view)
    if batch.num_rows != len(expected) * num_samples or not expected:
        raise Malformed(
            f"samples must be 0..{num_samples - 1} for each of {len(expected)} groups, got {batch.num_rows} rows"
        )
    try:
        if not np.isfinite(batch.column("rewards").items.to_numpy(zero_copy_only=False)).all():
            raise Malformed("rewards must be finite, and some component is NaN or infinite")
        facts = list(
            _check(body, buffers, expected, num_samples, newest_version, longest, vocabulary, routing)
        )
        return Checked(batch, [*facts], is_aligned(view, buffers))
    except Malformed as error:
        if len(expected) == 1:
            return Checked(batch, [Malformed(f"group {expected[0].group}: {error}")], False)
    verdicts: list[Facts | Malformed] = []
    for number, one in enumerate(expected):
        alone = encode(batch.slice(number * num_samples, num_samples))
        verdicts += check_groups(
            alone, [one], num_samples=num_samples, newest_version=newest_version, longest=longest, vocabulary=vocabulary,
            routing=routing,
        ).verdicts  # fmt: skip
    return Checked(batch, verdicts, False)


def _check(
    body: memoryview, buffers: list[list[int]], expected: Sequence[Expected], num_samples: int, newest_version: int,
    longest: int, vocabulary: int, routing: Routing,
) -> Iterator[Facts]:  # fmt: skip
    """Raises Malformed with the first rule that some group breaks."""
    num_groups = len(expected)
    n = num_groups * num_samples

    def part(name: str, plus: int, size: int) -> memoryview:
        """The first bytes of a column's buffer: its values (1), or for a list its offsets (1) or values (3)."""
        offset, length = buffers[_FIRST_BUFFER[name] + plus]
        if length < size:
            raise Malformed(f"column `{name}` must have {size} bytes, got {length}")
        return body[offset : offset + size]

    def must(holds: np.bool_ | bool, rule: str) -> None:
        if not holds:
            raise Malformed(rule)

    # The cost of this function is the number of calls into numpy, unless groups are long: equality is left to bytes.
    identity = np.array([(one.group, one.due, one.prompt) for one in expected]).T.repeat(num_samples, axis=1)
    for name, wanted in zip(("group", "due", "prompt_id"), identity, strict=True):
        must(part(name, 1, 8 * n) == wanted.tobytes(), f"column `{name}` must hold {wanted[0]}")
    must(
        part("sample", 1, 8 * n) == _sample_numbers(num_groups, num_samples),
        f"samples must be 0..{num_samples - 1}",
    )
    offsets = np.frombuffer(part("tokens", 1, 4 * (n + 1)), np.int32)
    must(offsets[0] == 0 and (offsets[1:] > offsets[:-1]).all(), "a trajectory must hold at least one token")
    must((offsets[1:] - offsets[:-1]).max() <= longest, f"a trajectory must hold at most {longest} tokens")
    for name in ("sampled", "logprobs", "versions"):
        must(part(name, 1, 4 * (n + 1)) == offsets.tobytes(), f"`{name}` must be as long as `tokens`")
    of_experts, width = part("experts", 1, 4 * (n + 1)), routing.per_token
    lengths = "hold nothing" if width == 0 else f"hold {width} for each token"
    must(
        (np.frombuffer(of_experts, np.int32) == offsets.astype(np.int64) * width).all(),
        f"`experts` must {lengths}",
    )
    experts = np.frombuffer(part("experts", 3, 2 * width * int(offsets[-1])), np.int16)
    bounds = f"experts must be in -1..{routing.num_experts - 1}"
    must(not len(experts) or -1 <= experts.min() <= experts.max() < routing.num_experts, bounds)
    total, starts = int(offsets[-1]), offsets[:-1:num_samples]
    tokens = np.frombuffer(part("tokens", 3, 4 * total), np.int32)
    must(tokens.min() >= 0, "tokens must be >= 0")
    must(tokens.max() < vocabulary, f"tokens must be below {vocabulary}, the size of the model's vocabulary")
    logprobs = np.frombuffer(part("logprobs", 3, 4 * total), np.float32)
    lowest, highest = float(logprobs.min()), float(logprobs.max())
    must(math.isfinite(lowest) and math.isfinite(highest), "logprobs must be finite")
    must(highest <= 1e-3, "logprobs must be <= 0 (but for rounding)")
    versions = np.frombuffer(part("versions", 3, 4 * total), np.int32)
    sampled = versions >= 0
    found, bits = (
        np.packbits(sampled, bitorder="little").tobytes(),
        part("sampled", 3, -(-total // 8)).tobytes(),
    )
    last = 0xFF >> (-total % 8)  # the bits of the last byte that speak of tokens
    same = found[:-1] == bits[:-1] and found[-1] == bits[-1] & last
    must(same, "versions must be >= 0 where sampled, and only there")
    must(not sampled[offsets[:-1]].any(), "the first token must not be sampled")
    num_tokens = _by_group(np.add, sampled, starts).tolist()
    must(min(num_tokens) > 0, "at least one token must be sampled")
    newest = int(versions.max())
    must(newest <= newest_version, f"versions must be in 0..{newest_version}")
    unsigned = versions.view(np.uint32)  # -1 becomes the largest
    if int(unsigned.min()) == newest:
        spans = [(newest, newest)] * num_groups
    else:
        ends = (
            _by_group(np.minimum, unsigned, starts).tolist(),
            _by_group(np.maximum, versions, starts).tolist(),
        )
        spans = list(zip(*ends, strict=True))
    rewards = (
        np.frombuffer(part("reward", 1, 4 * n), np.float32).reshape(num_groups, num_samples).astype(float)
    )
    means = rewards.sum(1) / num_samples
    must(np.isfinite(means).all(), "reward must be finite, and some is NaN or infinite")
    deviations = np.where(
        rewards.max(1) > rewards.min(1),
        np.sqrt(np.square(rewards - means[:, None]).sum(1) / num_samples),
        0.0,
    )
    stops = [*starts[1:].tolist(), total]
    for number, (mean, deviation) in enumerate(zip(means.tolist(), deviations.tolist(), strict=True)):
        low, high = spans[number]
        by_version = {}
        if low != high:
            values, counts = np.unique(versions[starts[number] : stops[number]], return_counts=True)
            by_version = {v: c for v, c in zip(values.tolist(), counts.tolist(), strict=True) if v >= 0}
        yield Facts(num_tokens[number], low, high, mean, deviation, by_version)


def divide_groups(
    data: memoryview, num_groups: int, wanted: Container[int], num_samples: int
) -> tuple[memoryview, dict[int, int]]:
    """(message with the wanted groups alone, sampled tokens of each of the others). Raises Malformed."""
    batch = decode(data)
    if batch.num_rows != num_groups * num_samples:
        raise Malformed(
            f"{num_groups} groups must have {num_groups * num_samples} rows, got {batch.num_rows}"
        )
    groups = [batch.slice(place * num_samples, num_samples) for place in range(num_groups)]
    kept = [group for place, group in enumerate(groups) if place in wanted] or [batch.slice(0, 0)]
    spent = {
        place: int(np.count_nonzero(flat(group, "sampled")))
        for place, group in enumerate(groups)
        if place not in wanted
    }
    return memoryview(encode(pa.concat_batches(kept))).cast("B"), spent


@lru_cache(16)
def _sample_numbers(num_groups: int, num_samples: int) -> bytes:
    return np.tile(np.arange(num_samples), num_groups).tobytes()


def _by_group(operation: np.ufunc, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[groups]: the values from each start to the next, reduced."""
    if len(values) < LONG * len(starts):
        return operation.reduceat(values, starts, dtype=np.int64 if operation is np.add else None)
    parts = np.split(values, starts[1:])  # one by one uses vector instructions, which `reduceat` does not
    return np.array(
        [np.count_nonzero(part) if operation is np.add else operation.reduce(part) for part in parts]
    )


def _place_buffers() -> tuple[dict[str, int], int]:
    """(where each column's buffers begin among those of a record batch, how many there are): Arrow format, depth first,
    validity before data."""

    def count(kind: pa.DataType) -> int:
        if pa.types.is_list(kind):
            return 2 + count(kind.value_type)
        if pa.types.is_map(kind):
            return 2 + 1 + count(kind.key_type) + count(kind.item_type)
        return 3 if pa.types.is_string(kind) else 2

    *starts, total = itertools.accumulate((count(column.type) for column in SCHEMA), initial=0)
    return dict(zip(SCHEMA.names, starts, strict=True)), total


_FIRST_BUFFER, _NUM_BUFFERS = _place_buffers()
