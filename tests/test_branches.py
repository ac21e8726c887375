"""Episodes of several turns and branches in the learner: read, packed and trained, against loops over tokens
in double precision."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from branched_episodes import (
    ModelColumns,
    ScriptedStep,
    draw_episodes,
    make_branched_batch,
    move_branches,
    run_scripted_step,
)
from buffer_harness import BufferHarness
from episode_equations import StepEquations, read_episodes, set_equations
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from test_step import COMPOSITIONS as PRESETS
from test_step import ModelStock
from torch import Tensor
from training_steps import (
    GROUP_WEIGHTS,
    GROUPS,
    SAMPLES,
    STEP,
    StepOutcome,
    assert_equal,
    assert_same,
    change_learner,
    configure_step,
)
from transformers import AutoModelForCausalLM

from buffers.client import TakenBatch
from buffers.messages import Lease
from buffers.trajectory import GREEDY, Trajectory, encode_batch, to_batch
from configs.load import load_config
from configs.schema import Config
from learners.packing import (
    Batch,
    PackingCost,
    batch_from_arrow,
    cut_episodes,
    divide_rows,
    find_divided,
    take_episodes,
)
from learners.parity import find_fresh_tokens
from learners.prepared import describe_episodes, shape_rewards
from learners.world import World

COMPOSITIONS = {name: overrides for name, overrides in PRESETS.items() if name != "grpo_with_everything"} | {
    "ppo_by_turn": ["algo=ppo", "algo.gae.span=turn", "algo.gae.whiten=false", "algo.gae.lam=0.9"],
    "reinforce_pp_baseline": ["algo=reinforce_pp", "algo.advantage=reinforce_pp_baseline"],
    "grpo_with_everything": [
        "algo=grpo",
        "algo.kl.loss_coef=0.04",
        "algo.kl.estimator=k3",
        "algo.entropy_coef=0.01",
        "algo.normalize_weights=true",
        "algo.imitation_coef=0.1",
        "algo.rejection.estimator=k3",
        "algo.rejection.level=sequence_max",
        "algo.rejection.threshold=0.1",
        "algo.reward.overlong_share=0.5",
        "algo.reward.overlong_filter=true",
        "algo.reward.normalize=true",
        "algo.reward.clip=1.5",
    ],
    "by_horizon": ["algo=grpo", "algo.aggregation=constant_horizon", "algo.horizon=9"],
    "by_sum": ["algo=grpo", "algo.aggregation=sequence_mean_token_sum", "algo.correction=sequence_tis"],
    "sequence_mask": ["algo=grpo", "algo.correction=sequence_mask"],
    "geometric_mask": ["algo=grpo", "algo.correction=geometric_mask", "algo.correction_floor=0.9",
                       "algo.correction_cap=1.1"],
    "rejection_by_sum": ["algo=grpo", "algo.rejection.estimator=k2", "algo.rejection.level=sequence_sum",
                         "algo.rejection.threshold=0.1"],
    "rejection_by_mean": ["algo=grpo", "algo.rejection.estimator=k2", "algo.rejection.level=sequence_mean",
                          "algo.rejection.threshold=0.03"],
}  # fmt: skip


@cache
def configure_composition(model: Path, name: str) -> Config:
    overrides = ["sampling.max_tokens=4", "learner.minibatches=2", "staleness.on_late=mask"]
    config = deepcopy(configure_step(model, *COMPOSITIONS[name], *overrides))
    set_equations(config.algo)
    return config


@pytest.fixture(scope="module")
def rows() -> list[Trajectory]:
    return draw_episodes(0)


@pytest.fixture(scope="module")
def columns(rows: list[Trajectory]) -> ModelColumns:
    return ModelColumns.draw(rows, 0)


def assert_same_step(found: ScriptedStep, expected: ScriptedStep) -> None:
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, atol=1e-6, rtol=1e-4)


def spread_column(values: dict[int, float], length: int) -> Tensor:
    return torch.tensor([values.get(t, 0.0) for t in range(length)])


# ---- every composition


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_of_branched_episodes_equals_loops_over_tokens(
    name: str, seed: int, fixed_model: Path
) -> None:
    """Gradients by log-probability or value of each token, so that no two errors can cancel."""
    rows, config = draw_episodes(seed), configure_composition(fixed_model, name)
    columns = ModelColumns.draw(rows, seed)
    found = run_scripted_step(config, make_branched_batch(rows), columns)
    equations, length = StepEquations(config, rows, columns), len(columns.logprobs)
    loss, gradient = equations.differentiate_policy()
    assert found.metrics["loss/policy"] == pytest.approx(loss, rel=1e-4)
    expected = {"engine": spread_column(gradient, length)}
    if config.algo.needs_critic:
        expected["critic"] = spread_column(equations.differentiate_critic(), length)
    if config.algo.needs_reward_model:
        expected["reward_model"] = spread_column(equations.differentiate_reward_model(), length)
    assert found.gradients.keys() == expected.keys()
    for model, values in expected.items():
        torch.testing.assert_close(found.gradients[model], values, atol=3e-6, rtol=1e-3, msg=model)
        assert float(values.abs().max()) > 1e-3
        outside = ~torch.tensor([flag for row in rows for flag in row.sampled])
        assert not found.gradients[model][outside].any(), "what the environment wrote is not trained"


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_microbatches_cannot_matter_and_the_order_of_branches_neither(
    name: str, fixed_model: Path, rows: list[Trajectory], columns: ModelColumns
) -> None:
    config = configure_composition(fixed_model, name)
    whole = run_scripted_step(config, make_branched_batch(rows), columns)
    small = change_learner(config, tokens_per_microbatch=12)
    batch = make_branched_batch(rows)
    assert 0 < len(find_divided(batch, range(batch.num_sequences), 12)) < batch.num_sequences
    assert_same_step(run_scripted_step(small, make_branched_batch(rows), columns), whole)
    moved, places = move_branches(rows, seed=3)
    assert places.tolist() != list(range(len(places)))
    found = run_scripted_step(small, make_branched_batch(moved), columns.pick_places(places))
    assert_same_step(
        found,
        replace(whole, gradients={model: values[places] for model, values in whole.gradients.items()}),
    )


def lose_samples(row: Trajectory) -> Trajectory:
    """Returns the row as it is when the policy has sampled nothing in it."""
    zeros, count = [0.0] * len(row.tokens), len(row.tokens)
    return replace(
        row, sampled=[False] * count, logprobs=zeros, versions=[-1] * count, turn=[-1] * count,
        token_rewards=zeros if row.token_rewards else [],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["grpo", "gspo", "m2po", "ppo_by_turn", "prime", "vtrace", "sequence_mask"])
def test_branches_episodes_and_groups_without_a_trained_token_are_nothing_to_a_step(
    name: str, fixed_model: Path, rows: list[Trajectory]
) -> None:
    """Branches and a group in which nothing was sampled; an episode of which every token is too stale."""
    changed = []
    for row in rows:
        is_stale = (row.group, row.sample) == (1, 1)
        versions = [STEP - 9 if flag else -1 for flag in row.sampled] if is_stale else row.versions
        is_empty = row.group == 3 or row.branch == 1 and row.sample == 2
        changed.append(lose_samples(row) if is_empty else replace(row, versions=versions))
    config, columns = configure_composition(fixed_model, name), ModelColumns.draw(changed, 0)
    batch = make_branched_batch(changed)
    whole = run_scripted_step(config, batch, columns)
    assert all(np.isfinite(value) for value in whole.metrics.values())
    is_mute = torch.isin(batch.sequence, torch.tensor([SAMPLES + 1, *range(3 * SAMPLES, 4 * SAMPLES)]))
    assert not whole.gradients["engine"][is_mute].any() and whole.gradients["engine"].any()
    assert_same_step(
        run_scripted_step(change_learner(config, tokens_per_microbatch=12), batch, columns), whole
    )


def run_compositions(
    world: World, configs: dict[str, Config], rows: list[Trajectory], columns: ModelColumns
) -> dict[str, ScriptedStep]:
    batch = make_branched_batch(rows)
    found = {name: run_scripted_step(config, batch, columns, world) for name, config in configs.items()}
    for step in found.values():
        for gradient in step.gradients.values():
            world.add_tensor(gradient)
    return found


def test_ranks_cannot_matter(
    fixed_model: Path, rows: list[Trajectory], columns: ModelColumns, tmp_path: Path
) -> None:
    configs = {
        name: change_learner(configure_composition(fixed_model, name), tokens_per_microbatch=12)
        for name in COMPOSITIONS
    }
    first, second = on_ranks(2, run_compositions, tmp_path, configs, rows, columns)
    batch = make_branched_batch(rows)
    for name, config in configs.items():
        assert_same_step(first[name], run_scripted_step(config, batch, columns))
        assert first[name].metrics == second[name].metrics


# ---- what a batch holds


@pytest.fixture
def tiny_config(fixed_model: Path) -> Config:
    sizes = [f"learner.groups_per_step={GROUPS}", f"learner.samples_per_prompt={SAMPLES}", "run.steps=4"]
    return load_config([f"model.path={fixed_model}", *sizes, "eval.prompts=0", "staleness.max_versions=1"])


def find_places(rows: list[Trajectory]) -> list[list[list[int]]]:
    """The places of all tokens of each branch of each episode."""
    numbers = iter(range(sum(len(row.tokens) for row in rows)))
    by_episode = groupby(rows, key=lambda row: (row.group, row.sample))
    return [[[next(numbers) for _ in row.tokens] for row in branches] for _, branches in by_episode]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_columns_of_episodes_and_of_tokens_are_read_as_the_record_has_them(seed: int) -> None:
    rows = draw_episodes(seed)
    batch, episodes, places = make_branched_batch(rows), read_episodes(rows), find_places(rows)
    assert batch.num_sequences == GROUPS * SAMPLES == len(episodes) and batch.num_branches == len(rows)
    assert [range(*pair) for pair in pairwise(batch.offsets)] == [
        range(branches[0][0], branches[-1][-1] + 1) for branches in places
    ]
    assert batch.rewards.tolist() == [episode.reward for episode in episodes]
    assert batch.truncated.tolist() == [episode.is_cut for episode in episodes]
    assert batch.groups.tolist() == [episode.group for episode in episodes]
    assert batch.group_weights.tolist() == pytest.approx([GROUP_WEIGHTS[e.group] for e in episodes])
    assert batch.greedy_rewards.tolist() == [episode.greedy_reward for episode in episodes]
    assert batch.turns is not None and batch.turns.tolist() == [turn for row in rows for turn in row.turn]
    paid = [value for row in rows for value in row.token_rewards or [0.0] * len(row.tokens)]
    assert batch.token_rewards is not None and batch.token_rewards.tolist() == paid
    lengths = [len(branch) for branches in places for branch in branches]
    assert batch.branch.tolist() == [number for number, n in enumerate(lengths) for _ in range(n)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 90), st.integers(1, 3))
def test_an_episode_is_cut_between_branches_and_only_where_it_is_longer_than_a_microbatch(
    seed: int, budget: int, num_shares: int
) -> None:
    rows = draw_episodes(seed)
    batch, places = make_branched_batch(rows), find_places(rows)
    flat = [branch for branches in places for branch in branches]
    number_of = {branch[0]: number for number, branch in enumerate(flat)}
    numbers, held = list(range(GROUPS * SAMPLES)), list[int]()
    num_pieces = len(cut_episodes(batch, numbers, budget).begins)
    for share in range(num_shares):
        microbatches, plan = divide_rows(batch, numbers, budget, num_shares, share)
        for packed in microbatches:
            branches = [flat[number_of[place]] for place in packed.index[packed.cu_seqlens[:-1]].tolist()]
            assert packed.index.tolist() == [place for branch in branches for place in branch]
            assert packed.cu_seqlens.diff().tolist() == [len(branch) for branch in branches]
            assert packed.positions.tolist() == [i for branch in branches for i in range(len(branch))]
            assert packed.max_seqlen == max(len(branch) for branch in branches)
            assert packed.targets.tolist() == packed_targets(batch.sampled, branches)
            for start, end in pairwise(packed.offsets.tolist()):
                (number,) = set(batch.sequence[packed.index[start:end]].tolist())
                is_whole = end - start == batch.offsets[number + 1] - batch.offsets[number]
                assert is_whole or batch.offsets[number + 1] - batch.offsets[number] > budget
                assert end - start <= budget or packed.cu_seqlens.tolist().index(end) == 1 + (
                    packed.cu_seqlens.tolist().index(start)
                )
            assert (
                packed.sequence.tolist()
                == np.repeat(np.arange(len(packed.offsets) - 1), packed.offsets.diff()).tolist()
            )
            held += [number_of[branch[0]] for branch in branches]
            is_crowded = len(packed.tokens) > budget and len(packed.offsets) > 2
            assert not is_crowded or len(plan.shares[0]) == num_pieces // num_shares
    assert sorted(held) == list(range(len(flat)))


def packed_targets(sampled: Tensor, branches: list[list[int]]) -> list[int]:
    flat = [(i, place) for branch in branches for i, place in enumerate(branch)]
    return [number for number, (i, place) in enumerate(flat) if i > 0 and sampled[place]]


def test_an_episode_costs_the_attention_of_its_branches_and_not_that_of_its_whole_length(
    rows: list[Trajectory],
) -> None:
    batch, cost = make_branched_batch(rows), PackingCost(2.0, 0.5)
    expected = [
        sum(2.0 * len(branch) + 0.5 * len(branch) ** 2 for branch in branches)
        for branches in find_places(rows)
    ]
    every = take_episodes(batch, range(batch.num_sequences))
    assert cost.of_pieces(batch, every).tolist() == pytest.approx(expected)


def test_the_figures_of_episodes_count_turns_branches_and_ends(rows: list[Trajectory]) -> None:
    episodes, batch = read_episodes(rows), make_branched_batch(rows)
    ends = [row.stop for row in rows if row.branch == 0]
    expected = {
        "episode/turns_mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episode/branches_mean": len(rows) / len(episodes),
        "episode/branched_share": sum(row.branch == 1 for row in rows) / len(episodes),
    } | {f"episode/stop/{word}": ends.count(word) / len(ends) for word in set(ends)}
    assert describe_episodes(batch) == pytest.approx(expected) and len(set(ends)) > 1


def test_a_batch_of_one_turn_and_one_branch_has_no_figures_of_episodes(
    trajectories: list[Trajectory],
) -> None:

    batch = batch_from_arrow(make_table(trajectories))
    assert describe_episodes(batch) == {} and batch.token_rewards is None


def test_the_overlong_penalty_judges_an_episode_by_its_longest_reply(
    rows: list[Trajectory], fixed_model: Path
) -> None:
    config = configure_step(fixed_model, "algo.reward.overlong_share=0.5", "sampling.max_tokens=4")
    episodes, batch = read_episodes(rows), make_branched_batch(rows)
    longest = [max(len(tokens) for tokens in episode.turns.values()) for episode in episodes]
    penalties = (shape_rewards(config, batch) - batch.rewards).tolist()
    assert penalties == pytest.approx([{3: -0.5, 4: -1.0}.get(length, 0.0) for length in longest])
    assert len(set(longest)) > 2 and max(len(e.actions) for e in episodes) > 8


def test_a_branch_is_fresh_where_one_version_has_sampled_all_of_it(rows: list[Trajectory]) -> None:
    batch = make_branched_batch(rows)
    expected = [
        flag and {v for v, s in zip(row.versions, row.sampled, strict=True) if s} == {STEP}
        for row in rows
        for flag in row.sampled
    ]
    assert find_fresh_tokens(batch, STEP).tolist() == expected and any(expected)


def test_groups_of_branched_episodes_come_through_the_buffer_as_one_batch(
    rows: list[Trajectory], tmp_path: Path, tiny_config: Config
) -> None:
    harness = BufferHarness(tiny_config, tmp_path)
    try:
        harness.publish(0)
        sent: list[Trajectory] = []
        for lease in harness.ask(GROUPS):
            group = [lease_row(row, lease) for row in rows if row.group == len({row.group for row in sent})]
            assert harness.submit(lease, encode_batch(to_batch(group)), num_rows=len(group)) == "accepted"
            sent += group
        taken = harness.client.take_batch(0, 10.0)
        assert isinstance(taken, TakenBatch)
        found, expected = batch_from_arrow(taken.table), batch_from_arrow(make_table(sent))
    finally:
        harness.close()
    assert expected.num_branches > expected.num_sequences == GROUPS * SAMPLES
    for name in Batch.__dataclass_fields__:
        values = getattr(found, name), getattr(expected, name)
        if isinstance(values[0], Tensor):
            torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)
        else:
            np.testing.assert_equal(*values)


def lease_row(row: Trajectory, lease: Lease) -> Trajectory:
    return replace(
        row,
        group=lease.group,
        due=lease.due,
        prompt_id=lease.index,
        task=lease.task,
        started_at=1.0,
        finished_at=2.0,
        versions=[0 if flag else -1 for flag in row.sampled],
    )


def make_table(rows: list[Trajectory]) -> pa.Table:
    return pa.Table.from_batches([to_batch(rows)])


# ---- with a model


def draw_two_turns(folder: Path) -> list[Trajectory]:
    """Returns six groups of four episodes of one branch: prompt, reply, the environment's answer, reply, and
    the environment's last word."""
    rng, rows = np.random.default_rng(0), []
    for group in range(GROUPS):
        for sample in range(SAMPLES):
            lengths = [int(rng.integers(low, high)) for low, high in ((3, 6), (1, 7), (1, 5), (1, 7), (1, 4))]
            flags = np.repeat([False, True, False, True, False], lengths)
            tokens = rng.integers(3, 300, len(flags)).tolist()
            paid = np.zeros(len(flags))
            paid[np.cumsum(lengths)[[1, 3]] - 1] = rng.integers(-2, 5, 2) / 4
            rows.append(
                Trajectory(
                    group=group, sample=sample, due=STEP, prompt_id=group, task="t", generator="g",
                    started_at=0.0, finished_at=1.0, finish_reason="stop", reward=float(paid.sum()),
                    rewards={GREEDY: float(group % 2)}, tokens=tokens, sampled=flags.tolist(),
                    logprobs=[0.0] * len(flags), versions=np.where(flags, STEP - sample % 3, -1).tolist(),
                    turn=np.repeat([-1, 0, -1, 1, -1], lengths).tolist(),
                    token_rewards=paid.tolist(),
                )
            )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [sample_near(model, row, rng) for row in rows]


def sample_near(model: torch.nn.Module, row: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Gives the row's sampled tokens log-probabilities near the model's."""
    tokens = torch.tensor([row.tokens])
    with torch.no_grad():
        scores = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    apart = rng.uniform(0.03, 0.15, len(scores)) * rng.choice([-1, 1], len(scores))
    behavior = np.concatenate([[0.0], scores.numpy() - apart])
    return replace(row, logprobs=np.where(row.sampled, behavior, 0.0).tolist())


def divide_episode(row: Trajectory) -> list[Trajectory]:
    """Returns the same episode in two branches: the first ends with the first reply, the second has it as
    context."""
    end = row.turn.index(1)
    is_later = np.asarray(row.turn) == 1
    second = replace(
        row,
        branch=1,
        sampled=is_later.tolist(),
        logprobs=np.where(is_later, row.logprobs, 0.0).tolist(),
        versions=np.where(is_later, row.versions, -1).tolist(),
        turn=np.where(is_later, 1, -1).tolist(),
        token_rewards=np.where(is_later, row.token_rewards, 0.0).tolist(),
    )
    lists = ("tokens", "sampled", "logprobs", "versions", "turn", "token_rewards")
    return [replace(row, **{name: getattr(row, name)[:end] for name in lists}), second]


@pytest.fixture(scope="module")
def two_turns(fixed_model: Path) -> list[Trajectory]:
    return draw_two_turns(fixed_model)


@pytest.fixture(scope="module")
def stock(fixed_model: Path, process_group: None) -> ModelStock:
    return ModelStock(fixed_model)


def drop_figures(outcome: StepOutcome, *names: str) -> StepOutcome:
    return {name: value for name, value in outcome[0].items() if name not in names}, *outcome[1:]


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "m2po", "vapo", "vtrace", "prime", "reinforce_pp"])
def test_an_episode_trains_the_same_whole_and_in_branches_that_repeat_its_context(
    name: str, stock: ModelStock, two_turns: list[Trajectory], fixed_model: Path
) -> None:
    """The second branch's context is what the whole episode has there: the same tokens are sampled after the
    same tokens, so weights, gradients and figures are the same."""
    critic = ["algo.critic.lr=1e-4"] if name in ("ppo", "vapo", "vtrace") else []
    config = configure_step(fixed_model, f"algo={name}", *critic, "learner.minibatches=1")
    config = change_learner(config, tokens_per_microbatch=24)  # divides most episodes in two
    whole = stock.run_step(config, make_branched_batch(two_turns))
    divided = [branch for row in two_turns for branch in divide_episode(row)]
    found = stock.run_step(config, make_branched_batch(divided))
    assert found[0]["episode/branches_mean"] == 2 and found[0]["episode/turns_mean"] == 2
    assert found[0]["episode/branched_share"] == 1 and whole[0]["episode/branched_share"] == 0
    branched = "episode/branches_mean", "episode/branched_share"
    assert_same(drop_figures(found, *branched), drop_figures(whole, *branched))


def test_what_the_environment_says_last_cannot_matter_and_what_it_says_before_has_no_loss(
    stock: ModelStock, two_turns: list[Trajectory], fixed_model: Path
) -> None:
    config = configure_step(fixed_model, "algo=grpo", "learner.minibatches=1")
    batch = make_branched_batch(two_turns)
    expected = stock.run_step(config, batch)
    last_sampled = [len(row.sampled) - 1 - row.sampled[::-1].index(True) for row in two_turns]
    is_last_word = torch.tensor(
        [t > last for row, last in zip(two_turns, last_sampled, strict=True) for t in range(len(row.tokens))]
    )
    other = replace(
        batch,
        tokens=torch.where(is_last_word, 7, batch.tokens),
        behavior_logprobs=torch.where(batch.sampled, batch.behavior_logprobs, float("nan")),
    )
    assert not torch.equal(other.tokens, batch.tokens)
    found = stock.run_step(config, other)
    assert_equal(found, expected)
    assert found[0] == expected[0]
