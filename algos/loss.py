"""The policy loss: a pure function of the columns of one microbatch."""

import torch
from torch import Tensor

from algos.inputs import LossInputs, Tokens
from algos.metrics import sum_policy_metrics


def policy_loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the losses of tokens, with a KL penalty, an entropy bonus and imitation.

    L = Σ_t a_t · [w_t · (L_t + β KL_t) − c H_t] − m Σ_t b_t log π_θ

    a are the aggregation weights, w the off-policy weights, L_t the surrogate (`algos.surrogates`), KL_t the
    estimate against the reference policy (`algos.kl`), H_t the entropy, b the weights of the tokens of good
    samples (VAPO; Yue et al., 2025, arXiv 2504.05118). The denominators stand in a and b and count the whole
    minibatch over all ranks, so the losses of microbatches and ranks add up to that of one big batch. Dropped
    tokens (w = 0) stay in them.

    Shapes: all columns [T] -> (scalar, sums for `algos.metrics.summarize_policy`, detached). Values where
    `mask` is false cannot matter, NaN included.
    """

    def zero_untrained(values: Tensor) -> Tensor:
        return torch.where(inputs.mask, values, 0.0)

    tokens = Tokens(
        logprobs=zero_untrained(inputs.logprobs),
        proximal_logprobs=zero_untrained(inputs.proximal_logprobs),
        behavior_logprobs=zero_untrained(inputs.behavior_logprobs),
        advantages=zero_untrained(inputs.advantages),
        mask=inputs.mask,
        sequence=inputs.sequence,
    )
    aggregation_weights = zero_untrained(inputs.aggregation_weights)
    off_policy_weights = zero_untrained(inputs.off_policy_weights)
    entropy = zero_untrained(inputs.entropy)
    objective = inputs.surrogate(tokens)
    penalty = torch.zeros_like(objective)
    if inputs.reference_logprobs is not None:
        assert inputs.kl_estimator is not None, (
            "a reference policy needs an estimator of the divergence from it"
        )
        penalty = inputs.kl_estimator(tokens.logprobs, zero_untrained(inputs.reference_logprobs))
        objective = objective + inputs.kl_coef * penalty
    loss = (aggregation_weights * off_policy_weights * objective).sum()
    if inputs.entropy_coef:
        loss = loss - inputs.entropy_coef * (aggregation_weights * entropy).sum()
    if inputs.imitation_weights is not None:
        imitation_weights = zero_untrained(inputs.imitation_weights)
        loss = loss - inputs.imitation_coef * (imitation_weights * tokens.logprobs).sum()
    with torch.no_grad():
        sums = sum_policy_metrics(inputs, tokens, off_policy_weights, entropy, penalty)
        sums["loss"] = loss.detach().double()
    return loss, sums
