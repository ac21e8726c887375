"""Figures of a policy loss against slow references in float64, written from their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_columns import Columns, compute_loss, pick_sequences
from torch import Tensor

from algos.metrics import BUCKETS, LOG_RATIO_EDGES, QUANTILES, summarize_policy
from algos.objective import compute_off_policy_weights
from algos.values import implicit_reward_loss, summarize_rewards, summarize_values, value_loss
from configs.algo import AlgoConfig
from configs.corrections import Correction, Level, RejectionConfig
from configs.kl import Estimator, KlConfig
from configs.surrogates import DppoConfig, GspoConfig, PpoConfig

FLOOR, CAP = 0.7, 1.3


def draw_columns(seed: int, num_tokens: int = 60, spread: float = 0.4) -> Columns:
    """Nine sequences of many lengths and all stalenesses, one of them not trained at all."""
    rng = torch.Generator().manual_seed(seed)

    def draw_column() -> Tensor:
        return torch.randn(num_tokens, generator=rng, dtype=torch.float64)

    logprobs = -draw_column().abs()
    sequence = torch.sort(torch.randint(0, 9, (num_tokens,), generator=rng)).values
    mask = (torch.rand(num_tokens, generator=rng) < 0.7) & (sequence != 4)
    return {
        "logprobs": logprobs,
        "proximal_logprobs": logprobs + spread * draw_column(),
        "mask": mask,
        "sequence": sequence,
        "behavior_logprobs": logprobs + spread * draw_column(),
        "reference_logprobs": logprobs + spread * draw_column(),
        "advantages": torch.where(torch.rand(num_tokens, generator=rng) < 0.1, 0.0, draw_column()),
        "entropy": draw_column().abs(),
        "aggregation_weights": mask.double() / mask.sum().clamp(min=1),
        "staleness": torch.randint(0, 24, (num_tokens,), generator=rng, dtype=torch.int32),
    }


def compute_figures(algo: AlgoConfig, columns: Columns) -> dict[str, float]:
    return summarize_policy(compute_loss(algo, **columns)[1])


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def effective_share(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def list_rows(columns: Columns) -> list[dict[str, float]]:
    """Returns the numbers of each trained token that the figures are made of."""
    numbers = {name: column.tolist() for name, column in columns.items()}
    trained = [t for t, m in enumerate(numbers["mask"]) if m]
    found = []
    for t in trained:
        mates = [u for u in trained if numbers["sequence"][u] == numbers["sequence"][t]]
        gap = {u: numbers["logprobs"][u] - numbers["proximal_logprobs"][u] for u in mates}
        found.append(
            {
                "r": math.exp(gap[t]),
                "s": math.exp(average(list(gap.values()))),
                "w": math.exp(numbers["proximal_logprobs"][t] - numbers["behavior_logprobs"][t]),
                "ell": numbers["logprobs"][t] - numbers["behavior_logprobs"][t],
                "moved": math.exp(numbers["logprobs"][t]) - math.exp(numbers["behavior_logprobs"][t]),
                "gap": numbers["logprobs"][t] - numbers["reference_logprobs"][t],
            }
            | {name: numbers[name][t] for name in ("advantages", "entropy", "sequence", "staleness")}
        )
    return found


def is_clipped(surrogate: str, row: dict[str, float]) -> bool:
    good = row["advantages"] > 0
    if row["advantages"] == 0:
        return False
    return {
        "ppo": row["r"] > 1.3 if good else not 0.8 <= row["r"] <= 1.4,
        "gspo": row["s"] > 1.04 if good else row["s"] < 0.97,
        "dppo": row["moved"] > 0.15 if good else row["moved"] < -0.1,
        "kimi": False,
    }[surrogate]


def own_weight(surrogate: str, row: dict[str, float]) -> float:
    if surrogate != "dppo":
        return 1.0
    is_kept = row["moved"] >= -0.1 if row["advantages"] < 0 else row["moved"] <= 0.15
    return min(row["rho"], 20.0) * is_kept


def correct_ratio(kind: Correction, w: float) -> float:
    return {"none": 1.0, "token_tis": min(w, CAP), "icepop": w if FLOOR <= w <= CAP else 0.0}[kind]


def make_algo(surrogate: str, kind: Correction = Correction.token_tis, **changed: object) -> AlgoConfig:
    return AlgoConfig(
        surrogate=surrogate,
        correction=kind,
        correction_floor=FLOOR,
        correction_cap=CAP,
        ppo=PpoConfig(clip_low=0.2, clip_high=0.3, dual_clip=1.4),
        gspo=GspoConfig(clip_low=0.03, clip_high=0.04),
        dppo=DppoConfig(low=0.1, high=0.15),
        **changed,
    )


def find_bucket(staleness: float) -> str:
    return next(name for name, least in reversed(BUCKETS.items()) if staleness >= least)


@pytest.mark.parametrize("kind", ["none", "token_tis", "icepop"])
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "dppo", "kimi"])
@pytest.mark.parametrize("seed", range(3))
def test_the_figures_of_a_step_equal_their_definitions(seed: int, surrogate: str, kind: str) -> None:
    columns, algo = (
        draw_columns(seed),
        make_algo(surrogate, Correction(kind), kl=KlConfig(estimator=Estimator.k2)),
    )
    table = list_rows(columns)
    for row in table:
        row |= {"weight": correct_ratio(algo.correction, row["w"]), "rho": math.exp(row["ell"])}
        row |= {
            "clipped": is_clipped(surrogate, row),
            "dropped": row["weight"] == 0,
            "truncated": kind == "token_tis" and row["w"] >= CAP,
            "k3": row["rho"] - 1 - row["ell"],
            "used": row["weight"] * own_weight(surrogate, row),
        }
    whole = {number: math.exp(sum(r["ell"] for r in table if r["sequence"] == number))
             for number in {r["sequence"] for r in table}}  # fmt: skip
    expected = {
        "loss/policy": float(compute_loss(algo, **columns)[0]),
        "policy/entropy": average([r["entropy"] for r in table]),
        "policy/clip_fraction": average([r["clipped"] for r in table]),
        "policy/ratio_mean": average([r["s" if surrogate == "gspo" else "r"] for r in table]),
        "policy/kl_reference": average([r["gap"] ** 2 / 2 for r in table]),
        "offpolicy/ess": effective_share([r["used"] for r in table]),
        "offpolicy/ess_token": effective_share([r["rho"] for r in table]),
        "offpolicy/ess_sequence": effective_share(list(whole.values())),
        "offpolicy/chi2": average([r["rho"] ** 2 for r in table]) - 1,
        "offpolicy/chi2_sequence": average([rho**2 for rho in whole.values()]) - 1,
        "offpolicy/kl_k1": average([-r["ell"] for r in table]),
        "offpolicy/kl_k2": average([r["ell"] ** 2 / 2 for r in table]),
        "offpolicy/kl_k3": average([r["k3"] for r in table]),
        "offpolicy/weight_mean": average([r["used"] for r in table]),
        "offpolicy/truncated_fraction": average([r["truncated"] for r in table]),
        "offpolicy/dropped_fraction": average([r["dropped"] for r in table]),
    }
    for name in BUCKETS:
        part = [r for r in table if find_bucket(r["staleness"]) == name]
        if not part:
            continue
        expected |= {f"staleness_{name}/share": len(part) / len(table),
                     f"staleness_{name}/ess_token": effective_share([r["rho"] for r in part]),
                     f"staleness_{name}/kl_k3": average([r["k3"] for r in part])}  # fmt: skip
        expected |= {
            f"staleness_{name}/{fate}_fraction": average([r[key] for r in part])
            for fate, key in (("clip", "clipped"), ("dropped", "dropped"), ("truncated", "truncated"))
        }
    found = compute_figures(algo, columns)
    assert {name: value for name, value in found.items() if "/ratio_q" not in name} == pytest.approx(expected)
    assert sum(value for name, value in found.items() if name.endswith("/share")) == pytest.approx(1)


@pytest.mark.parametrize("staleness", range(20))
def test_each_staleness_has_its_bucket(staleness: int) -> None:
    columns = draw_columns(0) | {"staleness": torch.full((60,), staleness)}
    shares = {
        name: value
        for name, value in compute_figures(AlgoConfig(), columns).items()
        if name.endswith("/share")
    }
    wanted = (
        {0: "0", 1: "1", 2: "2_3", 3: "2_3"}
        | dict.fromkeys(range(4, 8), "4_7")
        | dict.fromkeys(range(8, 16), "8_15")
    )
    assert shares == {f"staleness_{wanted.get(staleness, '16_up')}/share": 1.0}


def test_without_a_staleness_all_tokens_are_fresh() -> None:
    columns = draw_columns(0)
    columns.pop("staleness")
    assert compute_figures(AlgoConfig(), columns)["staleness_0/share"] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.floats(-25, 25), st.floats(-1e-3, 1e-3)), min_size=1, max_size=30))
def test_quantiles_of_ratios_lie_in_the_bins_of_those_of_the_whole_list(log_ratios: list[float]) -> None:
    n = len(log_ratios)
    ell = torch.tensor(log_ratios, dtype=torch.float64)
    columns = dict.fromkeys(
        ("proximal_logprobs", "behavior_logprobs", "entropy", "advantages"), torch.zeros(n).double()
    )
    _, sums = compute_loss(
        AlgoConfig(), logprobs=ell, mask=torch.ones(n, dtype=torch.bool), sequence=torch.arange(n),
        aggregation_weights=torch.ones(n), **columns,
    )  # fmt: skip
    found, edges = summarize_policy(sums), LOG_RATIO_EDGES
    for name, share in QUANTILES.items():
        low, high = (
            float(torch.quantile(ell.clamp(-20, 20), share, interpolation=side))
            for side in ("lower", "higher")
        )
        least, most = edges[(edges[1:-1] <= low).sum()], edges[(edges[1:-1] <= high).sum() + 1]
        assert math.exp(least) * (1 - 1e-9) <= found[f"offpolicy/ratio_{name}"] <= math.exp(most) * (1 + 1e-9)


def test_the_bins_of_log_ratios_are_fine_around_zero_and_a_quarter_wide_beyond() -> None:
    columns = draw_columns(5, num_tokens=4000)
    columns |= {
        "mask": torch.ones(4000, dtype=torch.bool),
        "behavior_logprobs": columns["behavior_logprobs"] + 0.2,
    }
    found = compute_figures(AlgoConfig(), columns)
    ell = columns["logprobs"] - columns["behavior_logprobs"]
    for name, share in QUANTILES.items():
        exact = float(torch.quantile(ell, share))
        assert math.log(found[f"offpolicy/ratio_{name}"]) == pytest.approx(exact, rel=0.26), name


@pytest.mark.parametrize("kind", Correction)
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "m2po"])
def test_where_all_policies_are_equal_nothing_is_off_policy(surrogate: str, kind: Correction) -> None:
    columns = draw_columns(1)
    columns |= dict.fromkeys(("proximal_logprobs", "behavior_logprobs"), columns["logprobs"])
    drop = RejectionConfig(estimator=Estimator.k3, level=Level.sequence_max, threshold=1e-6)
    found = compute_figures(AlgoConfig(surrogate=surrogate, correction=kind, rejection=drop), columns)
    for name in ("ess", "ess_token", "ess_sequence", "weight_mean"):
        assert found[f"offpolicy/{name}"] == pytest.approx(1)
    for name in (
        "kl_k1",
        "kl_k2",
        "kl_k3",
        "chi2",
        "chi2_sequence",
        "truncated_fraction",
        "dropped_fraction",
    ):
        assert found[f"offpolicy/{name}"] == pytest.approx(0, abs=1e-12)
    for name in QUANTILES:
        assert found[f"offpolicy/ratio_{name}"] == pytest.approx(1, abs=1e-5)
    assert found["policy/ratio_mean"] == pytest.approx(1) and found["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("kind", "truncated", "dropped"),
    [
        ("none", 0, 0),
        ("token_tis", 1, 0),
        ("icepop", 0, 2),
        ("sequence_tis", 1, 0),
        ("sequence_mask", 0, 2),
        ("geometric_mask", 0, 2),
    ],
)
@pytest.mark.parametrize("ratios", [[4.0, 1.25, 1.25, 1.25, 0.25], [4.0, 1.2, 0.25]])
@pytest.mark.parametrize("normalise", [False, True])
def test_truncated_and_dropped_tokens_are_counted_apart(
    kind: str, truncated: int, dropped: int, normalise: bool, ratios: list[float]
) -> None:
    """One token a sequence. The cap is none that float32 can hold, and lies on the other side of a weight
    once it is normalised."""
    n = len(ratios)
    _, sums = compute_loss(
        AlgoConfig(correction=Correction(kind), correction_cap=1.3, normalize_weights=normalise),
        logprobs=torch.zeros(n),
        proximal_logprobs=torch.zeros(n),
        behavior_logprobs=-torch.tensor(ratios).log(),
        advantages=torch.ones(n),
        mask=torch.ones(n, dtype=torch.bool),
        aggregation_weights=torch.ones(n) / n,
        entropy=torch.ones(n),
        sequence=torch.arange(n),
    )
    assert (int(sums["truncated"].sum()), int(sums["dropped"].sum())) == (truncated, dropped)


def test_a_token_that_is_rejected_is_dropped_and_not_truncated() -> None:
    columns, drop = draw_columns(0), RejectionConfig(estimator=Estimator.k2, threshold=1e-9)
    found = compute_figures(make_algo("ppo", rejection=drop), columns)
    assert found["offpolicy/dropped_fraction"] == 1 and found["offpolicy/truncated_fraction"] == 0
    assert found["offpolicy/ess"] == 0, "nothing weighs anything"


def test_what_is_normalised_has_the_same_effective_sample_size_and_a_mean_of_one() -> None:
    columns = draw_columns(0)
    plain, normalised = (
        compute_figures(make_algo("ppo", normalize_weights=n), columns) for n in (False, True)
    )
    assert normalised["offpolicy/ess"] == pytest.approx(plain["offpolicy/ess"])
    assert (
        normalised["offpolicy/weight_mean"]
        == pytest.approx(1)
        != pytest.approx(plain["offpolicy/weight_mean"])
    )


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "dppo", "m2po"])
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2], [3, 4], [5, 6, 7, 8]], [[n] for n in range(9)], [[8, 3, 0, 5, 1, 7, 2, 4, 6]]]
)
def test_the_sums_of_microbatches_in_any_order_are_those_of_the_whole(
    surrogate: str, parts: list[list[int]]
) -> None:
    columns, algo = draw_columns(2), make_algo(surrogate, Correction.sequence_tis)
    ell = columns["proximal_logprobs"] - columns["behavior_logprobs"]
    columns["off_policy_weights"] = compute_off_policy_weights(
        algo, ell, columns["advantages"], columns["mask"], columns["sequence"]
    )
    whole = compute_loss(algo, **columns)[1]
    pieces = []
    for part in parts:
        pieces.append(compute_loss(algo, **pick_sequences(columns, part))[1])
    added = {name: sum(sums[name] for sums in pieces) for name in whole}
    for name, value in whole.items():
        torch.testing.assert_close(added[name], value, msg=name)
    assert summarize_policy(added) == pytest.approx(summarize_policy(whole))


@pytest.mark.parametrize("num_tokens", [0, 60])
def test_nothing_trained_gives_figures_of_zero_and_ratios_of_one(num_tokens: int) -> None:
    columns = draw_columns(0, num_tokens) | {"mask": torch.zeros(num_tokens, dtype=torch.bool)}
    assert compute_figures(AlgoConfig(), columns) == {
        name: 1.0 if "/ratio_q" in name else 0.0
        for name in compute_figures(AlgoConfig(), draw_columns(0))
        if not name.startswith("staleness_")
    }


@pytest.mark.parametrize("kind", Correction)
@pytest.mark.parametrize("far", [math.inf, -math.inf])
def test_log_ratios_without_bound_give_finite_figures(kind: Correction, far: float) -> None:
    columns, third = draw_columns(0), torch.arange(60) % 3 == 0
    for name in ("behavior_logprobs", "proximal_logprobs", "reference_logprobs"):
        found = compute_figures(
            AlgoConfig(correction=kind), columns | {name: torch.where(third, far, columns[name])}
        )
        assert all(math.isfinite(value) for value in found.values())


def test_the_figures_of_all_models_come_from_sums_that_lie_together() -> None:
    """As `learners/step.py` adds them up."""
    columns = draw_columns(0)
    together = compute_loss(AlgoConfig(), **columns)[1]
    values, targets = columns["logprobs"], columns["entropy"]
    _, critic = value_loss(values, values, targets, columns["mask"], columns["aggregation_weights"], 0.2)
    outcomes = torch.ones(60)
    _, rewards = implicit_reward_loss(values, targets, outcomes, columns["mask"], columns["sequence"], 9, 0.1)
    expected = summarize_policy(together) | summarize_values(critic) | summarize_rewards(rewards)
    together = together | critic | rewards
    assert summarize_policy(together) | summarize_values(together) | summarize_rewards(together) == expected


def test_k1_of_the_figures_estimates_the_divergence_of_the_behaviour() -> None:
    """E_μ [log μ − log π], exact here: each token of the vocabulary as often as μ samples it."""
    behavior = torch.tensor([0.625, 0.125, 0.125, 0.125], dtype=torch.float64)
    policy = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    tokens = torch.tensor([0, 0, 0, 0, 0, 1, 2, 3])
    zeros = torch.zeros(8, dtype=torch.float64)
    exact = float((behavior * (behavior / policy).log()).sum())
    assert exact != pytest.approx(float((policy * (policy / behavior).log()).sum()), rel=0.01)
    _, sums = compute_loss(
        AlgoConfig(),
        logprobs=policy.log()[tokens],
        proximal_logprobs=policy.log()[tokens],
        behavior_logprobs=behavior.log()[tokens],
        advantages=zeros,
        mask=torch.ones(8, dtype=torch.bool),
        aggregation_weights=zeros,
        entropy=zeros,
        sequence=torch.arange(8),
    )
    found = summarize_policy(sums)
    assert found["offpolicy/kl_k1"] == pytest.approx(exact) and found["offpolicy/kl_k3"] == pytest.approx(
        exact
    )
    assert found["offpolicy/chi2"] == pytest.approx(float((policy**2 / behavior).sum()) - 1)
