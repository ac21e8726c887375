"""The mathematics against slow references in float64, written from the equations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algos.advantages import dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo
from algos.aggregation import token_weights
from algos.corrections import correction_weights, icepop, token_tis
from algos.loss import policy_loss, summarize
from algos.surrogates import Tokens, ppo
from configs.schema import Aggregation, AlgoConfig, Correction, Surrogate

rewards_and_sizes = st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5)


@given(rewards_and_sizes)
def test_advantages_equal_their_equations(groups: list[list[float]]) -> None:
    rewards = torch.tensor([r for group in groups for r in group])
    numbers = torch.tensor([g * 7 for g, group in enumerate(groups) for _ in group])
    found = {f: f(rewards, numbers).tolist() for f in (grpo, dr_grpo, rloo)}
    at = 0
    for group in groups:
        values = [float(torch.tensor(r)) for r in group]
        mean, n = sum(values) / len(values), len(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else 0.0
        for i, value in enumerate(values):
            others = values[:i] + values[i + 1 :]
            assert found[grpo][at] == pytest.approx((value - mean) / (std + 1e-6), abs=1e-4)
            assert found[dr_grpo][at] == pytest.approx(value - mean, abs=1e-6)
            assert found[rloo][at] == pytest.approx(value - sum(others) / (n - 1) if n > 1 else 0.0, abs=1e-5)
            at += 1


@given(rewards_and_sizes, st.integers(0, 10**6))
def test_reinforce_pp_whitens_over_the_tokens_of_the_batch(groups: list[list[float]], seed: int) -> None:
    rewards = torch.tensor([r for group in groups for r in group])
    numbers = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    lengths = torch.randint(0, 5, rewards.shape, generator=torch.Generator().manual_seed(seed))

    def whitened(values: list[float]) -> list[float]:
        tokens = [v for v, n in zip(values, lengths.tolist(), strict=True) for _ in range(n)]
        mean = sum(tokens) / max(1, len(tokens))
        std = math.sqrt(sum((v - mean) ** 2 for v in tokens) / max(1, len(tokens)))
        return [(v - mean) / std if std > 1e-8 else 0.0 for v in values]

    assert reinforce_pp(rewards, lengths).tolist() == pytest.approx(whitened(rewards.tolist()), abs=1e-4, rel=1e-4)
    centred = dr_grpo(rewards, numbers)
    found = reinforce_pp_baseline(rewards, numbers, lengths)
    assert found.tolist() == pytest.approx(whitened(centred.tolist()), abs=1e-4, rel=1e-4)


def test_leave_one_out_is_dr_grpo_times_n_over_n_minus_one() -> None:
    rewards, groups = torch.rand(12), torch.arange(12) // 4
    torch.testing.assert_close(rloo(rewards, groups), dr_grpo(rewards, groups) * 4 / 3)


def test_corrections_bound_pi_over_mu_and_not_its_inverse() -> None:
    log_ratio = torch.tensor([math.log(4.0), math.log(0.25), 0.0, float("inf"), float("-inf")])
    assert token_tis(log_ratio, 2.0)[:3].tolist() == pytest.approx([2.0, 0.25, 1.0])
    assert icepop(log_ratio, 0.2, 3.0)[:3].tolist() == pytest.approx([0.0, 0.25, 1.0])
    assert icepop(log_ratio, 0.5, 5.0)[:3].tolist() == pytest.approx([4.0, 0.0, 1.0])
    for kind in Correction:
        weights = correction_weights(kind, log_ratio, torch.ones(5, dtype=torch.bool), torch.arange(5), 0.5, 2.0)
        assert weights.isfinite().all()


def scalar_ppo(logprob: float, proximal: float, advantage: float, low: float, high: float, dual: float) -> float:
    ratio = math.exp(logprob - proximal)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if advantage < 0 else loss


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20))
def test_the_clipped_surrogate_equals_its_equation(rows: list[tuple[float, float, float]]) -> None:
    logprobs, proximal, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    columns = {
        "behavior": proximal,
        "mask": torch.ones(len(rows), dtype=torch.bool),
        "sequence": torch.arange(len(rows)),
    }
    found = ppo(Tokens(logprobs=logprobs, proximal=proximal, advantages=advantages, **columns), 0.2, 0.28, 3.0)
    assert found.tolist() == pytest.approx([scalar_ppo(*row, 0.2, 0.28, 3.0) for row in rows])


ALGOS = [
    *(AlgoConfig(surrogate=kind, correction=Correction.none) for kind in Surrogate),
    *(AlgoConfig(correction=kind) for kind in Correction),
]


def case(num_tokens: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    columns = {
        name: -torch.rand(num_tokens, generator=generator, dtype=torch.float64)
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "entropy")
    }
    columns["advantages"] = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    columns["mask"] = torch.rand(num_tokens, generator=generator) < 0.6
    columns["sequence"] = torch.arange(num_tokens) // 4
    columns["weights"] = token_weights(Aggregation.token_mean, columns["mask"], columns["sequence"], 6)
    return columns


@pytest.mark.parametrize("correction", ["none", "token_tis", "icepop"])
def test_the_loss_passes_gradcheck_and_equals_a_sum_over_scalars(correction: str) -> None:
    algo, columns = AlgoConfig(correction=Correction(correction)), case()
    logprobs = columns.pop("logprobs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(algo, logprobs=x, **columns)[0], logprobs)
    expected = 0.0
    for t in columns["mask"].nonzero()[:, 0].tolist():
        ratio = math.exp(columns["proximal_logprobs"][t] - columns["behavior_logprobs"][t])
        weight = {"none": 1.0, "token_tis": min(ratio, 2.0), "icepop": ratio if 0.5 <= ratio <= 2 else 0.0}[correction]
        row = (float(logprobs[t]), float(columns["proximal_logprobs"][t]), float(columns["advantages"][t]))
        expected += weight * scalar_ppo(*row, 0.2, 0.2, 3.0) / int(columns["mask"].sum())
    assert float(policy_loss(algo, logprobs=logprobs, **columns)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("algo", ALGOS, ids=lambda algo: f"{algo.surrogate}-{algo.correction}")
def test_masked_tokens_cannot_matter_even_when_they_are_nan(algo: AlgoConfig) -> None:
    columns = case()
    poisoned = {
        name: torch.where(columns["mask"], values, float("nan")) if values.is_floating_point() else values
        for name, values in columns.items()
    }
    clean, dirty = columns["logprobs"].requires_grad_(), poisoned["logprobs"].detach().requires_grad_()
    loss, sums = policy_loss(algo, **columns)
    other, other_sums = policy_loss(algo, **{**poisoned, "logprobs": dirty})
    loss.backward()
    other.backward()
    assert loss == other and sums == other_sums
    assert torch.equal(clean.grad, dirty.grad) and clean.grad is not None


@pytest.mark.parametrize("cuts", [[24], [8, 16], [4] * 6])
@pytest.mark.parametrize("algo", ALGOS, ids=lambda algo: f"{algo.surrogate}-{algo.correction}")
def test_the_loss_is_the_same_however_the_batch_is_split(algo: AlgoConfig, cuts: list[int]) -> None:
    columns = case()
    whole, whole_sums = policy_loss(algo, **columns)
    pieces = [policy_loss(algo, **dict(zip(columns, part, strict=True))) for part in
              zip(*(values.split(cuts) for values in columns.values()), strict=True)]  # fmt: skip
    assert float(sum(loss for loss, _ in pieces)) == pytest.approx(float(whole))
    for name, value in whole_sums.items():
        assert float(sum(sums[name] for _, sums in pieces)) == pytest.approx(float(value))


def test_on_policy_every_weight_is_one_and_every_divergence_zero() -> None:
    columns = case()
    columns["proximal_logprobs"] = columns["behavior_logprobs"] = columns["logprobs"]
    _, sums = policy_loss(AlgoConfig(), **columns)
    found = summarize({name: float(value) for name, value in sums.items()})
    assert found["offpolicy/ess"] == pytest.approx(1.0) and found["offpolicy/weight_mean"] == pytest.approx(1.0)
    for name in ("kl_k1", "kl_k3", "chi2", "truncated_fraction", "dropped_fraction"):
        assert found[f"offpolicy/{name}"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("correction", "truncated", "dropped"), [("none", 0, 0), ("token_tis", 1, 0), ("icepop", 0, 2)]
)
def test_truncated_and_dropped_tokens_are_counted_apart(correction: str, truncated: int, dropped: int) -> None:
    """π_p / μ is 4, 1 and 1/4."""
    proximal = torch.tensor([0.0, 0.0, 0.0])
    behavior = torch.tensor([-math.log(4.0), 0.0, math.log(4.0)])
    _, sums = policy_loss(
        AlgoConfig(correction=Correction(correction)),
        logprobs=proximal,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=torch.ones(3),
        mask=torch.ones(3, dtype=torch.bool),
        weights=torch.ones(3) / 3,
        entropy=torch.ones(3),
        sequence=torch.arange(3),
    )
    assert (int(sums["truncated"]), int(sums["dropped"])) == (truncated, dropped)


def test_an_empty_mask_gives_zero_and_never_nan() -> None:
    columns = case() | {"mask": torch.zeros(24, dtype=torch.bool)}
    columns["weights"] = token_weights(Aggregation.token_mean, columns["mask"], torch.zeros(24, dtype=torch.long), 1)
    loss, sums = policy_loss(AlgoConfig(), **columns)
    assert float(loss) == 0.0
    assert all(math.isfinite(value) for value in summarize({k: float(v) for k, v in sums.items()}).values())


def test_aggregation_weights_are_what_their_names_say() -> None:
    mask = torch.tensor([True, True, True, False, True, False])
    sequence = torch.tensor([0, 0, 0, 0, 1, 2])
    weights = {kind: token_weights(kind, mask, sequence, 3).tolist() for kind in Aggregation}
    assert weights[Aggregation.token_mean] == pytest.approx([0.25, 0.25, 0.25, 0, 0.25, 0])
    assert weights[Aggregation.sequence_mean_token_mean] == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0, 1 / 3, 0])
    assert weights[Aggregation.sequence_mean_token_sum] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 1 / 3, 0])
