"""From a configuration to what a policy loss takes. The only module of the loss that reads `algo`."""

from functools import partial

import torch
from torch import Tensor

from algos.corrections import correct_off_policy, mask_rejected, normalize_weights
from algos.inputs import LossInputs
from algos.kl import ESTIMATORS
from algos.surrogates import SURROGATES, mask_second_moment
from configs.algo import AlgoConfig


def make_loss_inputs(
    algo: AlgoConfig,
    *,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    entropy: Tensor,
    aggregation_weights: Tensor,
    off_policy_weights: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float | None = None,
    imitation_weights: Tensor | None = None,
    staleness: Tensor | None = None,
) -> LossInputs:
    """Returns the inputs of the loss of one microbatch, with the surrogate and the coefficients of `algo`.

    The columns [T] are those of `LossInputs`. `off_policy_weights` must be given where
    `algo.needs_whole_minibatch`; None: the weights of these tokens. `kl_coef` replaces `algo.kl.loss_coef`
    where it was adapted; None: it was not.
    """
    log_ratio = torch.where(mask, proximal_logprobs - behavior_logprobs, 0.0)
    if off_policy_weights is None:
        off_policy_weights = compute_off_policy_weights(algo, log_ratio, advantages, mask, sequence)
    surrogate = algo.surrogate_section
    return LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        entropy=entropy,
        aggregation_weights=aggregation_weights,
        off_policy_weights=off_policy_weights,
        truncated=find_truncated(algo, log_ratio, off_policy_weights, mask, sequence),
        surrogate=partial(SURROGATES[algo.surrogate], config=surrogate),
        reference_logprobs=reference_logprobs,
        kl_estimator=ESTIMATORS[algo.kl.estimator],
        kl_coef=algo.kl.loss_coef if kl_coef is None else kl_coef,
        entropy_coef=algo.entropy_coef,
        imitation_weights=imitation_weights,
        imitation_coef=algo.imitation_coef,
        staleness=staleness,
        compares_sequences=surrogate.compares_sequences,
        corrects_itself=surrogate.corrects_itself,
    )


def compute_off_policy_weights(
    algo: AlgoConfig, log_ratio: Tensor, advantages: Tensor, mask: Tensor, sequence: Tensor
) -> Tensor:
    """Returns the off-policy weight of each token: correction × rejection × second-moment mask.

    They are divided by their mean over the trained tokens where `algo.normalize_weights` asks for it.
    `log_ratio` is log π_p − log μ; it and the advantages cannot matter where not trained. All columns must be
    of the whole minibatch where `algo.needs_whole_minibatch`.

    Shapes: log_ratio, advantages, mask (bool), sequence (int64, index of each token's episode) [T] -> [T],
    no gradient.
    """
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    floor, cap = algo.correction_range
    weights = correct_off_policy(algo.correction, log_ratio, mask, sequence, floor, cap)
    if algo.rejection.estimator is not None:
        level, threshold = algo.rejection.level, algo.rejection.threshold
        weights = weights * mask_rejected(
            algo.rejection.estimator, level, threshold, log_ratio, mask, sequence
        )
    if algo.surrogate_section.second_moment_threshold is not None:
        threshold = algo.surrogate_section.second_moment_threshold
        weights = weights * mask_second_moment(log_ratio, advantages, mask, threshold)
    return normalize_weights(weights, mask) if algo.normalize_weights else weights


def find_truncated(
    algo: AlgoConfig, log_ratio: Tensor, off_policy_weights: Tensor, mask: Tensor, sequence: Tensor
) -> Tensor | None:
    """Returns [T] bool: tokens whose weight was cut at the cap and which were not dropped.

    None: the correction cuts no weight. The weights are asked again, because `off_policy_weights` may have
    been normalized, which moves them past the cap.
    """
    if not algo.correction.truncates:
        return None
    floor, cap = algo.correction_range
    weights = correct_off_policy(algo.correction, log_ratio.detach(), mask, sequence, floor, cap)
    return (weights >= cap) & (off_policy_weights > 0)
