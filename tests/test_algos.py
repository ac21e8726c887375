"""A policy loss and its weights against slow references in float64, written from the equations; and what
must not change it."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_columns import Columns, compute_loss, drop_columns, pick_sequences
from omegaconf import OmegaConf
from surrogate_equations import clipped_loss
from torch import Tensor

from algos.aggregation import compute_aggregation_weights
from algos.corrections import correct_off_policy, icepop, token_tis
from algos.inputs import Tokens
from algos.metrics import summarize_policy
from algos.objective import compute_off_policy_weights
from algos.surrogates import SURROGATES, ppo_loss
from configs.algo import Aggregation, AlgoConfig
from configs.corrections import Correction, Level, RejectionConfig
from configs.kl import Estimator, KlConfig
from configs.load import FOLDER
from configs.surrogates import GspoConfig, PpoConfig
from learners.prepared import interpolate_proximal

PRESETS: dict[str, AlgoConfig] = {
    path.stem: OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(AlgoConfig), OmegaConf.load(path).algo)
    )
    for path in sorted(FOLDER.glob("algo/*.yaml"))
}  # type: ignore[misc]


def test_corrections_bound_pi_over_mu_and_not_its_inverse() -> None:
    log_ratio = torch.tensor([math.log(4.0), math.log(0.25), 0.0, float("inf"), float("-inf")])
    assert token_tis(log_ratio, 2.0)[:3].tolist() == pytest.approx([2.0, 0.25, 1.0])
    assert icepop(log_ratio, 0.2, 3.0)[:3].tolist() == pytest.approx([0.0, 0.25, 1.0])
    assert icepop(log_ratio, 0.5, 5.0)[:3].tolist() == pytest.approx([4.0, 0.0, 1.0])
    for kind in Correction:
        algo = AlgoConfig(correction=kind)
        weights = correct_off_policy(
            kind, log_ratio, torch.ones(5, dtype=torch.bool), torch.arange(5), *algo.correction_range
        )
        assert weights.isfinite().all()


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20))
def test_the_clipped_surrogate_equals_its_equation(rows: list[tuple[float, float, float]]) -> None:
    logprobs, proximal, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    tokens = Tokens(
        logprobs=logprobs, proximal_logprobs=proximal, behavior_logprobs=proximal, advantages=advantages,
        mask=torch.ones(len(rows), dtype=torch.bool), sequence=torch.arange(len(rows)),
    )  # fmt: skip
    found = ppo_loss(tokens, PpoConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0))
    assert found.tolist() == pytest.approx(
        [clipped_loss(math.exp(logprob - old), advantage, 0.2, 0.28, 3.0) for logprob, old, advantage in rows]
    )


def draw_columns(num_tokens: int = 24) -> Columns:
    generator = torch.Generator().manual_seed(1)
    columns = {
        name: -torch.rand(num_tokens, generator=generator, dtype=torch.float64)
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "reference_logprobs", "entropy")
    }
    columns["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    columns["mask"] = torch.rand(num_tokens, generator=generator) < 0.6
    columns["sequence"] = torch.arange(num_tokens) // 4
    columns["aggregation_weights"] = compute_aggregation_weights(
        Aggregation.token_mean, columns["mask"], columns["sequence"], 6
    ).double()
    columns["imitation_weights"] = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    columns["staleness"] = torch.randint(0, 20, (num_tokens,), generator=generator)
    return columns


def scalar_weight(correction: str, columns: Columns, t: int) -> float:
    ratio = math.exp(columns["proximal_logprobs"][t] - columns["behavior_logprobs"][t])
    return {"none": 1.0, "token_tis": min(ratio, 2.0), "icepop": ratio if 0.5 <= ratio <= 2 else 0.0}[
        correction
    ]


@pytest.mark.parametrize("correction", ["none", "token_tis", "icepop"])
def test_the_loss_passes_gradcheck_and_equals_a_sum_over_scalars(correction: str) -> None:
    algo = AlgoConfig(correction=Correction(correction))
    columns = drop_columns(draw_columns(), "reference_logprobs", "imitation_weights")
    logprobs = columns.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: compute_loss(algo, logprobs=x, **columns)[0], logprobs)
    expected, values = 0.0, logprobs.tolist()
    for t in columns["mask"].nonzero()[:, 0].tolist():
        ratio = math.exp(values[t] - float(columns["proximal_logprobs"][t]))
        expected += (
            scalar_weight(correction, columns, t)
            * clipped_loss(ratio, float(columns["advantages"][t]), 0.2, 0.2, 3.0)
            / int(columns["mask"].sum())
        )
    assert compute_loss(algo, logprobs=logprobs, **columns)[0].item() == pytest.approx(expected, rel=1e-6)


KL = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
}


@pytest.mark.parametrize("kl_coef", [None, 0.7, 0.0])
@pytest.mark.parametrize("estimator", Estimator)
def test_penalty_bonus_and_imitation_equal_their_equation_and_pass_gradcheck(
    estimator: Estimator, kl_coef: float | None
) -> None:
    """Σ a [w (L + β KL) − c H] + μ Σ b (−log π); an adapted coefficient stands for β."""
    algo = AlgoConfig(kl=KlConfig(estimator=estimator, loss_coef=0.3), entropy_coef=0.05, imitation_coef=0.2)
    columns = draw_columns()
    beta, expected, penalty = 0.3 if kl_coef is None else kl_coef, 0.0, 0.0
    c = {name: column.tolist() for name, column in columns.items()}
    for t in columns["mask"].nonzero()[:, 0].tolist():
        kl = KL[estimator](c["logprobs"][t] - c["reference_logprobs"][t])
        loss = clipped_loss(
            math.exp(c["logprobs"][t] - c["proximal_logprobs"][t]), c["advantages"][t], 0.2, 0.2, 3.0
        )
        inside = scalar_weight("token_tis", columns, t) * (loss + beta * kl) - 0.05 * c["entropy"][t]
        expected += c["aggregation_weights"][t] * inside - 0.2 * c["imitation_weights"][t] * c["logprobs"][t]
        penalty += kl
    logprobs, entropy = (columns.pop(name).requires_grad_() for name in ("logprobs", "entropy"))

    def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return compute_loss(algo, logprobs=logprobs, entropy=entropy, kl_coef=kl_coef, **columns)[0]

    assert loss_of(logprobs, entropy).item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(loss_of, (logprobs, entropy))
    _, sums = compute_loss(algo, logprobs=logprobs, entropy=entropy, kl_coef=kl_coef, **columns)
    assert float(sums["reference_kl"].sum()) == pytest.approx(penalty)
    assert float(sums["loss"]) == pytest.approx(expected)


@pytest.mark.parametrize("kind", Correction)
def test_decoupled_ppo_whose_proximal_policy_is_the_behaviour_is_ppo_on_its_ratio(kind: Correction) -> None:
    columns = drop_columns(draw_columns(), "reference_logprobs", "imitation_weights")
    columns["proximal_logprobs"] = columns["behavior_logprobs"]
    c = {name: column.tolist() for name, column in columns.items()}
    trained = columns["mask"].nonzero()[:, 0].tolist()
    rows = [
        clipped_loss(
            math.exp(c["logprobs"][t] - c["behavior_logprobs"][t]), c["advantages"][t], 0.2, 0.2, 3.0
        )
        for t in trained
    ]
    assert float(compute_loss(AlgoConfig(correction=kind), **columns)[0]) == pytest.approx(
        sum(rows) / len(rows)
    )


def test_gspo_of_sequences_of_one_token_is_ppo_without_dual_clip() -> None:
    columns = draw_columns() | {"sequence": torch.arange(24)}
    found = []
    for algo in (
        AlgoConfig(surrogate="gspo", gspo=GspoConfig(clip_low=0.2, clip_high=0.3)),
        AlgoConfig(surrogate="ppo", ppo=PpoConfig(clip_low=0.2, clip_high=0.3, dual_clip=None)),
    ):
        leaf = columns["logprobs"].clone().requires_grad_()
        loss, sums = compute_loss(algo, **columns | {"logprobs": leaf})
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf), *sums.values()))
    for by_sequence, by_token in zip(*found, strict=True):
        torch.testing.assert_close(by_sequence, by_token)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.integers(-3, 20)), min_size=1, max_size=10))
def test_the_loglinear_policy_goes_from_behaviour_to_current_with_staleness(
    rows: list[tuple[float, float, int]],
) -> None:
    current, behavior, staleness = torch.tensor(rows, dtype=torch.float64).unbind(1)
    found = interpolate_proximal(current, behavior, staleness.long())
    expected = [(mu + max(s, 0) * pi) / (max(s, 0) + 1) for pi, mu, s in rows]
    assert found.tolist() == pytest.approx(expected)
    assert torch.equal(
        interpolate_proximal(current, behavior, torch.zeros(len(rows), dtype=torch.int64)), behavior
    )
    torch.testing.assert_close(
        interpolate_proximal(current, behavior, torch.tensor([10**9] * len(rows))), current, atol=1e-7, rtol=0
    )


# ---- what must not change it


def list_rejections() -> list[RejectionConfig]:
    levels = zip(Level, [Estimator.k1, Estimator.k2, Estimator.k3, Estimator.k3], strict=True)
    return [RejectionConfig(estimator=None)] + [
        RejectionConfig(level=level, estimator=estimator, threshold=0.05) for level, estimator in levels
    ]


def are_identical(found: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(found[0], other[0]) and all(
        torch.equal(value, other[1][name]) for name, value in found[1].items()
    )


@pytest.mark.parametrize("correction", Correction)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_masked_tokens_cannot_matter_even_when_they_are_nan(surrogate: str, correction: Correction) -> None:
    columns = draw_columns()
    poisoned = {
        name: torch.where(columns["mask"], values, float("nan")) if values.is_floating_point() else values
        for name, values in columns.items()
    }
    poisoned["staleness"] = torch.where(columns["mask"], columns["staleness"], 10**6)
    for number, drop in enumerate(list_rejections()):
        for estimator in (None, list(Estimator)[number % 3]):
            algo = AlgoConfig(
                surrogate=surrogate,
                correction=correction,
                rejection=drop,
                entropy_coef=0.1,
                imitation_coef=0.1,
                kl=KlConfig(estimator=estimator or Estimator.k3, loss_coef=0.1),
                normalize_weights=number % 2 == 1,
            )
            absent = () if estimator else ("reference_logprobs", "imitation_weights")
            gradients, found = [], []
            for table in (columns, poisoned):
                leaf = table["logprobs"].clone().requires_grad_()
                found.append(compute_loss(algo, **drop_columns(table, *absent) | {"logprobs": leaf}))
                gradients.append(torch.autograd.grad(found[-1][0], leaf)[0])
            assert found[0][0].isfinite() and are_identical(*found)
            assert torch.equal(*gradients) and gradients[0][~columns["mask"]].abs().sum() == 0


def test_given_weights_of_masked_tokens_cannot_matter_either() -> None:
    columns = draw_columns()
    given = columns["entropy"].exp()
    found = [
        compute_loss(AlgoConfig(), **columns, off_policy_weights=torch.where(columns["mask"], given, other))
        for other in (0.5, math.nan)
    ]
    assert found[0][0].isfinite() and are_identical(*found)


ALGOS: dict[str, AlgoConfig] = {
    **PRESETS,
    **{f"{kind} alone": AlgoConfig(surrogate=kind, correction=Correction.none) for kind in SURROGATES},
    **{f"ppo with {kind}": AlgoConfig(correction=kind) for kind in Correction},
    **{
        f"rejection by {drop.level} {drop.estimator}": AlgoConfig(rejection=drop)
        for drop in list_rejections()
    },
    **{f"penalty {kind}": AlgoConfig(kl=KlConfig(estimator=kind, loss_coef=0.2)) for kind in Estimator},
    "weights normalised": AlgoConfig(correction=Correction.sequence_tis, normalize_weights=True),
    "bonus and imitation": AlgoConfig(entropy_coef=0.1, imitation_coef=0.2),
}


@pytest.mark.parametrize("cuts", [[24], [8, 16], [4] * 6])
@pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
def test_the_loss_is_the_same_however_the_batch_is_split(algo: AlgoConfig, cuts: list[int]) -> None:
    columns = draw_columns()
    log_ratio = columns["proximal_logprobs"] - columns["behavior_logprobs"]
    if algo.needs_whole_minibatch:
        columns["off_policy_weights"] = compute_off_policy_weights(
            algo, log_ratio, columns["advantages"], columns["mask"], columns["sequence"]
        )
    columns["logprobs"].requires_grad_()
    whole, whole_sums = compute_loss(algo, **columns)
    pieces = [compute_loss(algo, **dict(zip(columns, part, strict=True))) for part in
              zip(*(values.split(cuts) for values in columns.values()), strict=True)]  # fmt: skip
    together = torch.stack([loss for loss, _ in pieces]).sum()
    torch.testing.assert_close(together, whole)
    gradients = [torch.autograd.grad(loss, columns["logprobs"])[0] for loss in (together, whole)]
    torch.testing.assert_close(*gradients)
    for name, value in whole_sums.items():
        torch.testing.assert_close(sum(sums[name] for _, sums in pieces), value, msg=name)


@pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
def test_the_order_of_sequences_cannot_matter(algo: AlgoConfig) -> None:
    columns = draw_columns() | {"sequence": torch.tensor([0] * 3 + [1] * 7 + [2] + [3] * 4 + [4] * 8 + [5])}
    order = [4, 1, 5, 0, 3, 2]
    index = torch.cat([(columns["sequence"] == number).nonzero()[:, 0] for number in order])
    moved = pick_sequences(columns, order)
    gradients, found = [], []
    for table in (columns, moved):
        table["aggregation_weights"] = compute_aggregation_weights(
            algo.aggregation, table["mask"], table["sequence"], 6, 8
        ).double()
        leaf = table["logprobs"].clone().requires_grad_()
        found.append(compute_loss(algo, **table | {"logprobs": leaf}))
        gradients.append(torch.autograd.grad(found[-1][0], leaf)[0])
    torch.testing.assert_close(*[loss for loss, _ in found])
    torch.testing.assert_close(gradients[0][index], gradients[1])
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, msg=name)


# ---- degenerate batches


@pytest.mark.parametrize("size", [0, 24])
@pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
def test_an_empty_mask_gives_zero_and_never_nan(algo: AlgoConfig, size: int) -> None:
    columns = {name: column[:size] for name, column in draw_columns().items()} | {
        "mask": torch.zeros(size, dtype=torch.bool)
    }
    columns["aggregation_weights"] = compute_aggregation_weights(
        Aggregation.token_mean, columns["mask"], columns["sequence"], 6
    )
    leaf = columns["logprobs"].clone().requires_grad_()
    loss, sums = compute_loss(algo, **columns | {"logprobs": leaf})
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0.0 and gradient.abs().sum() == 0
    assert all(math.isfinite(value) for value in summarize_policy(sums).values())


@pytest.mark.parametrize("far", [math.inf, -math.inf])
@pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
def test_log_ratios_without_bound_give_a_finite_loss_gradient_and_sums(algo: AlgoConfig, far: float) -> None:
    columns = draw_columns()
    for name in ("proximal_logprobs", "behavior_logprobs", "reference_logprobs"):
        unbounded = torch.where(torch.arange(24) % 5 == 0, far, columns[name])
        leaf = columns["logprobs"].clone().requires_grad_()
        loss, sums = compute_loss(algo, **columns | {name: unbounded, "logprobs": leaf})
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite().all() for value in sums.values())


@pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
def test_no_advantage_is_no_gradient_but_for_a_penalty_or_a_bonus(algo: AlgoConfig) -> None:
    plain = dataclasses.replace(algo, kl=KlConfig(), entropy_coef=0.0, imitation_coef=0.0)
    columns = drop_columns(draw_columns(), "reference_logprobs", "imitation_weights") | {
        "advantages": torch.zeros(24)
    }
    leaf = columns["logprobs"].clone().requires_grad_()
    columns["proximal_logprobs"] = leaf.detach()
    loss, sums = compute_loss(plain, **columns | {"logprobs": leaf})
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == 0 and gradient.abs().sum() == 0 and sums["clipped"].sum() == 0


# ---- aggregation


def test_aggregation_weights_are_what_their_names_say() -> None:
    mask = torch.tensor([True, True, True, False, True, False])
    sequence = torch.tensor([0, 0, 0, 0, 1, 2])
    weights = {
        kind: compute_aggregation_weights(kind, mask, sequence, 3, horizon=5).tolist() for kind in Aggregation
    }
    assert weights[Aggregation.token_mean] == pytest.approx([0.25, 0.25, 0.25, 0, 0.25, 0])
    assert weights[Aggregation.sequence_mean_token_mean] == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0, 1 / 3, 0])
    assert weights[Aggregation.sequence_mean_token_sum] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 1 / 3, 0])
    assert weights[Aggregation.constant_horizon] == pytest.approx([1 / 15, 1 / 15, 1 / 15, 0, 1 / 15, 0])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.floats(-2, 2), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(list(Aggregation)),
)
def test_a_sequence_that_counts_several_times_is_as_good_as_several_sequences(
    drawn: list[tuple[int, list[float]]], kind: Aggregation
) -> None:
    def aggregate_losses(sequences: list[list[float]], counts: Tensor | None) -> float:
        losses = torch.tensor([x for tokens in sequences for x in tokens])
        sequence = torch.tensor([i for i, tokens in enumerate(sequences) for _ in tokens], dtype=torch.int64)
        mask = torch.ones(len(losses), dtype=torch.bool)
        weights = compute_aggregation_weights(kind, mask, sequence, len(sequences), 7, counts)
        return float((weights * losses).sum())

    repeated = [tokens for times, tokens in drawn for _ in range(times)]
    found = aggregate_losses(
        [tokens for _, tokens in drawn], torch.tensor([float(times) for times, _ in drawn])
    )
    of_all = (
        1.0 if kind is Aggregation.token_mean else len(repeated) / len(drawn)
    )  # the draws are as many as the sequences
    assert found == pytest.approx(aggregate_losses(repeated, None) * of_all if repeated else 0.0, abs=1e-5)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), max_size=6), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_aggregation_is_a_mean_of_means_or_of_sums(
    sequences: list[list[tuple[float, bool]]], horizon: int
) -> None:
    losses = torch.tensor([x for tokens in sequences for x, _ in tokens])
    mask = torch.tensor([m for tokens in sequences for _, m in tokens], dtype=torch.bool)
    sequence = torch.tensor([i for i, tokens in enumerate(sequences) for _ in tokens], dtype=torch.int64)
    kept = [[x for x, m in tokens if m] for tokens in sequences]
    num_tokens, n = sum(map(len, kept)), len(kept)
    expected = {
        Aggregation.token_mean: sum(map(sum, kept)) / max(1, num_tokens),
        Aggregation.sequence_mean_token_mean: sum(sum(tokens) / max(1, len(tokens)) for tokens in kept) / n,
        Aggregation.sequence_mean_token_sum: sum(map(sum, kept)) / n,
        Aggregation.constant_horizon: sum(map(sum, kept)) / (n * horizon),
    }
    for kind in Aggregation:
        weights = compute_aggregation_weights(kind, mask, sequence, n, horizon)
        assert float((weights * losses).sum()) == pytest.approx(expected[kind], abs=1e-5)
        assert weights.isfinite().all() and (weights[~mask] == 0).all()
