"""Advantages of samples and of their tokens against slow references in float64, written from the
equations."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algos.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    compute_value_targets,
    dr_grpo_advantages,
    grpo_advantages,
    opmd_advantages,
    prime_advantages,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
    whiten,
)
from algos.returns import discount_returns, gae, length_adaptive_lambda, turn_gae, vtrace
from configs.advantages import Advantage, GaeConfig, PrimeConfig, Span, VtraceConfig
from configs.algo import AlgoConfig
from configs.surrogates import OpmdConfig

rewards_and_sizes = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5)


def flatten_groups(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Rewards [N] and numbers of groups [N], the samples of a group apart from each other."""
    rewards = torch.tensor([r for group in groups for r in group])
    numbers = torch.tensor([g * 7 for g, group in enumerate(groups) for _ in group])
    shuffled = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(len(rewards)))
    return rewards[shuffled], numbers[shuffled]


def list_peers(values: list[float], numbers: list[int], i: int) -> tuple[list[float], list[float]]:
    """Returns the values of the group of sample i, and the same without the value of sample i."""
    mates = [j for j in range(len(values)) if numbers[j] == numbers[i]]
    return [values[j] for j in mates], [values[j] for j in mates if j != i]


@settings(deadline=None)
@given(rewards_and_sizes, st.sampled_from([0.1, 1.0, 30.0]))
def test_advantages_equal_their_equations(groups: list[list[float]], tau: float) -> None:
    rewards, numbers = flatten_groups(groups)
    found = {f: f(rewards, numbers).tolist() for f in (grpo_advantages, dr_grpo_advantages, rloo_advantages)}
    found[opmd_advantages] = opmd_advantages(rewards, numbers, tau).tolist()
    for at, value in enumerate(rewards.tolist()):
        values, others = list_peers(rewards.tolist(), numbers.tolist(), at)
        mean, n = sum(values) / len(values), len(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 0.0
        baseline = tau * math.log(sum(math.exp(v / tau) for v in values) / n)
        assert found[grpo_advantages][at] == pytest.approx((value - mean) / (std + 1e-6), abs=1e-4)
        assert found[dr_grpo_advantages][at] == pytest.approx(value - mean, abs=1e-6)
        assert found[rloo_advantages][at] == pytest.approx(
            value - sum(others) / (n - 1) if n > 1 else 0.0, abs=1e-5
        )
        assert found[opmd_advantages][at] == pytest.approx(value - baseline, abs=1e-5)


@settings(deadline=None)
@given(rewards_and_sizes)
def test_leave_one_out_is_dr_grpo_times_n_over_n_minus_one(groups: list[list[float]]) -> None:
    rewards, numbers = flatten_groups(groups)
    sizes = torch.tensor([len(groups[number // 7]) for number in numbers.tolist()])
    scale = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(
        rloo_advantages(rewards, numbers), dr_grpo_advantages(rewards, numbers) * scale
    )


@settings(deadline=None)
@given(rewards_and_sizes)
def test_the_soft_baseline_lies_between_the_mean_and_the_best_and_comes_to_both(
    groups: list[list[float]],
) -> None:
    rewards, numbers = flatten_groups(groups)
    best = torch.tensor([max(groups[number // 7]) for number in numbers.tolist()])
    torch.testing.assert_close(
        opmd_advantages(rewards, numbers, 1e6), dr_grpo_advantages(rewards, numbers), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(opmd_advantages(rewards, numbers, 1e-4), rewards - best, atol=1e-3, rtol=0)
    between = opmd_advantages(rewards, numbers, 0.5)
    assert (between <= dr_grpo_advantages(rewards, numbers) + 1e-5).all() and (
        between >= rewards - best - 1e-5
    ).all()


def test_the_baseline_of_remax_is_the_greedy_response() -> None:
    assert remax_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.25, 0.25, 1.0])).tolist() == [
        0.75,
        -0.25,
        -0.5,
    ]


def whitened_reference(values: list[float], mask: list[bool]) -> list[float]:
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean = sum(kept) / max(1, len(kept))
    std = math.sqrt(sum((v - mean) ** 2 for v in kept) / max(1, len(kept)))
    return [(v - mean) / std if m and std > 1e-8 else 0.0 for v, m in zip(values, mask, strict=True)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5).map(lambda v: round(v, 6)), st.booleans()), max_size=20))
def test_reinforce_pp_whitens_over_the_tokens_of_the_batch(tokens: list[tuple[float, bool]]) -> None:
    mask = torch.tensor([m for _, m in tokens], dtype=torch.bool)
    values = torch.tensor([v for v, _ in tokens], dtype=torch.float64)
    poisoned = torch.where(mask, values, math.nan)
    expected = whitened_reference(values.tolist(), mask.tolist())
    for function in (whiten, reinforce_pp_advantages):
        assert function(poisoned, mask).tolist() == pytest.approx(expected, abs=1e-4, rel=1e-4)


class SampledCase:
    """Packed sequences of two groups of three and a group of one; what is not sampled holds NaN."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 7, (7,), generator=rng)
        total = int(lengths.sum())
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        sequence = torch.repeat_interleave(torch.arange(7), lengths)
        sampled = torch.rand(total, generator=rng) < 0.7
        sampled[offsets[:-1]] = True

        def column() -> Tensor:
            return torch.where(sampled, torch.randn(total, generator=rng), math.nan)

        rewards = torch.rand(7, generator=rng)
        self.samples = AdvantageInputs(
            rewards=rewards,
            token_rewards=column(),
            groups=torch.tensor([4, 9, 4, 9, 2, 9, 4]),
            offsets=offsets,
            sequence=sequence,
            sampled=sampled,
            mask=sampled & (torch.rand(total, generator=rng) < 0.8),
            greedy_rewards=torch.rand(7, generator=rng),
            values=column(),
            log_ratio=column(),
            process_rewards=column(),
        )

    def list_tokens(self, number: int) -> list[int]:
        """The sampled tokens of a sequence."""
        s = self.samples
        return [t for t in range(int(s.offsets[number]), int(s.offsets[number + 1])) if s.sampled[t]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.9]))
def test_prime_leaves_one_out_of_mean_process_rewards_and_of_outcomes(seed: int, gamma: float) -> None:
    case = SampledCase(seed)
    s, groups = case.samples, case.samples.groups.tolist()
    process, rewards = s.process_rewards.tolist(), s.rewards.tolist()
    means = [sum(process[t] for t in case.list_tokens(i)) / len(case.list_tokens(i)) for i in range(7)]
    expected = [0.0] * len(process)
    for i in range(7):
        all_means, others = list_peers(means, groups, i)
        baseline = sum(others) / len(others) if others else 0.0
        _, rewards_of_others = list_peers(rewards, groups, i)
        outcome = rewards[i] - sum(rewards_of_others) / len(rewards_of_others) if len(all_means) > 1 else 0.0
        tokens = case.list_tokens(i)
        for place, t in enumerate(tokens):
            later = enumerate(tokens[place:])
            expected[t] = outcome + sum(gamma**distance * (process[u] - baseline) for distance, u in later)
    found = prime_advantages(s.rewards, s.process_rewards, s.groups, s.sampled, s.offsets, gamma)
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


ALGOS = {
    **{name.value: AlgoConfig(advantage=name) for name in Advantage},
    "opmd, other tau": AlgoConfig(advantage=Advantage.opmd, opmd=OpmdConfig(tau=0.2)),
    "prime, discounted": AlgoConfig(advantage=Advantage.prime, prime=PrimeConfig(gamma=0.9)),
    "gae by turn": AlgoConfig(
        advantage=Advantage.gae, gae=GaeConfig(span=Span.turn, whiten=False, gamma=0.9, lam=0.8)
    ),
    "gae by length": AlgoConfig(advantage=Advantage.gae, gae=GaeConfig(length_alpha=0.5, critic_lam=1.0)),
    "vtrace, other bars": AlgoConfig(
        advantage=Advantage.vtrace, vtrace=VtraceConfig(gamma=0.9, lam=0.8, rho_bar=1.5, c_bar=0.7)
    ),
}


def expected_advantages(case: SampledCase, name: str) -> Tensor:
    """Returns the composition of each name, written out."""
    s, algo = case.samples, ALGOS[name]
    lengths = torch.tensor([len(case.list_tokens(i)) for i in range(7)])
    along = (s.token_rewards, s.values, s.sampled, s.offsets)
    return {
        "grpo": lambda: grpo_advantages(s.rewards, s.groups)[s.sequence],
        "dr_grpo": lambda: dr_grpo_advantages(s.rewards, s.groups)[s.sequence],
        "rloo": lambda: rloo_advantages(s.rewards, s.groups)[s.sequence],
        "opmd": lambda: opmd_advantages(s.rewards, s.groups, 1.0)[s.sequence],
        "opmd, other tau": lambda: opmd_advantages(s.rewards, s.groups, 0.2)[s.sequence],
        "remax": lambda: (s.rewards - s.greedy_rewards)[s.sequence],
        "reinforce_pp": lambda: reinforce_pp_advantages(
            discount_returns(s.token_rewards, s.sampled, s.offsets), s.mask
        ),
        "reinforce_pp_baseline": lambda: reinforce_pp_advantages(
            dr_grpo_advantages(s.rewards, s.groups)[s.sequence], s.mask
        ),
        "prime": lambda: whiten(
            prime_advantages(s.rewards, s.process_rewards, s.groups, s.sampled, s.offsets, 1.0), s.mask
        ),
        "prime, discounted": lambda: whiten(
            prime_advantages(s.rewards, s.process_rewards, s.groups, s.sampled, s.offsets, 0.9), s.mask
        ),
        "gae": lambda: whiten(gae(*along, 1.0, 0.95)[0], s.mask),
        "gae by turn": lambda: turn_gae(*along, 0.9, 0.8)[0],
        "gae by length": lambda: whiten(gae(*along, 1.0, length_adaptive_lambda(lengths, 0.5))[0], s.mask),
        "vtrace": lambda: vtrace(s.token_rewards, s.values, s.log_ratio, s.sampled, s.offsets)[0],
        "vtrace, other bars": lambda: vtrace(
            s.token_rewards, s.values, s.log_ratio, s.sampled, s.offsets, algo.vtrace.gamma, 0.8, 1.5, 0.7
        )[0],
    }[name]()


@pytest.mark.parametrize("name", ALGOS)
def test_each_name_composes_what_it_says(name: str) -> None:
    assert set(ADVANTAGES) == set(Advantage)
    for seed in range(5):
        case = SampledCase(seed)
        found = ADVANTAGES[ALGOS[name].advantage](case.samples, ALGOS[name])
        torch.testing.assert_close(found, expected_advantages(case, name))


@pytest.mark.parametrize("name", ["gae", "gae by turn", "gae by length", "vtrace", "vtrace, other bars"])
def test_the_critic_learns_returns_with_a_lambda_of_its_own_or_the_targets_of_vtrace(name: str) -> None:
    s = SampledCase(2).samples
    along = (s.token_rewards, s.values, s.sampled, s.offsets)
    expected = {
        "gae": lambda: gae(*along, 1.0, 0.95)[1],
        "gae by turn": lambda: turn_gae(*along, 0.9, 0.95)[1],
        "gae by length": lambda: discount_returns(s.token_rewards, s.sampled, s.offsets),
        "vtrace": lambda: vtrace(s.token_rewards, s.values, s.log_ratio, s.sampled, s.offsets)[1],
        "vtrace, other bars": lambda: vtrace(
            s.token_rewards, s.values, s.log_ratio, s.sampled, s.offsets, 0.9, 0.8, 1.5, 0.7
        )[1],
    }[name]()
    torch.testing.assert_close(compute_value_targets(s, ALGOS[name]), expected)


COLUMNS = ("token_rewards", "values", "log_ratio", "process_rewards")


@pytest.mark.parametrize("name", ALGOS)
def test_what_is_not_sampled_cannot_matter_to_an_advantage_even_when_it_is_nan(name: str) -> None:
    algo = ALGOS[name]
    for seed in range(5):
        dirty = SampledCase(seed).samples
        clean = dataclasses.replace(
            dirty, **{c: torch.where(dirty.sampled, getattr(dirty, c), 7.0) for c in COLUMNS}
        )
        found = [ADVANTAGES[algo.advantage](s, algo)[dirty.sampled] for s in (dirty, clean)]
        assert found[0].isfinite().all() and torch.equal(*found)
        if algo.needs_critic:
            targets = [compute_value_targets(s, algo)[dirty.sampled] for s in (dirty, clean)]
            assert targets[0].isfinite().all() and torch.equal(*targets)


@pytest.mark.parametrize("name", ALGOS)
def test_the_order_of_sequences_cannot_matter_to_an_advantage(name: str) -> None:
    algo = ALGOS[name]
    for seed in range(5):
        s = SampledCase(seed).samples
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        index = torch.cat([torch.arange(int(s.offsets[i]), int(s.offsets[i + 1])) for i in order.tolist()])
        lengths = s.offsets.diff()[order]
        moved = AdvantageInputs(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            sequence=torch.repeat_interleave(torch.arange(7), lengths),
            **{c: getattr(s, c)[order] for c in ("rewards", "groups", "greedy_rewards")},
            **{c: getattr(s, c)[index] for c in ("sampled", "mask", *COLUMNS)},
        )
        found, expected = ADVANTAGES[algo.advantage](moved, algo), ADVANTAGES[algo.advantage](s, algo)[index]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALGOS)
def test_equal_rewards_a_group_of_one_and_nothing_to_train_give_finite_advantages(name: str) -> None:
    algo, s = ALGOS[name], SampledCase(3).samples
    zeros = torch.zeros(len(s.sequence))
    equal = {c: torch.where(s.sampled, 0.5, math.nan) for c in COLUMNS}
    nothing = dataclasses.replace(s, sampled=zeros.bool(), mask=zeros.bool())
    for case in (
        dataclasses.replace(s, rewards=torch.full((7,), 0.3), greedy_rewards=torch.full((7,), 0.3), **equal),
        dataclasses.replace(s, groups=torch.arange(7)),
        dataclasses.replace(s, mask=zeros.bool()),
        nothing,
    ):
        assert ADVANTAGES[algo.advantage](case, algo).isfinite().all()
    compares = algo.advantage.needs_groups and algo.advantage is not Advantage.prime
    if compares:
        alone = ADVANTAGES[algo.advantage](dataclasses.replace(s, groups=torch.arange(7)), algo)
        assert alone.tolist() == pytest.approx([0.0] * len(alone), abs=1e-6)
    if name in ("reinforce_pp", "reinforce_pp_baseline", "gae", "gae by length"):
        assert (
            ADVANTAGES[algo.advantage](dataclasses.replace(s, mask=zeros.bool()), algo).tolist()
            == zeros.tolist()
        )


def test_a_log_ratio_without_bound_gives_finite_advantages_and_targets() -> None:
    s = SampledCase(1).samples
    for log_ratio in (math.inf, -math.inf):
        far = dataclasses.replace(s, log_ratio=torch.full_like(s.values, log_ratio))
        assert ADVANTAGES[Advantage.vtrace](far, ALGOS["vtrace"])[s.sampled].isfinite().all()
        assert compute_value_targets(far, ALGOS["vtrace"])[s.sampled].isfinite().all()


@pytest.mark.parametrize("name", ALGOS)
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    none, numbers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    empty = AdvantageInputs(
        rewards=none,
        token_rewards=none,
        groups=numbers,
        offsets=torch.zeros(1, dtype=torch.int64),
        sequence=numbers,
        sampled=none.bool(),
        mask=none.bool(),
        greedy_rewards=none,
        values=none,
        log_ratio=none,
        process_rewards=none,
    )
    assert ADVANTAGES[ALGOS[name].advantage](empty, ALGOS[name]).shape == (0,)
