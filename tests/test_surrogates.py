"""Surrogates and corrections against slow references in float64, written token by token from the equations."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algos import corrections, kl
from algos.surrogates import (
    Tokens,
    aipo,
    cispo,
    dppo,
    gspo,
    kimi,
    m2po,
    opmd,
    ppo,
    sapo,
    second_moment_mask,
    topr,
)

Row = dict[str, float]


def make(seed: int, num_tokens: int = 24, spread: float = 0.4) -> Tokens:
    """Six sequences, some tokens not trained, one sequence with none."""
    rng = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.randn(num_tokens, generator=rng, dtype=torch.float64)

    logprobs = -rand().abs() - 0.05
    sequence = torch.arange(num_tokens) * 6 // num_tokens
    mask = (torch.rand(num_tokens, generator=rng) < 0.7) & (sequence != 3)
    return Tokens(
        logprobs=torch.where(mask, logprobs, 0.0).requires_grad_(),
        proximal=torch.where(mask, logprobs + spread * rand(), 0.0),
        behavior=torch.where(mask, logprobs + spread * rand(), 0.0),
        advantages=torch.where(mask, rand(), 0.0),
        mask=mask,
        sequence=sequence,
    )


def rows(tokens: Tokens) -> list[Row]:
    found = []
    for t in range(len(tokens.mask)):
        mates = [u for u in range(len(tokens.mask)) if tokens.mask[u] and tokens.sequence[u] == tokens.sequence[t]]
        gaps = [float(tokens.logprobs[u] - tokens.proximal[u]) for u in mates]
        found.append({
            "lp": float(tokens.logprobs[t]), "old": float(tokens.proximal[t]), "mu": float(tokens.behavior[t]),
            "a": float(tokens.advantages[t]), "s": math.exp(sum(gaps) / len(gaps)) if gaps else 1.0,
        })  # fmt: skip
    return found


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def scalar_ppo(r: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    loss = max(-a * r, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * dual) if dual is not None and a < 0 else loss


# name: (ours, loss of one token, derivative of it by log π_θ)
CASES: dict[str, tuple[Callable[[Tokens], Tensor], Callable[[Row], float], Callable[[Row], float] | None]] = {
    "ppo": (lambda x: ppo(x, 0.2, 0.28, 3.0), lambda r: scalar_ppo(math.exp(r["lp"] - r["old"]), r["a"], 0.2, 0.28, 3.0), None),
    "gspo": (lambda x: gspo(x, 0.03, 0.04), lambda r: scalar_ppo(r["s"], r["a"], 0.03, 0.04), None),
    "cispo": (
        lambda x: cispo(x, 0.2, 0.3),
        lambda r: -clip(math.exp(r["lp"] - r["old"]), 0.8, 1.3) * r["a"] * r["lp"],
        lambda r: -clip(math.exp(r["lp"] - r["old"]), 0.8, 1.3) * r["a"],
    ),
    "sapo": (
        lambda x: sapo(x, 1.0, 1.05),
        lambda r: -r["a"] * (4 / (t := 1.0 if r["a"] > 0 else 1.05)) / (1 + math.exp(-t * (math.exp(r["lp"] - r["old"]) - 1))),
        None,
    ),
    "topr": (
        topr,
        lambda r: -(1.0 if r["a"] > 0 else clip(math.exp(r["lp"] - r["mu"]), 0, 1)) * r["a"] * r["lp"],
        lambda r: -(1.0 if r["a"] > 0 else clip(math.exp(r["lp"] - r["mu"]), 0, 1)) * r["a"],
    ),
    "dppo": (
        lambda x: dppo(x, 0.1, 0.15),
        lambda r: dppo_gradient(r) * r["lp"],
        lambda r: dppo_gradient(r),
    ),
    "aipo": (
        lambda x: aipo(x, 1.5),
        lambda r: -min(math.exp(r["lp"] - r["mu"]), 1.5) * r["a"] * r["lp"],
        lambda r: -min(math.exp(r["lp"] - r["mu"]), 1.5) * r["a"],
    ),
    "kimi": (
        lambda x: kimi(x, 0.1),
        lambda r: -r["a"] * r["lp"] + 0.05 * (r["lp"] - r["old"]) ** 2,
        lambda r: -r["a"] + 0.1 * (r["lp"] - r["old"]),
    ),
    "opmd": (lambda x: opmd(x, 1.0), lambda r: -r["a"] * r["lp"] / 2, lambda r: -r["a"] / 2),
}  # fmt: skip


def dppo_gradient(r: Row) -> float:
    moved = math.exp(r["lp"]) - math.exp(r["mu"])
    keep = moved <= 0.15 if r["a"] > 0 else moved >= -0.1
    return -keep * min(math.exp(r["lp"] - r["mu"]), 20) * r["a"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_each_surrogate_equals_its_equation(name: str, seed: int) -> None:
    ours, loss, derivative = CASES[name]
    tokens = make(seed)
    found = ours(tokens)
    trained = tokens.mask.tolist()
    expected = [loss(row) for row in rows(tokens)]
    assert found[tokens.mask].tolist() == pytest.approx([e for e, m in zip(expected, trained, strict=True) if m])
    (gradient,) = torch.autograd.grad(torch.where(tokens.mask, found, 0.0).sum(), tokens.logprobs)
    if derivative is not None:
        expected = [derivative(row) if m else 0.0 for row, m in zip(rows(tokens), trained, strict=True)]
        assert gradient.tolist() == pytest.approx(expected)
    assert gradient[~tokens.mask].abs().sum() == 0


@pytest.mark.parametrize("name", ["ppo", "sapo", "kimi", "opmd"])
def test_surrogates_without_stopped_gradients_pass_gradcheck(name: str) -> None:
    tokens = make(3)

    def loss(logprobs: Tensor) -> Tensor:
        changed = {
            field: getattr(tokens, field) for field in ("proximal", "behavior", "advantages", "mask", "sequence")
        }
        return torch.where(tokens.mask, CASES[name][0](Tokens(logprobs=logprobs, **changed)), 0.0).sum()

    assert torch.autograd.gradcheck(loss, tokens.logprobs)


def test_a_sequence_moves_as_one_in_gspo_and_alone_it_is_ppo() -> None:
    """Its gradient is s_i A for each token of a sequence that is not clipped; with one token a sequence it is PPO's."""
    tokens = make(5, spread=0.005)
    (gradient,) = torch.autograd.grad(gspo(tokens, 0.5, 0.5)[tokens.mask].sum(), tokens.logprobs)
    expected = [-row["s"] * row["a"] if m else 0.0 for row, m in zip(rows(tokens), tokens.mask.tolist(), strict=True)]
    assert gradient.tolist() == pytest.approx(expected)
    alone = make(6)
    alone = Tokens(
        logprobs=alone.logprobs, proximal=alone.proximal, behavior=alone.behavior, advantages=alone.advantages,
        mask=alone.mask, sequence=torch.arange(24),
    )  # fmt: skip
    torch.testing.assert_close(gspo(alone, 0.2, 0.2), ppo(alone, 0.2, 0.2, None))


def test_m2po_drops_the_largest_until_the_mean_of_squares_is_within_the_threshold() -> None:
    for seed in range(20):
        tokens = make(seed)
        log_ratio = (tokens.proximal - tokens.behavior).detach()
        keep = second_moment_mask(log_ratio, tokens.advantages, tokens.mask, 0.04)
        acting = [t for t in range(24) if tokens.mask[t] and float(log_ratio[t]) * float(tokens.advantages[t]) > 0]
        kept = sorted(acting, key=lambda t: float(log_ratio[t]) ** 2)
        while kept and sum(float(log_ratio[t]) ** 2 for t in kept) / len(kept) > 0.04:
            kept.pop()
        expected = {t for t in range(24) if tokens.mask[t] and t not in acting} | set(kept)
        assert set(keep.nonzero()[:, 0].tolist()) == expected
        loss = m2po(tokens, keep)
        assert loss[~keep].abs().sum() == 0
        ratio = (tokens.logprobs - tokens.behavior).exp()
        torch.testing.assert_close(loss[keep], (-ratio * tokens.advantages)[keep])


def test_on_policy_every_surrogate_has_the_gradient_of_reinforce() -> None:
    tokens = make(1)
    same = tokens.logprobs.detach()
    on_policy = Tokens(
        logprobs=tokens.logprobs, proximal=same, behavior=same, advantages=tokens.advantages, mask=tokens.mask,
        sequence=tokens.sequence,
    )  # fmt: skip
    for name, (ours, _, _) in CASES.items():
        (gradient,) = torch.autograd.grad(ours(on_policy)[tokens.mask].sum(), tokens.logprobs)
        torch.testing.assert_close(gradient, -tokens.advantages / (2 if name == "opmd" else 1), msg=name)


def reference_weights(tokens: Tokens, log_ratio: list[float]) -> list[dict[str, float]]:
    found = []
    for t in range(24):
        mates = [log_ratio[u] for u in range(24) if tokens.mask[u] and tokens.sequence[u] == tokens.sequence[t]]
        total, mean = sum(mates), sum(mates) / len(mates) if mates else 0.0
        found.append({
            "sequence_tis": min(math.exp(total), 1.5),
            "sequence_mask": float(0.5 <= math.exp(total) <= 2.0),
            "geometric_mask": float(0.9 <= math.exp(mean) <= 1.2),
            "k1 token": float(-log_ratio[t] <= 0.1),
            "k2 sequence_sum": float(sum(0.5 * m * m for m in mates) <= 0.4),
            "k2 sequence_mean": float(sum(0.5 * m * m for m in mates) <= 0.1 * max(1, len(mates))),
            "k3 sequence_max": float(max((math.exp(m) - 1 - m for m in mates), default=-math.inf) <= 0.15),
        })  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(6))
def test_corrections_of_sequences_equal_their_equations(seed: int) -> None:
    tokens = make(seed)
    mask, sequence = tokens.mask, tokens.sequence
    ell = (tokens.proximal - tokens.behavior).detach()
    found = {
        "sequence_tis": corrections.sequence_tis(ell, mask, sequence, 1.5),
        "sequence_mask": corrections.sequence_mask(ell, mask, sequence, 0.5, 2.0),
        "geometric_mask": corrections.geometric_mask(ell, mask, sequence, 0.9, 1.2),
        "k1 token": corrections.rejection(ell, mask, sequence, "k1", "token", 0.1),
        "k2 sequence_sum": corrections.rejection(ell, mask, sequence, "k2", "sequence_sum", 0.4),
        "k2 sequence_mean": corrections.rejection(ell, mask, sequence, "k2", "sequence_mean", 0.1),
        "k3 sequence_max": corrections.rejection(ell, mask, sequence, "k3", "sequence_max", 0.15),
    }
    for t, expected in enumerate(reference_weights(tokens, ell.tolist())):
        for name, weights in found.items():
            if mask[t]:
                assert float(weights[t]) == pytest.approx(expected[name]), (name, t)


def test_bounds_are_of_pi_over_mu_and_not_of_its_inverse() -> None:
    """π / μ = 4 in both tokens: above 3, not below 1/3."""
    ell, mask, sequence = torch.full((2,), math.log(4.0)), torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    for correction in (corrections.sequence_mask, corrections.geometric_mask):
        assert correction(ell, mask, sequence, 0.1, 3.0).tolist() == [0, 0]
        assert correction(ell, mask, sequence, 0.5, 5.0).tolist() == [1, 1]
    assert corrections.rejection(ell, mask, sequence, "k1", "token", 0.0).tolist() == [1, 1], "k1 estimates −ℓ"
    assert corrections.rejection(-ell, mask, sequence, "k1", "token", 0.0).tolist() == [0, 0]


def test_infinite_log_ratios_empty_masks_and_equal_policies_are_defined() -> None:
    infinite = torch.tensor([math.inf, -math.inf, 0.0])
    mask, none, sequence = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    for which in (mask, none):
        for weights in (
            corrections.sequence_tis(infinite, which, sequence, 2.0),
            corrections.sequence_mask(infinite, which, sequence, 0.5, 2.0),
            corrections.geometric_mask(infinite, which, sequence, 0.5, 2.0),
            corrections.rejection(infinite, which, sequence, "k3", "sequence_mean", 1.0),
            corrections.rejection(infinite, which, sequence, "k3", "sequence_max", 1.0),
            corrections.normalised(corrections.token_tis(infinite, 2.0), which),
        ):
            assert weights.isfinite().all()
    assert corrections.effective_sample_size(torch.ones(3), none) == 0
    assert corrections.effective_sample_size(torch.full((3,), 0.3), mask) == pytest.approx(1.0)
    assert corrections.effective_sample_size(torch.tensor([1.0, 0.0, 0.0]), mask) == pytest.approx(1 / 3)
    equal = torch.zeros(3)
    assert corrections.sequence_tis(equal, mask, sequence, 2.0).tolist() == [1, 1, 1]
    assert corrections.normalised(torch.tensor([2.0, 1.0, 0.0]), mask).tolist() == [2, 1, 0]


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=10))
def test_kl_estimators_equal_their_equations(pairs: list[tuple[float, float]]) -> None:
    logprobs, reference = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    ells = [a - b for a, b in pairs]
    assert kl.k1(logprobs, reference).tolist() == pytest.approx(ells)
    assert kl.k2(logprobs, reference).tolist() == pytest.approx([e * e / 2 for e in ells])
    assert kl.k3(logprobs, reference).tolist() == pytest.approx([math.exp(-e) - 1 + e for e in ells])


def test_kl_estimators_have_the_values_and_the_gradients_that_are_stated() -> None:
    """In expectation over all tokens of a small vocabulary, exactly."""
    logits = torch.tensor([0.3, -0.2, 0.9, -1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3, 0.2], dtype=torch.float64).log_softmax(0)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    log_pi = logits.log_softmax(0)
    pi = log_pi.detach().exp()
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    forward = (reference.exp() * (reference - log_pi)).sum()
    expected = {name: (pi * getattr(kl, name)(log_pi, reference)).sum() for name in ("k1", "k2", "k3")}
    assert float(expected["k1"]) == pytest.approx(float(exact)) and float(expected["k3"]) == pytest.approx(float(exact))
    torch.testing.assert_close(gradient(expected["k1"]), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(gradient(expected["k2"]), gradient(exact))
    torch.testing.assert_close(gradient(expected["k3"]), gradient(forward))


def test_the_adaptive_coefficient_follows_the_kl_slowly() -> None:
    assert kl.adapted_coefficient(0.1, 6.0, 6.0, 100) == pytest.approx(0.1)
    assert kl.adapted_coefficient(0.1, 600.0, 6.0, 1000) == pytest.approx(0.1 * 1.02)
    assert kl.adapted_coefficient(0.1, 0.0, 6.0, 1000) == pytest.approx(0.1 * 0.98)
