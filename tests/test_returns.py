"""Advantages along a sequence, rewards before them and values beside them, against loops written from the
equations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algos import rewards as shaping
from algos.returns import Actions, discount_returns, gae, length_adaptive_lambda, turn_gae, vtrace
from algos.values import (
    implicit_reward_loss,
    implicit_rewards,
    summarize_rewards,
    summarize_values,
    value_loss,
)


class PackedCase:
    """Packed sequences; tokens of an environment stand between the sampled ones, and hold NaN."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 7, (5,), generator=rng)
        total = int(lengths.sum())
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.mask = torch.rand(total, generator=rng) < 0.6
        self.sequence = torch.repeat_interleave(torch.arange(5), lengths)
        self.rewards, self.values, self.log_ratio = (
            torch.where(self.mask, torch.randn(total, generator=rng, dtype=torch.float64), math.nan)
            for _ in range(3)
        )

    def list_sequences(self) -> list[list[int]]:
        """The sampled tokens of each sequence."""
        bounds = self.offsets.tolist()
        return [
            [t for t in range(a, b) if self.mask[t]] for a, b in zip(bounds, bounds[1:], strict=False)
        ]  # fmt: skip

    def list_turns(self) -> list[list[list[int]]]:
        """The turns of each sequence: its sampled tokens, parted where one is not sampled."""
        found: list[list[list[int]]] = []
        for tokens in self.list_sequences():
            found.append([])
            for t in tokens:
                if found[-1] and found[-1][-1][-1] == t - 1:
                    found[-1][-1].append(t)
                else:
                    found[-1].append([t])
        return found


def assert_column(found: Tensor, expected: dict[int, float]) -> None:
    assert found.tolist() == pytest.approx([expected.get(t, 0.0) for t in range(len(found))])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_equation_over_sampled_tokens_only(seed: int, gamma: float, lam: float) -> None:
    case = PackedCase(seed)
    advantages, returns = {}, {}
    for tokens in case.list_sequences():
        for i, t in enumerate(tokens):  # the definition: a sum of discounted δ, not a recursion
            total = 0.0
            for j in range(i, len(tokens)):
                following = float(case.values[tokens[j + 1]]) if j + 1 < len(tokens) else 0.0
                delta = float(case.rewards[tokens[j]]) + gamma * following - float(case.values[tokens[j]])
                total += (gamma * lam) ** (j - i) * delta
            advantages[t], returns[t] = total, total + float(case.values[t])
    found = gae(case.rewards, case.values, case.mask, case.offsets, gamma, lam)
    assert_column(found[0], advantages)
    assert_column(found[1], returns)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]))
def test_discounted_returns_equal_their_sum(seed: int, gamma: float) -> None:
    case, expected = PackedCase(seed), {}
    for tokens in case.list_sequences():
        for i, t in enumerate(tokens):
            expected[t] = sum(
                gamma ** (j - i) * float(case.rewards[tokens[j]]) for j in range(i, len(tokens))
            )
    assert_column(discount_returns(case.rewards, case.mask, case.offsets, gamma), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.5]),
    st.sampled_from([(1.0, 1.0), (1.7, 1.7), (1.7, 0.6), (0.6, 1.0)]),
)  # fmt: skip
def test_vtrace_equals_its_equation(seed: int, gamma: float, lam: float, bars: tuple[float, float]) -> None:
    rho_bar, c_bar = bars
    case = PackedCase(seed)
    targets: dict[int, float] = {}
    advantages: dict[int, float] = {}
    for tokens in case.list_sequences():
        value = [float(case.values[t]) for t in tokens] + [0.0]
        reward = [float(case.rewards[t]) for t in tokens]
        ratio = [math.exp(float(case.log_ratio[t])) for t in tokens]
        target = [0.0] * (len(tokens) + 1)
        for s in range(len(tokens)):  # v_s = V(s) + Σ_t γ^(t−s) (Π c) δ_t
            total = value[s]
            for t in range(s, len(tokens)):
                product = math.prod(lam * min(c_bar, ratio[i]) for i in range(s, t))
                delta = min(rho_bar, ratio[t]) * (reward[t] + gamma * value[t + 1] - value[t])
                total += gamma ** (t - s) * product * delta
            target[s] = total
        for s, t in enumerate(tokens):
            targets[t] = target[s]
            advantages[t] = min(rho_bar, ratio[s]) * (reward[s] + gamma * target[s + 1] - value[s])
    found = vtrace(
        case.rewards, case.values, case.log_ratio, case.mask, case.offsets, gamma, lam, rho_bar, c_bar
    )
    assert_column(found[0], advantages)
    assert_column(found[1], targets)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]))
def test_vtrace_on_policy_is_the_return_and_gae_at_lambda_one_too(seed: int, gamma: float) -> None:
    case = PackedCase(seed)
    same = torch.where(case.mask, 0.0, math.nan).double()
    returns = discount_returns(case.rewards, case.mask, case.offsets, gamma)
    torch.testing.assert_close(
        vtrace(case.rewards, case.values, same, case.mask, case.offsets, gamma)[1], returns
    )
    torch.testing.assert_close(
        gae(case.rewards, case.values, case.mask, case.offsets, gamma, 1.0)[1], returns
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_turn_is_what_a_sequence_has_sampled_without_a_break(seed: int) -> None:
    case = PackedCase(seed)
    actions = Actions.find(case.mask, case.offsets)
    expected = [tokens for sequence in case.list_turns() for tokens in sequence]
    assert actions.keep_first().index.tolist() == [tokens[0] for tokens in expected]
    for number, tokens in enumerate(expected):
        assert actions.index[actions.turn == number].tolist() == tokens
    turns = [[len(tokens) for tokens in sequence] for sequence in case.list_turns()]
    assert actions.count_turns(5).tolist() == [len(lengths) for lengths in turns]
    assert actions.find_longest_turns(5).tolist() == [max(lengths, default=0) for lengths in turns]


def test_the_end_of_a_sequence_ends_its_turn() -> None:
    actions = Actions.find(torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 2, 5]))
    assert actions.turn.tolist() == [0, 0, 1, 1, 1] and actions.keep_first().index.tolist() == [0, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_by_turn_equals_its_equation_and_asks_for_the_value_of_first_tokens_only(
    seed: int, gamma: float, lam: float
) -> None:
    case = PackedCase(seed)
    advantages, returns = {}, {}
    for sequence in case.list_turns():
        value = [float(case.values[tokens[0]]) for tokens in sequence] + [0.0]
        reward = [sum(float(case.rewards[t]) for t in tokens) for tokens in sequence]
        for i, tokens in enumerate(sequence):
            deltas = [reward[j] + gamma * value[j + 1] - value[j] for j in range(len(sequence))]
            total = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(sequence)))
            advantages |= dict.fromkeys(tokens, total)
            returns |= dict.fromkeys(tokens, total + value[i])
    values, first = torch.full_like(case.values, math.nan), Actions.find(case.mask, case.offsets).keep_first()
    values[first.index] = case.values[first.index]
    found = turn_gae(case.rewards, values, case.mask, case.offsets, gamma, lam)
    assert_column(found[0], advantages)
    assert_column(found[1], returns)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_gae_by_turn_is_gae_where_every_turn_has_one_token(seed: int) -> None:
    case = PackedCase(seed)
    inside = torch.cat([torch.arange(int(n)) for n in case.offsets.diff()])
    mask = case.mask & (inside % 2 == 0)
    arguments = (case.rewards, case.values, mask, case.offsets, 0.9, 0.8)
    for by_turn, by_token in zip(turn_gae(*arguments), gae(*arguments), strict=True):
        torch.testing.assert_close(by_turn, by_token)


def test_lambda_by_sequence_is_each_sequences_own() -> None:
    case = PackedCase(11)
    lengths = torch.tensor([len(tokens) for tokens in case.list_sequences()])
    lam = length_adaptive_lambda(lengths, alpha=0.5)
    assert lam.tolist() == pytest.approx(
        [min(1, max(0, 1 - 1 / (0.5 * max(1, n)))) for n in lengths.tolist()]
    )
    together = gae(case.rewards, case.values, case.mask, case.offsets, 1.0, lam)[0]
    for number, tokens in enumerate(case.list_sequences()):
        alone = gae(case.rewards, case.values, case.mask, case.offsets, 1.0, float(lam[number]))[0]
        assert together[tokens].tolist() == pytest.approx(alone[tokens].tolist())


def test_nothing_sampled_gives_nothing() -> None:
    empty, none = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    offsets = torch.tensor([0, 4])
    for function in (gae, turn_gae):
        for found in function(empty, empty, none, offsets, 1.0, 0.95):
            assert found.tolist() == [0, 0, 0, 0]
        assert function(empty[:0], empty[:0], none[:0], torch.tensor([0]), 1.0, 0.95)[0].shape == (0,)
    for found in vtrace(empty, empty, empty, none, offsets):
        assert found.tolist() == [0, 0, 0, 0]
    assert discount_returns(empty, none, offsets).tolist() == [0, 0, 0, 0]
    assert Actions.find(none[:0], torch.tensor([0])).keep_first().index.shape == (0,)


def test_vtrace_is_defined_where_a_policy_never_samples_a_token() -> None:
    """π / μ is taken within e^±20: the first token is truncated to ρ̄, the second counts for next to
    nothing."""
    log_ratio, mask = torch.tensor([math.inf, -math.inf]).double(), torch.ones(2, dtype=torch.bool)
    rewards, values = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.25, 0.5]).double()
    advantages, targets = vtrace(rewards, values, log_ratio, mask, torch.tensor([0, 2]))
    assert targets.tolist() == pytest.approx([0.5, 0.5], abs=1e-8)
    assert advantages.tolist() == pytest.approx([0.25, 0.0], abs=1e-8)


def test_lambda_of_a_short_sequence_is_not_negative() -> None:
    assert length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 10**9]), alpha=0.05).tolist() == pytest.approx(
        [0, 0, 0, 0.5, 1]
    )


def test_the_overlong_penalty_begins_at_the_cache_and_ends_at_minus_one() -> None:
    lengths = torch.tensor([1, 80, 90, 99, 100, 120])
    assert shaping.soft_overlong_penalty(lengths, 100, 20).tolist() == pytest.approx(
        [0, 0, -0.5, -0.95, -1, -1]
    )


def test_kl_in_the_reward_is_charged_token_by_token_and_the_score_comes_last() -> None:
    mask = torch.tensor([False, True, True, False, True])
    shaped = shaping.charge_kl(
        torch.tensor([1.0, 2.0]),
        torch.tensor([math.nan, 0.1, 0.2, math.nan, 0.3]),
        0.5,
        mask,
        torch.tensor([2, 4]),
    )
    assert shaped.tolist() == pytest.approx([0, -0.05, 0.9, 0, 1.85])


def test_normalised_rewards_have_mean_zero_and_equal_ones_give_zero() -> None:
    rewards = torch.tensor([1.0, 2, 3, 10])
    found = shaping.normalize_rewards(rewards)
    assert float(found.mean()) == pytest.approx(0, abs=1e-6) and float(
        found.square().mean()
    ) == pytest.approx(1)
    assert shaping.normalize_rewards(rewards, clip=1.0).abs().max() <= 1
    assert shaping.normalize_rewards(torch.full((3,), 0.3)).tolist() == [0, 0, 0]


def test_filtration_draws_in_proportion_to_the_power_of_the_score() -> None:
    scores = torch.tensor([0.0, 1.0, -2.0]).repeat(3000)
    counts = shaping.draw_by_score(scores, 2.0, torch.Generator().manual_seed(0))
    shares = [float(counts[scores.abs() == k].sum()) / len(scores) for k in range(3)]
    assert shares == pytest.approx([0, 0.2, 0.8], abs=0.02) and int(counts.sum()) == len(scores)
    again = shaping.draw_by_score(scores, 2.0, torch.Generator().manual_seed(0))
    assert torch.equal(counts, again)
    everything_zero = shaping.draw_by_score(torch.zeros(5), 2.0, torch.Generator().manual_seed(0))
    assert everything_zero.shape == (5,) and int(everything_zero.sum()) == 5


# ---- the critic, and the implicit reward model


def draw_columns(seed: int, num_tokens: int = 20) -> dict[str, Tensor]:
    """Six sequences, one of them without a sampled token; NaN where not sampled."""
    rng = torch.Generator().manual_seed(seed)
    sequence = torch.sort(torch.randint(0, 6, (num_tokens,), generator=rng)).values
    mask = (torch.rand(num_tokens, generator=rng) < 0.7) & (sequence != 2)
    found = {
        name: torch.randn(num_tokens, generator=rng, dtype=torch.float64)
        for name in ("x", "before", "targets")
    }
    found["outcomes"] = torch.tensor([0.0, 0.6, 1, 0, 0.25, 1]).double()[sequence]
    found["weights"] = torch.rand(num_tokens, generator=rng, dtype=torch.float64)
    return {name: torch.where(mask, column, math.nan) for name, column in found.items()} | {
        "mask": mask, "sequence": sequence,
    }  # fmt: skip


def compute_critic_loss(c: dict[str, Tensor], clip: float | None = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    return value_loss(c["x"], c["before"], c["targets"], c["mask"], c["weights"], clip)


def compute_reward_model_loss(c: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return implicit_reward_loss(c["x"], c["before"], c["outcomes"], c["mask"], c["sequence"], 6, 0.3)


LOSSES = {
    "critic": compute_critic_loss,
    "critic unclipped": lambda c: compute_critic_loss(c, None),
    "reward model": compute_reward_model_loss,
}


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_values_equals_its_equation(seed: int, clip: float | None) -> None:
    c, expected, errors, num_clipped = draw_columns(seed), 0.0, [], 0
    trained = c["mask"].nonzero()[:, 0].tolist()
    for t in trained:
        value, before, target = (float(c[name][t]) for name in ("x", "before", "targets"))
        squares = [(value - target) ** 2]
        if clip is not None:
            squares.append((min(max(value, before - clip), before + clip) - target) ** 2)
            num_clipped += squares[1] > squares[0]
        errors.append(squares[0])
        expected += 0.5 * float(c["weights"][t]) * max(squares)
    loss, sums = compute_critic_loss(c, clip)
    assert float(loss) == pytest.approx(expected)
    values, targets = (c[name][trained].tolist() for name in ("x", "targets"))
    n, mean = len(trained), sum(targets) / len(trained)
    variance = sum((r - mean) ** 2 for r in targets) / n
    assert summarize_values(sums) == pytest.approx({
        "critic/loss": expected, "critic/value_mean": sum(values) / n, "critic/target_mean": mean,
        "critic/clip_fraction": num_clipped / n, "critic/explained_variance": 1 - sum(errors) / n / variance,
    })  # fmt: skip
    assert num_clipped > 0 or clip is None


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_implicit_rewards_is_the_cross_entropy_of_their_sum(seed: int) -> None:
    c, expected, right, told = draw_columns(seed), 0.0, 0, 0
    assert implicit_rewards(c["x"], c["before"], 0.3)[c["mask"]].tolist() == pytest.approx(
        [
            0.3 * (x - y)
            for x, y, m in zip(c["x"].tolist(), c["before"].tolist(), c["mask"].tolist(), strict=True)
            if m
        ]
    )
    for number in range(6):
        tokens = [t for t in range(20) if c["mask"][t] and c["sequence"][t] == number]
        if not tokens:
            continue
        probability = 1 / (1 + math.exp(-0.3 * sum(float(c["x"][t] - c["before"][t]) for t in tokens)))
        outcome = float(c["outcomes"][tokens[0]])
        expected -= (outcome * math.log(probability) + (1 - outcome) * math.log(1 - probability)) / 6
        right, told = right + ((probability > 0.5) == (outcome > 0.5)), told + 1
    loss, sums = compute_reward_model_loss(c)
    assert float(loss) == pytest.approx(expected)
    assert summarize_rewards(sums) == pytest.approx(
        {"reward_model/loss": expected, "reward_model/accuracy": right / told}
    )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_values_and_rewards_pass_gradcheck(name: str) -> None:
    c = draw_columns(1)
    leaf = torch.where(c["mask"], c["x"], 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](c | {"x": x})[0], leaf)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_sampled_cannot_matter_to_a_value_or_reward_even_when_it_is_nan(name: str) -> None:
    dirty = draw_columns(1)
    clean = {
        key: torch.where(dirty["mask"], c, 0.5) if c.is_floating_point() else c for key, c in dirty.items()
    }
    leaves, found = [], []
    for c in (dirty, clean):
        leaves.append(c["x"].clone().requires_grad_())
        found.append(LOSSES[name](c | {"x": leaves[-1]}))
        found[-1][0].backward()
    assert found[0][0].isfinite() and torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] and torch.equal(leaves[0].grad, leaves[1].grad)
    assert leaves[0].grad[~dirty["mask"]].abs().sum() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_values_and_rewards_do_not_depend_on_microbatches_or_order(name: str) -> None:
    c = draw_columns(1)
    whole, sums = LOSSES[name](c)
    for parts in ([[0, 1], [2, 3, 4], [5]], [[4, 2, 0, 5, 1, 3]]):
        pieces = []
        for part in parts:
            index = torch.cat([(c["sequence"] == number).nonzero()[:, 0] for number in part])
            piece = {key: column[index] for key, column in c.items()}
            piece["sequence"] = torch.tensor([part.index(n) for n in piece["sequence"].tolist()])
            pieces.append(LOSSES[name](piece))
        assert float(sum(loss for loss, _ in pieces)) == pytest.approx(float(whole))
        for key, value in sums.items():
            assert float(sum(found[key] for _, found in pieces)) == pytest.approx(float(value)), key


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [0, 20])
def test_no_sampled_token_gives_a_value_loss_of_zero_and_finite_figures(name: str, size: int) -> None:
    c = {key: column[:size] for key, column in draw_columns(1).items()}
    loss, sums = LOSSES[name](c | {"mask": torch.zeros(size, dtype=torch.bool)})
    assert float(loss) == 0
    summary = summarize_rewards(sums) if name == "reward model" else summarize_values(sums)
    assert set(summary.values()) == {0.0}


def test_equal_targets_explain_nothing() -> None:
    c = draw_columns(1) | {"targets": torch.full((20,), 0.3).double()}
    assert summarize_values(compute_critic_loss(c)[1])["critic/explained_variance"] == 0


def test_coefficients_above_one_overflow_in_their_own_sequence_only() -> None:
    far = torch.full((2000,), 5.0)
    far[1000:] = 0.0
    offsets, mask = torch.tensor([0, 1000, 2000]), torch.ones(2000, dtype=torch.bool)
    rewards = torch.zeros(2000).index_fill(0, torch.tensor([999, 1999]), 1.0)
    advantages, targets = vtrace(rewards, torch.zeros(2000), far, mask, offsets, rho_bar=100.0, c_bar=100.0)
    assert not advantages.isnan().any() and not targets.isnan().any()
    assert targets[1000:].tolist() == [1.0] * 1000
