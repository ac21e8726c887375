"""Groups for tests whose episodes have any number of turns and branches, with all that the record says of
them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from buffers.messages import Lease
from buffers.trajectory import EPISODE_STOPS, Trajectory


def draw_group(
    rng: random.Random,
    lease: Lease,
    *,
    max_turns: int = 5,
    versions: tuple[int, int] = (0, 0),
    **changes: Any,
) -> list[Trajectory]:
    """Returns the rows of a group that keeps all rules. Its tokens are of the given oldest to newest version.
    `changes` replaces fields of all rows."""
    rows = [
        row
        for sample in range(lease.num_samples)
        for row in draw_episode(rng, lease, sample, rng.randint(1, max_turns), versions)
    ]
    return [replace(row, **changes) for row in rows]


def draw_episode(
    rng: random.Random, lease: Lease, sample: int, num_turns: int, versions: tuple[int, int]
) -> Iterator[Trajectory]:
    """Yields the branches of an episode. Each turn stands on some branch, in any order of the branches."""
    places = [rng.randrange(3) for _ in range(num_turns)]
    used = sorted(set(places))
    branches = [[turn for turn, place in enumerate(places) if place == one] for one in used]
    rows = [draw_tokens(rng, turns, versions) for turns in branches]
    paid = [
        np.float32(rng.choice([0.0, 0.0, 1.0, rng.uniform(-3, 3)])) for row in rows for _ in row["tokens"]
    ]
    is_paid_by_token = rng.random() < 0.5
    reward = float(np.float32(sum(map(float, paid)))) if is_paid_by_token else rng.uniform(-1, 1)
    rewards = {name: rng.random() for name in ("format", "correct") if rng.random() < 0.5}
    stop, paid_left = rng.choice(EPISODE_STOPS), iter(paid)
    for branch, row in enumerate(rows):
        yield Trajectory(
            group=lease.group,
            sample=sample,
            branch=branch,
            due=lease.due,
            prompt_id=lease.index,
            task=lease.task,
            reward=reward,
            rewards=rewards,
            token_rewards=[float(next(paid_left)) for _ in row["tokens"]] if is_paid_by_token else [],
            finish_reason=rng.choice(["stop", "length"]),
            stop=stop,
            renderer=rng.choice(["", "plain-1"]),
            generator="g",
            started_at=1.0,
            finished_at=2.0,
            **row,
        )


def draw_tokens(rng: random.Random, turns: list[int], versions: tuple[int, int]) -> dict[str, list[Any]]:
    """Returns the columns of a branch's tokens: a prompt, and for each turn sampled tokens and an answer."""
    turn = [-1] * rng.randint(1, 3)
    for number in turns:
        turn += [number] * rng.randint(1, 4) + [-1] * rng.randint(0, 2)
    sampled = [number >= 0 for number in turn]
    return {
        "tokens": [rng.randrange(50) for _ in turn],
        "sampled": sampled,
        "logprobs": [-rng.random() * flag for flag in sampled],
        "versions": [rng.randint(*versions) if flag else -1 for flag in sampled],
        "turn": turn,
    }


def count_sampled(rows: list[Trajectory]) -> int:
    return sum(sum(row.sampled) for row in rows)
