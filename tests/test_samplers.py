"""Samplers: what each promises, and that a user's own is taken, checked and bounded like ours."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from buffer_harness import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers import messages as m
from buffers.buffer import Buffer
from buffers.events import Accepted
from buffers.samplers import Candidates, Prioritized, RewardBalanced, draw_groups, load_sampler
from buffers.trajectory import SCHEMA_VERSION, encode_batch, to_batch
from configs.load import load_config


def candidates(num: int, seed: int = 0) -> Candidates:
    rng = np.random.default_rng(seed)
    newest = rng.integers(0, 5, num)
    return Candidates(
        group=np.arange(num),
        due=np.sort(rng.integers(0, 4, num)),
        uses=rng.integers(0, 2, num),
        newest=newest,
        oldest=newest - rng.integers(0, 2, num),
        tokens=rng.integers(1, 99, num),
        reward_mean=rng.random(num),
        reward_std=rng.random(num),
    )


def contents(c: Candidates) -> list[Accepted]:
    return [
        Accepted(
            i,
            i,
            int(c.due[i]),
            i,
            0,
            0,
            0,
            0,
            0,
            1,
            int(c.tokens[i]),
            int(c.oldest[i]),
            int(c.newest[i]),
            float(c.reward_mean[i]),
            float(c.reward_std[i]),
            0.0,
        )
        for i in range(len(c.group))
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["fifo", "freshest", "prioritized", "reward_balanced"]), st.integers(1, 40), st.data())
def test_every_sampler_chooses_distinct_rows_and_the_same_again(
    name: str, num: int, data: st.DataObject
) -> None:
    count, pool = data.draw(st.integers(1, num)), candidates(num)
    first, again = (
        draw_groups(
            load_sampler(name, {}), contents(pool), pool.uses.tolist(), count, np.random.default_rng([3, 7])
        )
        for _ in range(2)
    )
    assert first == again and len(set(first[0])) == count
    assert all(0 < weight <= 1 for weight in first[1])


def test_fifo_takes_the_oldest_and_freshest_leaves_none_that_is_fresher() -> None:
    pool, rng = candidates(30), np.random.default_rng(0)
    assert load_sampler("fifo", {}).choose(pool, 8, rng).rows.tolist() == list(range(8))
    chosen = load_sampler("freshest", {}).choose(pool, 8, rng).rows
    left = np.setdiff1d(np.arange(30), chosen)
    assert pool.newest[chosen].min() >= pool.newest[left].max()


def test_prioritized_draws_in_proportion_and_weighs_against_it() -> None:
    pool = candidates(5)
    sampler = Prioritized(column="reward_std", alpha=1.0, beta=1.0, epsilon=0.1)
    share = (pool.reward_std + 0.1) / (pool.reward_std + 0.1).sum()
    rng, num_draws = np.random.default_rng(1), 20_000
    counts = Counter(int(sampler.choose(pool, 1, rng).rows[0]) for _ in range(num_draws))
    for row in range(5):
        error = 5 * np.sqrt(share[row] * (1 - share[row]) / num_draws)
        assert abs(counts[row] / num_draws - share[row]) < error, "P(i) is the share of the priority"
    choice = sampler.choose(pool, 5, rng)
    expected = np.array([1 / (5 * share[row]) for row in choice.rows])
    np.testing.assert_allclose(choice.group_weights, expected / expected.max())


def test_reward_balanced_takes_turns_among_the_bins() -> None:
    pool = candidates(60)
    rows = RewardBalanced(bins=4).choose(pool, 12, np.random.default_rng(0)).rows
    low, high = pool.reward_mean.min(), pool.reward_mean.max()
    bins = np.minimum((pool.reward_mean[rows] - low) / (high - low) * 4, 3).astype(int)
    assert Counter(bins.tolist()) == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("newest", {}, r"buffer.sampler must be one of \['fifo', .*got 'newest'"),
        (
            "no_such_module:Sampler",
            {},
            "buffer.sampler must name a class that can be imported, got 'no_such_module:Sampler'",
        ),
        (
            "prioritized",
            {"column": "beauty"},
            "buffer.sampler_args must suit prioritized, .*column must be one of",
        ),
        ("prioritized", {"beta": 2}, r"beta in \[0, 1\]"),
        ("reward_balanced", {"bins": 0}, "bins must be at least 1, got 0"),
        ("fifo", {"speed": 1}, "buffer.sampler_args must suit fifo, got {'speed': 1}"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_by_name(
    name: str, args: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_sampler(name, args)


MINE = """
import numpy as np
from buffers.samplers import Choice

class Longest:
    def choose(self, candidates, count, rng):
        return Choice(np.argsort(-candidates.tokens, kind="stable")[:count], np.ones(count))

class Rubbish:
    def choose(self, candidates, count, rng):
        return Choice(np.zeros(count, int), np.ones(count))
"""


def a_step(folder: Path, *overrides: str) -> Buffer:
    """A buffer in which the groups of steps 0 and 1 are complete; group g has 2 + g sampled tokens a row."""
    small = ["learner.groups_per_step=4", "learner.samples_per_prompt=2", "run.steps=9", "eval.prompts=0"]
    buffer = Buffer(load_config([*small, "staleness.max_versions=1", *overrides]), folder)
    buffer.progress.publish_version(0, "w")
    while (lease := buffer.lease_next("g")) is not None:
        n = 2 + lease.group
        rows = make_group(
            lease,
            tokens=[1] * (n + 1),
            sampled=[False] + [True] * n,
            logprobs=[0.0] + [-1.0] * n,
            versions=[-1] + [0] * n,
        )
        assert buffer.intake.submit_groups(
            "g", [lease.id], [lease.num_samples], SCHEMA_VERSION, memoryview(encode_batch(to_batch(rows)))
        ) == ["accepted"]
    return buffer


def test_a_sampler_of_your_own_chooses_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_samplers.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_samplers", raising=False)
    buffer = a_step(tmp_path / "a", "buffer.sampler=my_samplers:Longest")
    handout = buffer.progress.hand_out(0)
    assert handout is not None and handout.groups == [4, 5, 6, 7]
    buffer.close()
    rubbish = a_step(tmp_path / "b", "buffer.sampler=my_samplers:Rubbish")
    with pytest.raises(ValueError, match="buffer.sampler must choose 4 distinct rows of 8, .* from Rubbish"):
        rubbish.progress.hand_out(0)
    rubbish.close()


def test_a_group_is_trained_up_to_max_uses_and_half_as_many_are_made(tmp_path: Path) -> None:
    buffer = a_step(tmp_path, "buffer.max_uses=2")
    uses: Counter[int] = Counter()
    for step in range(6):
        handout = buffer.progress.hand_out(step)
        assert handout is not None and len(handout.groups) == 4
        uses.update(handout.groups)
        tokens = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(step=step, num_trained=tokens, idle_s=0, alive_s=1, metrics={})
        )
        buffer.progress.publish_version(step + 1, f"w{step + 1}")
        while (lease := buffer.lease_next("g")) is not None:
            rows = make_group(lease, version=step + 1)
            buffer.intake.submit_groups(
                "g", [lease.id], [lease.num_samples], SCHEMA_VERSION, memoryview(encode_batch(to_batch(rows)))
            )
        buffer.progress.hand_out(step + 1)  # opens places where too few are left
        while (lease := buffer.lease_next("g")) is not None:
            buffer.intake.submit_groups(
                "g",
                [lease.id],
                [lease.num_samples],
                SCHEMA_VERSION,
                memoryview(encode_batch(to_batch(make_group(lease, version=step + 1)))),
            )
    assert max(uses.values()) == 2 and len(uses) < 6 * 4
    status = buffer.make_status("")
    assert (
        status.replayed_tokens > 0
        and sum(status.staleness_histogram.values()) == status.tokens.trained + status.replayed_tokens
    )
    assert buffer.book.ledger.closes() and status.trained_twice == 0
    buffer.close()


def test_weights_of_a_sampler_reach_the_batch(tmp_path: Path) -> None:
    buffer = a_step(tmp_path, "buffer.sampler=prioritized", "buffer.sampler_args.column=tokens")
    handout = buffer.progress.hand_out(0)
    assert (
        handout is not None
        and len(handout.group_weights) == 4
        and max(handout.group_weights) == 1.0 > min(handout.group_weights)
    )
    buffer.close()
    again = Buffer(
        load_config(
            [
                "learner.groups_per_step=4",
                "learner.samples_per_prompt=2",
                "run.steps=9",
                "eval.prompts=0",
                "staleness.max_versions=1",
                "buffer.sampler=freshest",
            ]
        ),
        tmp_path,
    )
    assert again.progress.hand_out(0) == handout, "what was handed out stays so, whatever is started again"
    again.close()
