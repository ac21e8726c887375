"""A policy loss: surrogate × off-policy weights, summed with given weights, with a KL penalty, an entropy bonus and imitation.

L = Σ_t a_t · [w_t · (L_t + β KL_t) − c H_t] + μ Σ_t b_t (−log π_θ)

a from `aggregation.token_weights`, w from `corrections.off_policy_weights`, L_t from `surrogates`, KL_t from `kl` against the reference
policy, H_t the entropy, b the weights of the tokens of good samples (VAPO). What is to be known of it comes from `metrics`.
"""

import torch
from torch import Tensor

from algos import kl, metrics
from algos.corrections import off_policy_weights
from algos.surrogates import SURROGATES, Tokens
from configs.algo import AlgoConfig


def policy_loss(
    algo: AlgoConfig,
    *,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    entropy: Tensor,
    sequence: Tensor,
    staleness: Tensor | None = None,
    correction: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float | None = None,
    imitation: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one microbatch and its sums, detached.

    Shapes: all [T]; mask is bool; `weights` are the aggregation's; `sequence` int64, the index of each token's sequence, all of whose
    tokens are here; `staleness` int. `correction`: the off-policy weights, where they depend on the whole minibatch; None: those of
    these tokens. `kl_coef`: None: `algo.kl.loss_coef`. Values where mask is false cannot matter, NaN included.
    """

    def kept(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    weights, entropy = kept(weights), kept(entropy)
    tokens = Tokens(
        logprobs=kept(logprobs), proximal=kept(proximal_logprobs), behavior=kept(behavior_logprobs),
        advantages=kept(advantages), mask=mask, sequence=sequence,
    )  # fmt: skip
    if correction is None:
        correction = off_policy_weights(
            algo, tokens.proximal - tokens.behavior, tokens.advantages, mask, sequence
        )
    correction = kept(correction)
    objective = SURROGATES[algo.surrogate](tokens, algo.surrogate_section)
    penalty = torch.zeros_like(objective)
    if reference_logprobs is not None:
        penalty = kl.ESTIMATORS[algo.kl.estimator](tokens.logprobs, kept(reference_logprobs))
        objective = objective + (algo.kl.loss_coef if kl_coef is None else kl_coef) * penalty
    loss = (weights * correction * objective).sum()
    if algo.entropy_coef:
        loss = loss - algo.entropy_coef * (weights * entropy).sum()
    if imitation is not None:
        loss = loss - algo.imitation_coef * (kept(imitation) * tokens.logprobs).sum()
    with torch.no_grad():
        sums = metrics.sums(algo, tokens, correction, entropy, penalty, staleness)
        sums["loss"] = loss.detach().double()
    return loss, sums
