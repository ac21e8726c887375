"""The rules that a submitted group must keep, and the facts that the buffer books of a group that keeps them.

A generator may send anything, so nothing is trusted: not the message's metadata (`arrow_ipc`), not the
columns, and not the values in them. All groups of a message are checked at once, in numpy, on the message's
own buffers without a copy. The rules of episodes stand in `buffers.episode_checks`.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from buffers.arrow_ipc import is_aligned
from buffers.episode_checks import MOST_TURNS, check_ends, check_token_rewards, check_turns, find_episodes
from buffers.message_columns import LIST_OFFSETS, LIST_VALUES, VALUES, MessageColumns, require
from buffers.trajectory import (
    MalformedGroup,
    decode_batch,
    decode_buffers,
    encode_batch,
    flatten_column,
)

LONG_GROUP = 2000
"""Tokens of a group from which on it is faster to reduce each group by itself."""
MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; this much more is rounding."""


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """The group that a lease is for."""

    group: int
    """Group number."""
    due: int
    """Step that the group is due at."""
    prompt: int
    """Index of the prompt in its task."""
    rows: int
    """Rows that the request gives it: one for each sample, or more where an episode has several branches."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The contents of a run's `experts` column."""

    per_token: int = 0
    """Layers × experts of each token; 0 when nothing is recorded."""
    num_experts: int = 0
    """Experts of a layer."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts that the buffer books of a whole group."""

    num_tokens: int
    """Sampled tokens."""
    oldest_version: int
    """Version of its oldest sampled token."""
    newest_version: int
    """Version of its newest sampled token."""
    reward_mean: float
    reward_std: float
    """Population standard deviation; 0 exactly when all rewards are equal."""
    tokens_by_version: dict[int, int]
    """Sampled tokens by version; empty when all of them are of `oldest_version`."""


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """A message's rows and the verdict on each of its groups."""

    batch: pa.RecordBatch
    verdicts: list[GroupFacts | MalformedGroup]
    """One for each expected group, in order."""
    is_storable: bool
    """True when the message may be stored as it came: all groups are whole, and its buffers are aligned."""


def check_groups(
    data: bytes | memoryview | pa.Buffer,
    expected: Sequence[ExpectedGroup],
    *,
    num_samples: int,
    newest_version: int,
    longest: int = 2**31 - 1,
    vocabulary: int = 2**31,
    routing: ExpertsShape = ExpertsShape(),
    max_turns: int = MOST_TURNS,
) -> CheckedMessage:
    """Reads a message and finds the facts of each expected group, or the rule that it breaks.

    A whole, finite, consistent group has `num_samples` episodes, numbered from 0, on at most `max_turns`
    branches each, of at most `longest` tokens each. Its tokens are below `vocabulary`, its versions go up to
    `newest_version`, its turns are below `max_turns`, and its experts are as `routing` says.

    Raises MalformedGroup when the message cannot be read or has another number of rows.
    """
    view = memoryview(data).cast("B")
    batch, body, buffers = decode_buffers(view)
    rows = [one.rows for one in expected]
    if batch.num_rows != sum(rows) or not expected:
        raise MalformedGroup(
            f"samples must be 0..{num_samples - 1} for each of {len(expected)} groups, in {sum(rows)} rows, "
            f"got {batch.num_rows} rows"
        )
    try:
        require(
            np.isfinite(batch.column("rewards").items.to_numpy(zero_copy_only=False)).all(),
            "rewards must be finite, and some component is NaN or infinite",
        )
        columns = MessageColumns(batch, body, buffers, rows, num_samples)
        facts = _check_columns(columns, expected, newest_version, longest, vocabulary, routing, max_turns)
        return CheckedMessage(batch, [*facts], is_aligned(view, buffers))
    except MalformedGroup as error:
        if len(expected) == 1:
            return CheckedMessage(batch, [MalformedGroup(f"group {expected[0].group}: {error}")], False)
    # Some group breaks a rule. Each is checked by itself now, so that one bad group does not cost the others.
    verdicts: list[GroupFacts | MalformedGroup] = []
    for one, group in zip(expected, slice_groups(batch, rows), strict=True):
        verdicts += check_groups(
            encode_batch(group),
            [one],
            num_samples=num_samples,
            newest_version=newest_version,
            longest=longest,
            vocabulary=vocabulary,
            routing=routing,
            max_turns=max_turns,
        ).verdicts
    return CheckedMessage(batch, verdicts, False)


def slice_groups(batch: pa.RecordBatch, rows: Sequence[int]) -> list[pa.RecordBatch]:
    """Returns the rows of each group, without a copy. `rows` gives their number in each."""
    starts = itertools.accumulate(rows, initial=0)
    return [batch.slice(start, count) for start, count in zip(starts, rows, strict=False)]


def split_message(
    data: memoryview, rows: Sequence[int], wanted: Container[int]
) -> tuple[memoryview, dict[int, int]]:
    """Returns (message with the wanted groups alone, sampled tokens of each other group by its place in the
    message). `rows` gives the rows of each group.

    Raises MalformedGroup when the message cannot be read or has another number of rows.
    """
    batch = decode_batch(data)
    if batch.num_rows != sum(rows):
        raise MalformedGroup(f"{len(rows)} groups must have {sum(rows)} rows, got {batch.num_rows}")
    groups = slice_groups(batch, rows)
    kept = [group for place, group in enumerate(groups) if place in wanted] or [batch.slice(0, 0)]
    spent = {
        place: int(np.count_nonzero(flatten_column(group, "sampled")))
        for place, group in enumerate(groups)
        if place not in wanted
    }
    return memoryview(encode_batch(pa.concat_batches(kept))).cast("B"), spent


# ---- the rules, in the order in which they are checked
#
# Their cost is the number of calls into numpy, unless groups are long. So equality is left to comparisons of
# bytes, and each rule looks at the columns of all groups together.


def _check_columns(
    columns: MessageColumns,
    expected: Sequence[ExpectedGroup],
    newest_version: int,
    longest: int,
    vocabulary: int,
    routing: ExpertsShape,
    max_turns: int,
) -> Iterator[GroupFacts]:
    """Yields the facts of each group. Raises MalformedGroup with the first rule that some group breaks."""
    _check_identity(columns, expected)
    episodes = find_episodes(columns, max_turns)
    offsets = _check_lengths(columns, longest)
    _check_experts(columns, offsets, routing)
    total, starts = int(offsets[-1]), offsets[episodes.first_rows[:: columns.num_samples]]
    _check_tokens(columns, total, vocabulary)
    _check_logprobs(columns, total)
    versions, sampled = _check_versions(columns, offsets, newest_version)
    num_tokens = _reduce_groups(np.add, sampled, starts).tolist()
    require(min(num_tokens) > 0, "at least one token must be sampled")
    check_turns(columns, offsets, sampled, episodes, max_turns)
    rewards = columns.take_values("reward", np.float32)
    means, deviations = _check_rewards(rewards[episodes.first_rows].reshape(-1, columns.num_samples))
    check_token_rewards(columns, offsets, rewards, episodes)
    check_ends(columns, episodes)
    spans = _find_version_spans(versions, starts)
    stops = [*starts[1:].tolist(), total]
    for number, (oldest, newest) in enumerate(spans):
        by_version = {}
        if oldest != newest:
            by_version = _count_versions(versions[starts[number] : stops[number]])
        yield GroupFacts(num_tokens[number], oldest, newest, means[number], deviations[number], by_version)


def _check_identity(columns: MessageColumns, expected: Sequence[ExpectedGroup]) -> None:
    """Every row names the group, the step and the prompt of its lease."""
    rows = np.array([(one.group, one.due, one.prompt) for one in expected])
    wanted = rows.T.repeat(columns.rows, axis=1)
    for name, values in zip(("group", "due", "prompt_id"), wanted, strict=True):
        require(
            columns.holds_bytes(name, VALUES, values.tobytes()),
            f"column `{name}` must hold {values[0]}",
        )


def _check_lengths(columns: MessageColumns, longest: int) -> np.ndarray:
    """Every trajectory has at least one token and not too many, and all its columns are as long.

    Returns [rows + 1] int32: the offsets of the trajectories among all tokens.
    """
    offsets = np.frombuffer(columns.take_offsets("tokens"), np.int32)
    require(
        offsets[0] == 0 and (offsets[1:] > offsets[:-1]).all(), "a trajectory must hold at least one token"
    )
    require((offsets[1:] - offsets[:-1]).max() <= longest, f"a trajectory must hold at most {longest} tokens")
    wanted = offsets.tobytes()
    for name in ("sampled", "logprobs", "versions"):
        require(columns.holds_bytes(name, LIST_OFFSETS, wanted), f"`{name}` must be as long as `tokens`")
    return offsets


def _check_experts(columns: MessageColumns, offsets: np.ndarray, routing: ExpertsShape) -> None:
    """Every token has the experts of its routing: a fixed number, each of them an expert or -1."""
    width = routing.per_token
    found = np.frombuffer(columns.take_offsets("experts"), np.int32)
    lengths = "hold nothing" if width == 0 else f"hold {width} for each token"
    # In int64: tokens × width may be beyond int32, in which a wrong length could come out right.
    require((found == offsets.astype(np.int64) * width).all(), f"`experts` must {lengths}")
    experts = columns.take_items("experts", np.int16, width * int(offsets[-1]))
    require(
        not len(experts) or -1 <= experts.min() <= experts.max() < routing.num_experts,
        f"experts must be in -1..{routing.num_experts - 1}",
    )


def _check_tokens(columns: MessageColumns, total: int, vocabulary: int) -> None:
    """Every token is in the vocabulary: another one would end the learner at its embedding."""
    tokens = columns.take_items("tokens", np.int32, total)
    require(tokens.min() >= 0, "tokens must be >= 0")
    require(
        tokens.max() < vocabulary, f"tokens must be below {vocabulary}, the size of the model's vocabulary"
    )


def _check_logprobs(columns: MessageColumns, total: int) -> None:
    """Every log-probability is finite and at most 0."""
    logprobs = columns.take_items("logprobs", np.float32, total)
    # NaN anywhere makes both extremes NaN, so the extremes alone tell whether all are finite.
    lowest, highest = float(logprobs.min()), float(logprobs.max())
    require(math.isfinite(lowest) and math.isfinite(highest), "logprobs must be finite")
    require(highest <= MAX_LOGPROB, "logprobs must be <= 0 (but for rounding)")


def _check_versions(
    columns: MessageColumns, offsets: np.ndarray, newest_version: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exactly the sampled tokens have a version, which is published, and a trajectory begins with a token of
    the prompt.

    Returns ([tokens] int32 versions, [tokens] bool: where sampled).
    """
    total = int(offsets[-1])
    versions = columns.take_items("versions", np.int32, total)
    sampled = versions >= 0
    # `sampled` came as bits. The computed bits are packed too and compared as bytes; the last byte holds bits
    # beyond the last token, which say nothing.
    computed = np.packbits(sampled, bitorder="little").tobytes()
    came = columns.take_bytes("sampled", LIST_VALUES, -(-total // 8)).tobytes()
    last = 0xFF >> (-total % 8)
    require(
        computed[:-1] == came[:-1] and computed[-1] == came[-1] & last,
        "versions must be >= 0 where sampled, and only there",
    )
    require(not sampled[offsets[:-1]].any(), "the first token must not be sampled")
    require(int(versions.max()) <= newest_version, f"versions must be in 0..{newest_version}")
    return versions, sampled


def _check_rewards(of_episodes: np.ndarray) -> tuple[list[float], list[float]]:
    """Every reward is finite. Takes [groups, episodes of each].

    Returns ([groups] means, [groups] population standard deviations).
    """
    rewards = of_episodes.astype(float)
    num_samples = rewards.shape[1]
    means = rewards.sum(1) / num_samples
    require(np.isfinite(means).all(), "reward must be finite, and some is NaN or infinite")
    deviations = np.where(
        # Rounding of the mean would give equal rewards a deviation above 0, and dynamic sampling compares it
        # with 0.
        rewards.max(1) > rewards.min(1),
        np.sqrt(np.square(rewards - means[:, None]).sum(1) / num_samples),
        0.0,
    )
    return means.tolist(), deviations.tolist()


# ---- numbers of each group


def _find_version_spans(versions: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
    """Returns (oldest, newest) version of each group's sampled tokens, from the `starts` of the groups."""
    unsigned = versions.view(np.uint32)  # -1, where not sampled, becomes the largest number
    newest = int(versions.max())
    if int(unsigned.min()) == newest:
        return [(newest, newest)] * len(starts)
    oldest_of_groups = _reduce_groups(np.minimum, unsigned, starts).tolist()
    newest_of_groups = _reduce_groups(np.maximum, versions, starts).tolist()
    return list(zip(oldest_of_groups, newest_of_groups, strict=True))


def _count_versions(versions: np.ndarray) -> dict[int, int]:
    values, counts = np.unique(versions, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return {version: count for version, count in pairs if version >= 0}


def _reduce_groups(operation: np.ufunc, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[groups]: the values from each start to the next, reduced by an operation."""
    if len(values) < LONG_GROUP * len(starts):
        return operation.reduceat(values, starts, dtype=np.int64 if operation is np.add else None)
    # `reduceat` does not use vector instructions; a reduction of each part by itself does.
    parts = np.split(values, starts[1:])
    return np.array(
        [np.count_nonzero(part) if operation is np.add else operation.reduce(part) for part in parts]
    )
