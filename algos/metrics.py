"""Metrics of a step's loss: how far off-policy it was, how much was clipped, dropped and truncated.

Everything is a sum over tokens, sequences or bins, some by staleness, so microbatches and ranks add up;
`summarize_policy` turns the sums into figures. Their names and definitions stand in `docs/metrics.md`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from algos import kl
from algos.inputs import LossInputs, Tokens
from algos.ratios import average_by_sequence, clamp_log_ratio, count_sequences, sum_by_sequence

BUCKETS = {"0": 0, "1": 1, "2_3": 2, "4_7": 4, "8_15": 8, "16_up": 16}
"""Least staleness of each bucket."""
# The last edge is 20, where log-ratios are clamped.
EDGES = torch.cat([torch.tensor([0.0]), torch.logspace(-5, 1.30103, 64)]).double()
LOG_RATIO_EDGES = torch.cat([-EDGES.flip(0)[:-1], EDGES])
"""Edges of the bins in which log π_θ / μ is counted, for its quantiles: fine around 0, ±20 at the ends."""
QUANTILES = {"q01": 0.01, "q50": 0.5, "q99": 0.99}


def sum_policy_metrics(
    inputs: LossInputs, tokens: Tokens, off_policy_weights: Tensor, entropy: Tensor, penalty: Tensor
) -> dict[str, Tensor]:
    """Returns the sums of one microbatch: columns [buckets of staleness], bins, and numbers.

    `tokens`, `off_policy_weights`, `entropy` and `penalty` (the KL estimate against the reference) are the
    columns [T] with 0 where not trained; `inputs` tells what kind of loss they come from.
    """
    mask = tokens.mask
    log_ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs)
    if inputs.compares_sequences:
        log_ratio = average_by_sequence(log_ratio, mask, tokens.sequence)
    # log π_θ / μ, whatever the surrogate compares
    ell = clamp_log_ratio(tokens.logprobs - tokens.behavior_logprobs).double()
    rho, zeros = ell.exp(), torch.zeros_like(ell)
    weight = off_policy_weights
    if inputs.corrects_itself:
        weight = off_policy_weights * _own_weight(inputs, tokens)
    columns = {
        "tokens": mask,
        "entropy": entropy,
        "clipped": _has_no_gradient(inputs, tokens),
        "truncated": torch.zeros_like(mask) if inputs.truncated is None else inputs.truncated,
        "dropped": off_policy_weights == 0,
        "weight": weight,
        "weight_squared": weight.square(),
        "ratio": log_ratio.exp(),
        "rho": rho,
        "rho_squared": rho.square(),
        "k1": kl.k1(-ell, zeros),
        "k2": kl.k2(-ell, zeros),
        "k3": kl.k3(-ell, zeros),
        "reference_kl": penalty,
    }
    sums = sum_by_staleness(columns, mask, inputs.staleness)
    bins = torch.bucketize(ell[mask], LOG_RATIO_EDGES.to(ell.device)[1:-1], right=True)
    sums["log_ratio_bins"] = torch.bincount(bins, minlength=len(LOG_RATIO_EDGES) - 1).double()
    return sums | _sum_sequences(ell, mask, tokens.sequence)


def sum_by_staleness(columns: dict[str, Tensor], mask: Tensor, staleness: Tensor | None) -> dict[str, Tensor]:
    """Returns the sum of each column [T] over the trained tokens of each bucket of staleness: [buckets]."""
    edges = torch.tensor(list(BUCKETS.values()), device=mask.device)
    bucket = torch.zeros_like(mask, dtype=torch.int64)
    if staleness is not None:
        bucket = torch.bucketize(staleness.long().clamp(min=0), edges, right=True) - 1
    # Untrained tokens go to one more bucket, which is then cut off.
    bucket = torch.where(mask, bucket, len(BUCKETS))
    return {
        name: torch.bincount(bucket, column.double(), minlength=len(BUCKETS) + 1)[: len(BUCKETS)]
        for name, column in columns.items()
    }


def _sum_sequences(ell: Tensor, mask: Tensor, sequence: Tensor) -> dict[str, Tensor]:
    """Returns sums over the sequences with a trained token, of ρ = Π π_θ / μ; `ell` is log π_θ / μ [T]."""
    zeros = torch.zeros(count_sequences(sequence), dtype=torch.float64, device=mask.device)
    is_trained = zeros.index_add(0, sequence, mask.double()) > 0
    log_rho = zeros.index_copy(0, sequence, sum_by_sequence(ell, mask, sequence))[is_trained]
    rho = clamp_log_ratio(log_rho).exp()
    return {
        "sequences": is_trained.double().sum(),
        "sequence_rho": rho.sum(),
        "sequence_rho_squared": rho.square().sum(),
    }


def _has_no_gradient(inputs: LossInputs, tokens: Tokens) -> Tensor:
    """Returns [T] bool: the clip, or the gate, of the surrogate has taken a gradient that the advantage
    would give."""
    return (_differentiate_surrogate(inputs, tokens) == 0) & (tokens.advantages != 0)


def _own_weight(inputs: LossInputs, tokens: Tokens) -> Tensor:
    """Returns [T] the weight of A ∇ log π in a surrogate that corrects itself; 0 where not trained."""
    signs = torch.where(tokens.advantages < 0, -1.0, 1.0)
    return _differentiate_surrogate(inputs, replace(tokens, advantages=signs)).abs() * tokens.mask


def _differentiate_surrogate(inputs: LossInputs, tokens: Tokens) -> Tensor:
    """Returns [T] the gradient of the surrogate with respect to log π_θ."""
    with torch.enable_grad():
        leaf = tokens.logprobs.detach().requires_grad_()
        objective = inputs.surrogate(replace(tokens, logprobs=leaf))
        (gradient,) = torch.autograd.grad(objective.sum(), leaf)
    return gradient


def summarize_policy(sums: dict[str, Tensor]) -> dict[str, float]:
    """Returns the figures of a step from the sums over all its tokens: `docs/metrics.md`. Zeros when
    nothing was trained."""
    table = {name: column.tolist() for name, column in sums.items() if column.numel() == len(BUCKETS)}
    total = {name: sum(column) for name, column in table.items()}
    number = {name: float(value) for name, value in sums.items() if value.numel() == 1}
    n, num_sequences = max(total["tokens"], 1.0), max(number["sequences"], 1.0)
    is_trained = total["tokens"] > 0
    rho_of_sequences = number["sequence_rho"], number["sequence_rho_squared"]
    metrics = {
        "loss/policy": number["loss"],
        "policy/entropy": total["entropy"] / n,
        "policy/clip_fraction": total["clipped"] / n,
        "policy/ratio_mean": total["ratio"] / n,
        "policy/kl_reference": total["reference_kl"] / n,
        "offpolicy/ess": _effective_share(total["weight"], total["weight_squared"], n),
        "offpolicy/ess_token": _effective_share(total["rho"], total["rho_squared"], n),
        "offpolicy/ess_sequence": _effective_share(*rho_of_sequences, num_sequences),
        "offpolicy/chi2": total["rho_squared"] / n - 1 if is_trained else 0.0,
        "offpolicy/chi2_sequence": rho_of_sequences[1] / num_sequences - 1 if is_trained else 0.0,
        "offpolicy/kl_k1": total["k1"] / n,
        "offpolicy/kl_k2": total["k2"] / n,
        "offpolicy/kl_k3": total["k3"] / n,
        "offpolicy/weight_mean": total["weight"] / n,
        "offpolicy/truncated_fraction": total["truncated"] / n,
        "offpolicy/dropped_fraction": total["dropped"] / n,
    }
    quantiles = _find_ratio_quantiles(sums["log_ratio_bins"])
    metrics |= {f"offpolicy/ratio_{name}": ratio for name, ratio in quantiles.items()}
    for place, bucket in enumerate(BUCKETS):
        column = {name: values[place] for name, values in table.items()}
        if (m := column["tokens"]) == 0:
            continue
        metrics |= {
            f"staleness_{bucket}/share": m / n,
            f"staleness_{bucket}/clip_fraction": column["clipped"] / m,
            f"staleness_{bucket}/dropped_fraction": column["dropped"] / m,
            f"staleness_{bucket}/truncated_fraction": column["truncated"] / m,
            f"staleness_{bucket}/ess_token": _effective_share(column["rho"], column["rho_squared"], m),
            f"staleness_{bucket}/kl_k3": column["k3"] / m,
        }
    return metrics


def _effective_share(weight: float, weight_squared: float, n: float) -> float:
    """Returns the effective sample size over n (Kong, 1992): (Σ w)² / (n Σ w²); 0 where all weights are 0."""
    return weight**2 / (n * weight_squared) if weight_squared else 0.0


def _find_ratio_quantiles(bins: Tensor) -> dict[str, float]:
    """Returns quantiles of π_θ / μ from counts [bins of its logarithm], linear within a bin; 1 when
    nothing was trained."""
    if not float(bins.sum()):
        return dict.fromkeys(QUANTILES, 1.0)
    edges, counts = LOG_RATIO_EDGES, bins.cpu()
    cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    quantiles = {}
    for name, share in QUANTILES.items():
        wanted = share * float(cumulative[-1])
        place = int(torch.searchsorted(cumulative[1:], wanted).clamp(max=len(counts) - 1))
        within = (wanted - float(cumulative[place])) / max(float(counts[place]), 1.0)
        quantiles[name] = float((edges[place] + within * (edges[place + 1] - edges[place])).exp())
    return quantiles
