"""What a step's loss was like: how far off-policy, how much was clipped, dropped and truncated, by staleness too.

Everything is a sum over tokens, sequences or bins, so that microbatches and ranks add up; `summarize` turns the sums into figures.
Their names and definitions stand in `docs/metrics.md`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from algos import kl
from algos.corrections import correction_weights
from algos.ratios import clamped, sequence_mean, sequence_sum
from algos.surrogates import SURROGATES, Tokens
from configs.algo import AlgoConfig

BUCKETS = {"0": 0, "1": 1, "2_3": 2, "4_7": 4, "8_15": 8, "16_up": 16}
"""Staleness, by the least of each bucket."""
EDGES = torch.cat([torch.tensor([0.0]), torch.logspace(-5, 1.30103, 64)]).double()  # up to 20
LOG_RATIO_EDGES = torch.cat([-EDGES.flip(0)[:-1], EDGES])
"""Of the bins in which log π_θ / μ is counted, for its quantiles: fine around 0, 20 at both ends."""
QUANTILES = {"q01": 0.01, "q50": 0.5, "q99": 0.99}


def sums(
    algo: AlgoConfig,
    tokens: Tokens,
    correction: Tensor,
    entropy: Tensor,
    penalty: Tensor,
    staleness: Tensor | None,
) -> dict[str, Tensor]:
    """Of a microbatch: columns [buckets of staleness], bins, and numbers. All columns [T] are 0 where not trained."""
    mask = tokens.mask
    log_ratio = clamped(tokens.logprobs - tokens.proximal)
    if algo.surrogate_section.compares_sequences:
        log_ratio = sequence_mean(log_ratio, mask, tokens.sequence)
    ell = clamped(tokens.logprobs - tokens.behavior).double()
    rho, nothing = ell.exp(), torch.zeros_like(ell)
    truncates = algo.correction.truncates
    unscaled = correction
    if algo.normalize_weights:
        unscaled = correction_weights(algo, tokens.proximal - tokens.behavior, mask, tokens.sequence)
    weight = correction * _own_weight(algo, tokens) if algo.surrogate_section.corrects_itself else correction
    columns = {
        "tokens": mask,
        "entropy": entropy,
        "clipped": _has_no_gradient(algo, tokens),
        "truncated": (unscaled >= algo.correction_range[1]) & (correction > 0) & truncates,
        "dropped": correction == 0,
        "weight": weight,
        "weight_squared": weight.square(),
        "ratio": log_ratio.exp(),
        "rho": rho,
        "rho_squared": rho.square(),
        "k1": kl.k1(-ell, nothing),
        "k2": kl.k2(-ell, nothing),
        "k3": kl.k3(-ell, nothing),
        "reference_kl": penalty,
    }
    edges = torch.tensor(list(BUCKETS.values()), device=mask.device)
    bucket = torch.zeros_like(tokens.sequence)
    if staleness is not None:
        bucket = torch.bucketize(staleness.long().clamp(min=0), edges, right=True) - 1
    bucket = torch.where(mask, bucket, len(BUCKETS))  # one more, for what is not trained
    found = {
        name: torch.bincount(bucket, column.double(), minlength=len(BUCKETS) + 1)[: len(BUCKETS)]
        for name, column in columns.items()
    }
    bins = torch.bucketize(ell[mask], LOG_RATIO_EDGES.to(ell.device)[1:-1], right=True)
    found["log_ratio_bins"] = torch.bincount(bins, minlength=len(LOG_RATIO_EDGES) - 1).double()
    count = int(tokens.sequence.max()) + 1 if len(mask) else 0
    first = torch.zeros(count, dtype=torch.float64, device=mask.device)
    trained = first.index_add(0, tokens.sequence, mask.double()) > 0
    whole = first.index_copy(0, tokens.sequence, sequence_sum(ell, mask, tokens.sequence))[trained]
    product = clamped(whole).exp()
    for name, value in (
        ("sequences", trained),
        ("sequence_rho", product),
        ("sequence_rho_squared", product.square()),
    ):
        found[name] = value.double().sum()
    return found


def _has_no_gradient(algo: AlgoConfig, tokens: Tokens) -> Tensor:
    """[T] Where the surrogate has no gradient although there is an advantage: the clip, or the gate, has taken effect."""
    return (_gradient(algo, tokens) == 0) & (tokens.advantages != 0)


def _own_weight(algo: AlgoConfig, tokens: Tokens) -> Tensor:
    """[T] By what a surrogate that corrects by itself weighs A ∇ log π; 0 where not trained."""
    signs = torch.where(tokens.advantages < 0, -1.0, 1.0)
    return _gradient(algo, replace(tokens, advantages=signs)).abs() * tokens.mask


def _gradient(algo: AlgoConfig, tokens: Tokens) -> Tensor:
    """[T] of the surrogate, with respect to log π_θ."""
    with torch.enable_grad():
        leaf = tokens.logprobs.detach().requires_grad_()
        objective = SURROGATES[algo.surrogate](replace(tokens, logprobs=leaf), algo.surrogate_section)
        (gradient,) = torch.autograd.grad(objective.sum(), leaf)
    return gradient


def summarize(sums: dict[str, Tensor]) -> dict[str, float]:
    """Figures of a step from the sums over all its tokens: `docs/metrics.md`. All zero when nothing was trained."""
    table = {name: column.tolist() for name, column in sums.items() if column.numel() == len(BUCKETS)}
    total = {name: sum(column) for name, column in table.items()}
    number = {name: float(value) for name, value in sums.items() if value.numel() == 1}
    n, sequences = max(total["tokens"], 1.0), max(number["sequences"], 1.0)
    some = total["tokens"] > 0
    found = {
        "loss/policy": number["loss"],
        "policy/entropy": total["entropy"] / n,
        "policy/clip_fraction": total["clipped"] / n,
        "policy/ratio_mean": total["ratio"] / n,
        "policy/kl_reference": total["reference_kl"] / n,
        "offpolicy/ess": _ess(total["weight"], total["weight_squared"], n),
        "offpolicy/ess_token": _ess(total["rho"], total["rho_squared"], n),
        "offpolicy/ess_sequence": _ess(number["sequence_rho"], number["sequence_rho_squared"], sequences),
        "offpolicy/chi2": total["rho_squared"] / n - 1 if some else 0.0,
        "offpolicy/chi2_sequence": number["sequence_rho_squared"] / sequences - 1 if some else 0.0,
        "offpolicy/kl_k1": total["k1"] / n,
        "offpolicy/kl_k2": total["k2"] / n,
        "offpolicy/kl_k3": total["k3"] / n,
        "offpolicy/weight_mean": total["weight"] / n,
        "offpolicy/truncated_fraction": total["truncated"] / n,
        "offpolicy/dropped_fraction": total["dropped"] / n,
    }
    for name, log_ratio in _quantiles(sums["log_ratio_bins"]).items():
        found[f"offpolicy/ratio_{name}"] = log_ratio
    for place, bucket in enumerate(BUCKETS):
        if (m := table["tokens"][place]) == 0:
            continue
        found |= {
            f"staleness_{bucket}/share": m / n,
            f"staleness_{bucket}/clip_fraction": table["clipped"][place] / m,
            f"staleness_{bucket}/dropped_fraction": table["dropped"][place] / m,
            f"staleness_{bucket}/truncated_fraction": table["truncated"][place] / m,
            f"staleness_{bucket}/ess_token": _ess(table["rho"][place], table["rho_squared"][place], m),
            f"staleness_{bucket}/kl_k3": table["k3"][place] / m,
        }
    return found


def _ess(weight: float, squared: float, n: float) -> float:
    """(Σ w)² / (n Σ w²); 0 where nothing weighs anything."""
    return weight**2 / (n * squared) if squared else 0.0


def _quantiles(bins: Tensor) -> dict[str, float]:
    """Of π_θ / μ, from counts [bins of its logarithm]: linear within a bin. 1 when nothing was trained."""
    if not float(bins.sum()):
        return dict.fromkeys(QUANTILES, 1.0)
    edges, counts = LOG_RATIO_EDGES, bins.cpu()
    cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    found = {}
    for name, share in QUANTILES.items():
        wanted = share * float(cumulative[-1])
        place = int(torch.searchsorted(cumulative[1:], wanted).clamp(max=len(counts) - 1))
        within = (wanted - float(cumulative[place])) / max(float(counts[place]), 1.0)
        found[name] = float((edges[place] + within * (edges[place + 1] - edges[place])).exp())
    return found
