"""The rules that the episodes of a submitted group must keep.

An episode is one sample of a group. It has one row, or several where its context was rewritten: its branches.
Most groups have one row for each sample, and most episodes one turn. Both are found at once, and only other
groups pay for the rest.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from buffers.message_columns import TEXT_OFFSETS, TEXT_VALUES, VALUES, MessageColumns, require
from buffers.trajectory import EPISODE_STOPS, fill_turns

MOST_TURNS = 2**15 - 1
"""Turns of an episode for which the column `turn` has room."""
MAX_RENDERER_BYTES = 200
RELATIVE_ROUNDING, ABSOLUTE_ROUNDING = 1e-5, 1e-6
"""Distance that the sum of float32 rewards of tokens may have from the reward: relative to their sizes, and
beside it."""
SHOWN = 40
"""Characters of an unknown text that an error shows."""
USUAL_STOP = b"completed"
"""The end of most episodes."""
_KNOWN_STOPS = ", ".join(EPISODE_STOPS)


@dataclass(frozen=True, slots=True)
class EpisodeRows:
    """The rows of a message's episodes."""

    first_rows: np.ndarray
    """[episodes]: the first row of each."""
    episode_of_row: np.ndarray
    """[rows]: the episode of each row, numbered over all groups of the message."""

    @property
    def has_branches(self) -> bool:
        """True when some episode has several rows."""
        return len(self.first_rows) < len(self.episode_of_row)


def find_episodes(columns: MessageColumns, max_turns: int) -> EpisodeRows:
    """Returns the rows of each episode.

    The samples of a group count from 0, and their branches too. Raises MalformedGroup for other numbers.
    """
    num_samples, num_rows = columns.num_samples, columns.num_rows
    numbering = f"samples must be 0..{num_samples - 1}, in order, and branches of each must count from 0"
    if columns.rows.count(num_samples) == columns.num_groups:
        # So many rows can only be one for each sample.
        samples, rows = _number_rows(columns.num_groups, num_samples)
        are_plain = columns.holds_bytes("sample", VALUES, samples)
        are_plain &= columns.holds_bytes("branch", VALUES, bytes(2 * num_rows))
        require(are_plain, numbering)
        return EpisodeRows(rows, rows)
    sample, branch = columns.take_values("sample", np.int64), columns.take_values("branch", np.int16)
    is_first = branch == 0
    first_rows = np.flatnonzero(is_first)
    episode_of_row = np.cumsum(is_first) - 1
    group_of_row = np.arange(columns.num_groups).repeat(columns.rows)
    require(
        is_first[0]
        and len(first_rows) == columns.num_groups * num_samples
        and (episode_of_row // num_samples == group_of_row).all()
        and (episode_of_row % num_samples == sample).all()
        and (branch == np.arange(num_rows) - first_rows[episode_of_row]).all(),
        numbering,
    )
    require(
        int(branch.max()) < max_turns,
        f"an episode must have at most {max_turns} branches (episodes.max_turns), got {branch.max() + 1}",
    )
    return EpisodeRows(first_rows, episode_of_row)


def check_turns(
    columns: MessageColumns, offsets: np.ndarray, sampled: np.ndarray, episodes: EpisodeRows, max_turns: int
) -> None:
    """Exactly the sampled tokens have a turn, and the turns of an episode can have happened in one order.

    `offsets` [rows + 1] are those of the rows among all tokens, `sampled` [tokens] tells the sampled ones.
    """
    own = np.frombuffer(columns.take_offsets("turn"), np.int32)
    if not own.any() and not episodes.has_branches:
        return  # all episodes have one turn, and say nothing of it
    lengths, own_lengths = np.diff(offsets), np.diff(own)
    require(
        own[0] == 0 and ((own_lengths == lengths) | (own_lengths == 0)).all(),
        "`turn` must be empty or as long as `tokens`",
    )
    given = columns.take_items("turn", np.int16, int(own[-1]))
    turns = fill_turns(given, own_lengths, lengths, sampled)
    lowest, highest = int(turns.min()), int(turns.max())
    require(
        lowest >= -1 and ((turns >= 0) == sampled).all(), "turns must be >= 0 where sampled, and -1 elsewhere"
    )
    if highest <= 0 and not episodes.has_branches:
        return
    require(highest < max_turns, f"turns must be below {max_turns} (episodes.max_turns), got {highest}")
    places = np.flatnonzero(sampled)
    acted = turns[places]
    rows = np.arange(columns.num_rows).repeat(lengths)[places]
    goes_on = rows[1:] == rows[:-1]
    require(
        not (goes_on & (acted[1:] < acted[:-1])).any(), "turns must not decrease from one token to the next"
    )
    if episodes.has_branches:
        begins = np.concatenate(([True], ~goes_on | (acted[1:] != acted[:-1])))
        keys = episodes.episode_of_row[rows[begins]] * (MOST_TURNS + 1) + acted[begins]
        require(len(np.unique(keys)) == len(keys), "a turn must stand on one branch of its episode only")


def check_token_rewards(
    columns: MessageColumns, offsets: np.ndarray, rewards: np.ndarray, episodes: EpisodeRows
) -> None:
    """The rewards of an episode's tokens are finite and sum to its reward, where there are any."""
    own = np.frombuffer(columns.take_offsets("token_rewards"), np.int32)
    if not own.any():
        return
    lengths = np.diff(own)
    is_paid = lengths > 0
    require(
        own[0] == 0 and ((lengths == np.diff(offsets)) | ~is_paid).all(),
        "`token_rewards` must be empty or as long as `tokens`",
    )
    paid_episodes = is_paid[episodes.first_rows]
    require(
        (is_paid == paid_episodes[episodes.episode_of_row]).all(),
        "`token_rewards` must be given on all branches of an episode, or on none",
    )
    values = columns.take_items("token_rewards", np.float32, int(own[-1])).astype(float)
    require(np.isfinite(values).all(), "token_rewards must be finite, and some is NaN or infinite")
    first_rows = episodes.first_rows[paid_episodes]
    starts, wanted = own[first_rows], rewards[first_rows].astype(float)
    sums, sizes = np.add.reduceat(values, starts), np.add.reduceat(np.abs(values), starts)
    distances = np.abs(sums - wanted)
    too_far = distances > RELATIVE_ROUNDING * (sizes + np.abs(wanted)) + ABSOLUTE_ROUNDING
    if too_far.any():
        worst = int(distances.argmax())
        require(
            False,
            f"token_rewards of an episode must sum to its reward, {wanted[worst]:g}, got {sums[worst]:g}",
        )


def check_ends(columns: MessageColumns, episodes: EpisodeRows) -> None:
    """Every episode has one reward, and one end that is known by name; a renderer's name is short."""
    ends = np.arange(columns.num_rows + 1, dtype=np.int32) * len(USUAL_STOP)
    if not (
        columns.holds_bytes("stop", TEXT_OFFSETS, ends.tobytes())
        and columns.holds_bytes("stop", TEXT_VALUES, USUAL_STOP * columns.num_rows)
    ):
        for stop in columns.batch.column("stop").unique().to_pylist():
            require(stop in EPISODE_STOPS, f"stop must be one of {_KNOWN_STOPS}, got {stop[:SHOWN]!r}")
    size = 4 * (columns.num_rows + 1)
    renderers = np.frombuffer(columns.take_bytes("renderer", TEXT_OFFSETS, size), np.int32)
    longest = int((renderers[1:] - renderers[:-1]).max())
    require(
        longest <= MAX_RENDERER_BYTES, f"renderer must have at most {MAX_RENDERER_BYTES} bytes, got {longest}"
    )
    if episodes.has_branches:
        first_rows = pa.array(episodes.first_rows[episodes.episode_of_row])
        for name in ("reward", "rewards", "stop"):
            column = columns.batch.column(name)
            require(
                column.take(first_rows).equals(column),
                f"`{name}` must be equal on all branches of an episode",
            )


@lru_cache(16)
def _number_rows(num_groups: int, num_samples: int) -> tuple[bytes, np.ndarray]:
    """Returns (bytes of the column `sample`, [rows] numbers of the rows) of groups with one row a sample."""
    numbers = np.arange(num_groups * num_samples)
    return (numbers % num_samples).tobytes(), numbers
