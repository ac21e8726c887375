"""Advantages along a sequence, and rewards before them, against loops written from the equations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algos import rewards as shaping
from algos.returns import discounted, gae, length_adaptive_lambda, vtrace


class Case:
    """Packed sequences; tokens of an environment stand between the sampled ones, and hold NaN."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 7, (5,), generator=rng)
        total = int(lengths.sum())
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.mask = torch.rand(total, generator=rng) < 0.6
        self.rewards, self.values, self.log_ratio = (
            torch.where(self.mask, torch.randn(total, generator=rng, dtype=torch.float64), math.nan) for _ in range(3)
        )

    def sequences(self) -> list[list[int]]:
        """The sampled tokens of each sequence."""
        bounds = self.offsets.tolist()
        return [
            [t for t in range(a, b) if self.mask[t]] for a, b in zip(bounds, bounds[1:], strict=False)
        ]  # fmt: skip


def expect(found: Tensor, expected: dict[int, float]) -> None:
    assert found.tolist() == pytest.approx([expected.get(t, 0.0) for t in range(len(found))])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_equation_over_sampled_tokens_only(seed: int, gamma: float, lam: float) -> None:
    case = Case(seed)
    advantages, returns = {}, {}
    for tokens in case.sequences():
        for i, t in enumerate(tokens):  # the definition: a sum of discounted δ, not a recursion
            total = 0.0
            for j in range(i, len(tokens)):
                following = float(case.values[tokens[j + 1]]) if j + 1 < len(tokens) else 0.0
                delta = float(case.rewards[tokens[j]]) + gamma * following - float(case.values[tokens[j]])
                total += (gamma * lam) ** (j - i) * delta
            advantages[t], returns[t] = total, total + float(case.values[t])
    found = gae(case.rewards, case.values, case.mask, case.offsets, gamma, lam)
    expect(found[0], advantages)
    expect(found[1], returns)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]))
def test_discounted_returns_equal_their_sum(seed: int, gamma: float) -> None:
    case, expected = Case(seed), {}
    for tokens in case.sequences():
        for i, t in enumerate(tokens):
            expected[t] = sum(gamma ** (j - i) * float(case.rewards[tokens[j]]) for j in range(i, len(tokens)))
    expect(discounted(case.rewards, case.mask, case.offsets, gamma), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.5]), st.sampled_from([1.0, 1.7]))
def test_vtrace_equals_its_equation(seed: int, gamma: float, lam: float, bar: float) -> None:
    case = Case(seed)
    targets: dict[int, float] = {}
    advantages: dict[int, float] = {}
    for tokens in case.sequences():
        value = [float(case.values[t]) for t in tokens] + [0.0]
        reward = [float(case.rewards[t]) for t in tokens]
        ratio = [math.exp(float(case.log_ratio[t])) for t in tokens]
        target = [0.0] * (len(tokens) + 1)
        for s in range(len(tokens)):  # v_s = V(s) + Σ_t γ^(t−s) (Π c) δ_t
            total = value[s]
            for t in range(s, len(tokens)):
                product = math.prod(lam * min(bar, ratio[i]) for i in range(s, t))
                delta = min(bar, ratio[t]) * (reward[t] + gamma * value[t + 1] - value[t])
                total += gamma ** (t - s) * product * delta
            target[s] = total
        for s, t in enumerate(tokens):
            targets[t] = target[s]
            advantages[t] = min(bar, ratio[s]) * (reward[s] + gamma * target[s + 1] - value[s])
    found = vtrace(case.rewards, case.values, case.log_ratio, case.mask, case.offsets, gamma, lam, bar, bar)
    expect(found[0], advantages)
    expect(found[1], targets)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]))
def test_vtrace_on_policy_is_the_return_and_gae_at_lambda_one_too(seed: int, gamma: float) -> None:
    case = Case(seed)
    same = torch.where(case.mask, 0.0, math.nan).double()
    returns = discounted(case.rewards, case.mask, case.offsets, gamma)
    torch.testing.assert_close(vtrace(case.rewards, case.values, same, case.mask, case.offsets, gamma)[1], returns)
    torch.testing.assert_close(gae(case.rewards, case.values, case.mask, case.offsets, gamma, 1.0)[1], returns)


def test_lambda_by_sequence_is_each_sequences_own() -> None:
    case = Case(11)
    lengths = torch.tensor([len(tokens) for tokens in case.sequences()])
    lam = length_adaptive_lambda(lengths, alpha=0.5)
    assert lam.tolist() == pytest.approx([min(1, max(0, 1 - 1 / (0.5 * max(1, n)))) for n in lengths.tolist()])
    together = gae(case.rewards, case.values, case.mask, case.offsets, 1.0, lam)[0]
    for number, tokens in enumerate(case.sequences()):
        alone = gae(case.rewards, case.values, case.mask, case.offsets, 1.0, float(lam[number]))[0]
        assert together[tokens].tolist() == pytest.approx(alone[tokens].tolist())


def test_nothing_sampled_gives_nothing() -> None:
    empty, none = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    offsets = torch.tensor([0, 4])
    for found in (*gae(empty, empty, none, offsets, 1.0, 0.95), *vtrace(empty, empty, empty, none, offsets)):
        assert found.tolist() == [0, 0, 0, 0]
    assert gae(empty[:0], empty[:0], none[:0], torch.tensor([0]), 1.0, 0.95)[0].shape == (0,)


def test_the_overlong_penalty_begins_at_the_cache_and_ends_at_minus_one() -> None:
    lengths = torch.tensor([1, 80, 90, 99, 100, 120])
    assert shaping.soft_overlong_penalty(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.5, -0.95, -1, -1])


def test_dynamic_sampling_keeps_groups_whose_rewards_differ() -> None:
    rewards, groups = torch.tensor([1.0, 1, 0, 1, 0.5]), torch.tensor([7, 7, 9, 9, 12])
    assert shaping.informative(rewards, groups).tolist() == [False, False, True, True, False]


def test_kl_in_the_reward_is_charged_token_by_token_and_the_score_comes_last() -> None:
    mask = torch.tensor([False, True, True, False, True])
    shaped = shaping.with_kl(
        torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 0.1, 0.2, math.nan, 0.3]), 0.5, mask, torch.tensor([2, 4])
    )
    assert shaped.tolist() == pytest.approx([0, -0.05, 0.9, 0, 1.85])


def test_normalised_rewards_have_mean_zero_and_equal_ones_give_zero() -> None:
    rewards = torch.tensor([1.0, 2, 3, 10])
    found = shaping.normalised(rewards)
    assert float(found.mean()) == pytest.approx(0, abs=1e-6) and float(found.square().mean()) == pytest.approx(1)
    assert shaping.normalised(rewards, clip=1.0).abs().max() <= 1
    assert shaping.normalised(torch.full((3,), 0.3)).tolist() == [0, 0, 0]


def test_filtration_draws_in_proportion_to_the_power_of_the_score() -> None:
    scores = torch.tensor([0.0, 1.0, -2.0]).repeat(3000)
    drawn = shaping.filtered(scores, 2.0, torch.Generator().manual_seed(0))
    shares = torch.bincount(scores[drawn].abs().long(), minlength=3) / len(drawn)
    assert shares.tolist() == pytest.approx([0, 0.2, 0.8], abs=0.02)
    everything_zero = shaping.filtered(torch.zeros(5), 2.0, torch.Generator().manual_seed(0))
    assert len(everything_zero) == 5 and everything_zero.max() < 5
