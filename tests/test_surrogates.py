"""Surrogates, corrections and KL estimators against slow references in float64, written token by token
from the equations."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surrogate_equations import EQUATIONS, TokenRow
from torch import Tensor

from algos import corrections, kl
from algos.corrections import correct_off_policy, mask_rejected
from algos.inputs import Tokens
from algos.objective import compute_off_policy_weights
from algos.surrogates import SURROGATES, mask_second_moment
from configs.algo import AlgoConfig
from configs.corrections import Correction, Level, RejectionConfig
from configs.kl import Estimator
from configs.surrogates import GspoConfig, PpoConfig, SurrogateConfig

FLOOR, CAP = 0.8, 1.3


def draw_tokens(seed: int, num_tokens: int = 24, spread: float = 0.4) -> Tokens:
    """Six sequences, some tokens not trained, one sequence with none."""
    rng = torch.Generator().manual_seed(seed)

    def draw_column() -> Tensor:
        return torch.randn(num_tokens, generator=rng, dtype=torch.float64)

    logprobs = -draw_column().abs() - 0.05
    sequence = torch.arange(num_tokens) * 6 // num_tokens
    mask = (torch.rand(num_tokens, generator=rng) < 0.7) & (sequence != 3)
    return Tokens(
        logprobs=torch.where(mask, logprobs, 0.0).requires_grad_(),
        proximal_logprobs=torch.where(mask, logprobs + spread * draw_column(), 0.0),
        behavior_logprobs=torch.where(mask, logprobs + spread * draw_column(), 0.0),
        advantages=torch.where(mask, draw_column(), 0.0),
        mask=mask,
        sequence=sequence,
    )


def list_mates(tokens: Tokens, t: int) -> list[int]:
    """Returns the trained tokens of the sequence of token t."""
    return [u for u in range(len(tokens.mask)) if tokens.mask[u] and tokens.sequence[u] == tokens.sequence[t]]


def list_rows(tokens: Tokens) -> list[TokenRow]:
    """Returns the numbers of each token."""
    rows, logprobs = [], tokens.logprobs.detach()
    for t in range(len(tokens.mask)):
        gaps = [float(logprobs[u] - tokens.proximal_logprobs[u]) for u in list_mates(tokens, t)]
        rows.append(
            TokenRow(
                logprob=float(logprobs[t]),
                proximal_logprob=float(tokens.proximal_logprobs[t]),
                behavior_logprob=float(tokens.behavior_logprobs[t]),
                advantage=float(tokens.advantages[t]),
                sequence_ratio=math.exp(sum(gaps) / len(gaps)) if gaps else 1.0,
            )
        )
    return rows


def run_surrogate(name: str, tokens: Tokens, config: SurrogateConfig | None = None) -> Tensor:
    return SURROGATES[name](tokens, config or EQUATIONS[name].config)


def weigh_tokens(algo: AlgoConfig, log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    return correct_off_policy(algo.correction, log_ratio, mask, sequence, *algo.correction_range)


def mask_tokens(config: RejectionConfig, log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    assert config.estimator is not None
    return mask_rejected(config.estimator, config.level, config.threshold, log_ratio, mask, sequence)


def test_every_surrogate_has_a_section_of_its_name_and_every_section_a_surrogate() -> None:
    sections = {
        field.name for field in dataclasses.fields(AlgoConfig)
        if isinstance(getattr(AlgoConfig(), field.name), SurrogateConfig)
    }  # fmt: skip
    assert sections == set(SURROGATES) == set(EQUATIONS)
    for name in sections:
        assert isinstance(AlgoConfig(surrogate=name).surrogate_section, type(EQUATIONS[name].config))


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("seed", range(8))
def test_each_surrogate_equals_its_equation(name: str, seed: int) -> None:
    equation, tokens = EQUATIONS[name], draw_tokens(seed)
    losses = run_surrogate(name, tokens)
    trained = tokens.mask.tolist()
    rows = [row for row, is_trained in zip(list_rows(tokens), trained, strict=True) if is_trained]
    assert losses[tokens.mask].tolist() == pytest.approx([equation.loss(row) for row in rows])
    (gradient,) = torch.autograd.grad(torch.where(tokens.mask, losses, 0.0).sum(), tokens.logprobs)
    if equation.derivative is not None:
        expected = [equation.derivative(row) for row in rows]
        assert gradient[tokens.mask].tolist() == pytest.approx(expected)
    assert gradient[~tokens.mask].abs().sum() == 0


@pytest.mark.parametrize("name", [name for name, one in EQUATIONS.items() if one.derivative is None])
def test_surrogates_without_stopped_gradients_pass_gradcheck(name: str) -> None:
    tokens = draw_tokens(3)

    def loss(logprobs: Tensor) -> Tensor:
        losses = run_surrogate(name, dataclasses.replace(tokens, logprobs=logprobs))
        return torch.where(tokens.mask, losses, 0.0).sum()

    assert torch.autograd.gradcheck(loss, tokens.logprobs)


def test_what_gspo_cuts_has_no_gradient() -> None:
    """A sequence far above its proximal policy whose advantage is negative: without a bound its gradient
    would be e^12 a token."""
    leaf = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = Tokens(
        logprobs=leaf,
        proximal_logprobs=torch.full((3,), -13.0, dtype=torch.float64),
        behavior_logprobs=torch.full((3,), -13.0).double(),
        advantages=torch.full((3,), -1.0, dtype=torch.float64),
        mask=torch.ones(3, dtype=torch.bool),
        sequence=torch.zeros(3, dtype=torch.int64),
    )
    loss = SURROGATES["gspo"](tokens, GspoConfig())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.tolist() == pytest.approx([math.exp(10.0)] * 3) and not gradient.any()


def test_the_ranges_of_corrections_are_those_of_what_they_bound() -> None:
    assert AlgoConfig(correction=Correction.geometric_mask).correction_range == (0.99, 1.01)
    assert AlgoConfig(correction=Correction.icepop).correction_range == (0.5, 5.0)
    assert AlgoConfig(correction=Correction.icepop, correction_cap=3.0).correction_range == (0.5, 3.0)
    apart, sequence = torch.tensor([0.02, 0.02, 0.001]), torch.tensor([0, 0, 1])
    algo = AlgoConfig(correction=Correction.geometric_mask)
    kept = weigh_tokens(algo, apart, torch.ones(3, dtype=torch.bool), sequence)
    assert kept.tolist() == [0.0, 0.0, 1.0], "a mean of 2 % is far for a sequence"


def test_a_sequence_moves_as_one_in_gspo_and_alone_it_is_ppo() -> None:
    """Its gradient is s_i A for each token of a sequence that is not clipped; with one token a sequence it
    is PPO's."""
    tokens = draw_tokens(5, spread=0.005)
    wide = GspoConfig(clip_low=0.5, clip_high=0.5)
    (gradient,) = torch.autograd.grad(run_surrogate("gspo", tokens, wide)[tokens.mask].sum(), tokens.logprobs)
    expected = [
        -row.sequence_ratio * row.advantage if m else 0.0
        for row, m in zip(list_rows(tokens), tokens.mask.tolist(), strict=True)
    ]
    assert gradient.tolist() == pytest.approx(expected)
    alone = dataclasses.replace(draw_tokens(6), sequence=torch.arange(24))
    by_token = run_surrogate("ppo", alone, PpoConfig(clip_low=0.2, clip_high=0.2, dual_clip=None))
    by_sequence = run_surrogate("gspo", alone, GspoConfig(clip_low=0.2, clip_high=0.2))
    torch.testing.assert_close(by_sequence, by_token)
    gradients = [torch.autograd.grad(loss.sum(), alone.logprobs)[0] for loss in (by_sequence, by_token)]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][alone.mask] == 0).any(), "nothing was clipped"


def second_moment_kept(tokens: Tokens, log_ratio: list[float], threshold: float) -> set[int]:
    trained = [t for t in range(len(log_ratio)) if tokens.mask[t]]
    acting = [t for t in trained if log_ratio[t] * float(tokens.advantages[t]) > 0]
    kept = sorted(acting, key=lambda t: log_ratio[t] ** 2)
    while kept and sum(log_ratio[t] ** 2 for t in kept) / len(kept) > threshold:
        kept.pop()
    return {t for t in trained if t not in acting} | set(kept)


def test_m2po_drops_the_largest_until_the_mean_of_squares_is_within_the_threshold() -> None:
    algo, dropped = AlgoConfig(surrogate="m2po", correction=Correction.none), 0
    for seed in range(20):
        tokens = draw_tokens(seed)
        log_ratio = (tokens.proximal_logprobs - tokens.behavior_logprobs).detach()
        expected = second_moment_kept(tokens, log_ratio.tolist(), 0.04)
        keep = mask_second_moment(log_ratio, tokens.advantages, tokens.mask, 0.04)
        assert set(keep.nonzero()[:, 0].tolist()) == expected
        weights = compute_off_policy_weights(algo, log_ratio, tokens.advantages, tokens.mask, tokens.sequence)
        assert {t for t in range(24) if tokens.mask[t] and weights[t] == 1} == expected
        assert weights[tokens.mask & ~keep].abs().sum() == 0
        loss = weights * run_surrogate("m2po", tokens)
        assert loss[~keep].abs().sum() == 0
        ratio = (tokens.logprobs - tokens.behavior_logprobs).exp()
        torch.testing.assert_close(loss[keep], (-ratio * tokens.advantages)[keep])
        dropped += int(tokens.mask.sum()) - len(expected)
    assert dropped > 20


def test_on_policy_every_surrogate_has_the_gradient_of_reinforce() -> None:
    tokens = draw_tokens(1)
    same = tokens.logprobs.detach()
    on_policy = dataclasses.replace(tokens, proximal_logprobs=same, behavior_logprobs=same)
    for name, equation in EQUATIONS.items():
        (gradient,) = torch.autograd.grad(run_surrogate(name, on_policy)[tokens.mask].sum(), tokens.logprobs)
        torch.testing.assert_close(gradient, -tokens.advantages * equation.on_policy_scale, msg=name)


@pytest.mark.parametrize("other", [math.inf, -math.inf])
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_token_that_the_other_policy_never_or_surely_samples_has_a_finite_loss(
    name: str, other: float
) -> None:
    tokens = draw_tokens(2)
    far = torch.where(tokens.mask, other, 0.0).double()
    loss = run_surrogate(name, dataclasses.replace(tokens, proximal_logprobs=far, behavior_logprobs=far))
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_the_ratio_of_a_sequence_is_at_most_e_to_the_tenth() -> None:
    tokens = dataclasses.replace(
        draw_tokens(2), proximal_logprobs=torch.full((24,), -math.inf), advantages=torch.full((24,), -1.0)
    )
    torch.testing.assert_close(
        run_surrogate("gspo", tokens)[tokens.mask],
        torch.full((int(tokens.mask.sum()),), math.exp(10.0)).double(),
    )


def correction_reference(kind: Correction, tokens: Tokens, log_ratio: list[float], t: int) -> float:
    own, all_own = math.exp(log_ratio[t]), [log_ratio[u] for u in list_mates(tokens, t)]
    product = math.exp(sum(all_own))
    match kind:
        case Correction.none:
            return 1.0
        case Correction.token_tis:
            return min(own, CAP)
        case Correction.icepop:
            return own if FLOOR <= own <= CAP else 0.0
        case Correction.sequence_tis:
            return min(product, CAP)
        case Correction.sequence_mask:
            return float(FLOOR <= product <= CAP)
        case Correction.geometric_mask:
            return float(FLOOR <= product ** (1 / len(all_own)) <= CAP)


@pytest.mark.parametrize("kind", Correction)
def test_each_correction_equals_its_equation(kind: Correction) -> None:
    algo, seen = AlgoConfig(correction=kind, correction_floor=FLOOR, correction_cap=CAP), set()
    for seed in range(6):
        tokens = draw_tokens(seed)
        log_ratio = (tokens.proximal_logprobs - tokens.behavior_logprobs).detach()
        weights = weigh_tokens(algo, log_ratio, tokens.mask, tokens.sequence)
        for t in tokens.mask.nonzero()[:, 0].tolist():
            expected = correction_reference(kind, tokens, log_ratio.tolist(), t)
            assert float(weights[t]) == pytest.approx(expected), (seed, t)
            seen.add(expected)
    assert len(seen) > 1 or kind is Correction.none


def estimate_reference(config: RejectionConfig, tokens: Tokens, log_ratio: list[float], t: int) -> float:
    """Returns the estimate of KL(μ ‖ π), whose ℓ is log μ − log π."""
    of_token = {
        Estimator.k1: lambda x: -x,
        Estimator.k2: lambda x: x * x / 2,
        Estimator.k3: lambda x: math.exp(x) - 1 - x,
    }[config.estimator]  # type: ignore[index]
    found = [of_token(log_ratio[u]) for u in list_mates(tokens, t)]
    return {
        Level.token: of_token(log_ratio[t]),
        Level.sequence_sum: sum(found),
        Level.sequence_mean: sum(found) / len(found),
        Level.sequence_max: max(found),
    }[config.level]


def find_middle(values: list[float]) -> float:
    """Between the two in the middle, so that none is equal to it."""
    ordered = sorted(set(values))
    return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2


@pytest.mark.parametrize("estimator", Estimator)
@pytest.mark.parametrize("level", Level)
def test_rejection_drops_what_its_estimate_puts_above_the_threshold(
    estimator: Estimator, level: Level
) -> None:
    for seed in range(4):
        tokens = draw_tokens(seed)
        log_ratio = (tokens.proximal_logprobs - tokens.behavior_logprobs).detach()
        trained = tokens.mask.nonzero()[:, 0].tolist()
        config = RejectionConfig(estimator=estimator, level=level)
        estimates = {t: estimate_reference(config, tokens, log_ratio.tolist(), t) for t in trained}
        config.threshold = find_middle([round(value, 9) for value in estimates.values()])
        found = mask_tokens(config, log_ratio, tokens.mask, tokens.sequence)
        assert [float(found[t]) for t in trained] == [
            float(estimates[t] <= config.threshold) for t in trained
        ]
        assert {float(found[t]) for t in trained} == {0.0, 1.0}


def test_no_estimator_rejects_nothing() -> None:
    log_ratio, sequence = torch.tensor([9.0, -9.0]), torch.tensor([0, 1])
    mask, rejection = torch.ones(2, dtype=torch.bool), RejectionConfig(estimator=None, threshold=1e-9)
    algo = AlgoConfig(correction=Correction.none, rejection=rejection)
    weights = compute_off_policy_weights(algo, log_ratio, torch.ones(2), mask, sequence)
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("surrogate", ["ppo", "m2po"])
@pytest.mark.parametrize("kind", Correction)
def test_off_policy_weights_are_the_product_of_their_parts(
    kind: Correction, surrogate: str, normalise: bool
) -> None:
    """correction × rejection × M2PO's mask, divided by the mean over trained tokens."""
    for seed in range(4):
        tokens = draw_tokens(seed)
        log_ratio = (tokens.proximal_logprobs - tokens.behavior_logprobs).detach().requires_grad_()
        ell, trained = log_ratio.tolist(), tokens.mask.nonzero()[:, 0].tolist()
        drop = RejectionConfig(estimator=Estimator.k3, level=Level.sequence_mean)
        drop.threshold = find_middle([round(estimate_reference(drop, tokens, ell, t), 9) for t in trained])
        algo = AlgoConfig(
            surrogate=surrogate, correction=kind, correction_floor=FLOOR, correction_cap=CAP, rejection=drop,
            normalize_weights=normalise,
        )  # fmt: skip
        kept = second_moment_kept(tokens, ell, 0.04) if surrogate == "m2po" else set(trained)
        expected = [
            correction_reference(kind, tokens, ell, t)
            * (estimate_reference(drop, tokens, ell, t) <= drop.threshold)
            * (t in kept)
            for t in trained
        ]
        mean = sum(expected) / len(expected)
        found = compute_off_policy_weights(algo, log_ratio, tokens.advantages, tokens.mask, tokens.sequence)
        assert found[tokens.mask].tolist() == pytest.approx(
            [w / mean if normalise and mean else w for w in expected]
        )
        assert not found.requires_grad
        dirty = [torch.where(tokens.mask, column, math.nan) for column in (log_ratio, tokens.advantages)]
        assert torch.equal(
            compute_off_policy_weights(algo, *dirty, tokens.mask, tokens.sequence)[tokens.mask],
            found[tokens.mask],
        )


def test_bounds_are_of_pi_over_mu_and_not_of_its_inverse() -> None:
    """π / μ = 4 in both tokens: above 3, not below 1/3."""
    ell, mask, sequence = (
        torch.full((2,), math.log(4.0)),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0, 1]),
    )
    for correction in (corrections.sequence_mask, corrections.geometric_mask):
        assert correction(ell, mask, sequence, 0.1, 3.0).tolist() == [0, 0]
        assert correction(ell, mask, sequence, 0.5, 5.0).tolist() == [1, 1]
    for level in Level:
        k1 = RejectionConfig(estimator=Estimator.k1, level=level, threshold=0.0)
        assert mask_tokens(k1, ell, mask, sequence).tolist() == [1, 1], "k1 estimates −ℓ"
        assert mask_tokens(k1, -ell, mask, sequence).tolist() == [0, 0]


def test_where_the_policies_are_equal_every_weight_is_one() -> None:
    tokens = draw_tokens(4)
    for kind in Correction:
        for level in Level:
            for estimator in (None, *Estimator):
                drop = RejectionConfig(estimator=estimator, level=level, threshold=1e-9)
                for surrogate in ("ppo", "m2po"):
                    algo = AlgoConfig(
                        surrogate=surrogate, correction=kind, rejection=drop, normalize_weights=True
                    )
                    found = compute_off_policy_weights(
                        algo, torch.zeros(24), tokens.advantages, tokens.mask, tokens.sequence
                    )
                    assert found[tokens.mask].tolist() == [1.0] * int(tokens.mask.sum())


def test_infinite_log_ratios_and_empty_masks_give_finite_weights() -> None:
    infinite = torch.tensor([math.inf, -math.inf, 0.0, math.inf])
    sequence, advantages = torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, -1.0, 1.0, 1.0])
    for mask in (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)):
        for kind in Correction:
            for level in Level:
                for estimator in (None, *Estimator):
                    for surrogate in ("ppo", "m2po"):
                        drop = RejectionConfig(estimator=estimator, level=level)
                        algo = AlgoConfig(
                            surrogate=surrogate,
                            correction=kind,
                            rejection=drop,
                            normalize_weights=estimator is None,
                        )
                        weights = compute_off_policy_weights(algo, infinite, advantages, mask, sequence)
                        assert weights.isfinite().all() and (weights >= 0).all()
    mask = torch.ones(4, dtype=torch.bool)
    assert corrections.token_tis(infinite, 2.0).tolist() == pytest.approx([2, math.exp(-20), 1, 2])
    assert corrections.icepop(infinite, 0.5, 2.0).tolist() == [0, 0, 1, 0]
    assert corrections.sequence_tis(infinite, mask, sequence, 2.0).tolist() == [1, 1, 1, 2]
    assert corrections.sequence_mask(infinite, mask, sequence, 0.5, 2.0).tolist() == [1, 1, 1, 0]


def test_nothing_to_weigh_is_allowed() -> None:
    empty, mask, sequence = (
        torch.zeros(0),
        torch.zeros(0, dtype=torch.bool),
        torch.zeros(0, dtype=torch.int64),
    )
    for kind in Correction:
        for level in Level:
            drop = RejectionConfig(estimator=Estimator.k3, level=level)
            algo = AlgoConfig(surrogate="m2po", correction=kind, rejection=drop, normalize_weights=True)
            assert compute_off_policy_weights(algo, empty, empty, mask, sequence).shape == (0,)


def test_normalized_weights_have_a_mean_of_one_and_zeros_stay() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert corrections.normalize_weights(torch.tensor([2.0, 1.0, 0.0]), mask).tolist() == [2, 1, 0]
    assert corrections.normalize_weights(torch.tensor([4.0, 2.0, 0.0]), mask).tolist() == [2, 1, 0]
    assert corrections.normalize_weights(torch.zeros(3), mask).tolist() == [0, 0, 0]


@settings(deadline=None)
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

    def differentiate(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    log_pi = logits.log_softmax(0)
    pi = log_pi.detach().exp()
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    forward = (reference.exp() * (reference - log_pi)).sum()
    expected = {name: (pi * getattr(kl, name)(log_pi, reference)).sum() for name in ("k1", "k2", "k3")}
    assert expected["k1"].item() == pytest.approx(exact.item()) and expected["k3"].item() == pytest.approx(
        exact.item()
    )
    torch.testing.assert_close(differentiate(expected["k1"]), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(differentiate(expected["k2"]), differentiate(exact))
    torch.testing.assert_close(differentiate(expected["k3"]), differentiate(forward))


def test_kl_estimators_are_finite_where_a_policy_never_samples_a_token() -> None:
    logprobs, reference = torch.tensor([-1.0, -math.inf]), torch.tensor([-math.inf, -1.0])
    for estimator in kl.ESTIMATORS.values():
        leaf = logprobs.clone().requires_grad_()
        value = estimator(leaf, reference)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        assert value.isfinite().all() and gradient.isfinite().all()


def test_the_adaptive_coefficient_follows_the_kl_slowly() -> None:
    assert kl.adapt_coefficient(0.1, 6.0, 6.0, 100) == pytest.approx(0.1)
    assert kl.adapt_coefficient(0.1, 600.0, 6.0, 1000) == pytest.approx(0.1 * 1.02)
    assert kl.adapt_coefficient(0.1, 0.0, 6.0, 1000) == pytest.approx(0.1 * 0.98)
