"""The records that a policy loss takes: columns [T] of one microbatch, and the numbers of the algorithm.

`algos.objective` makes them from a configuration. T counts the tokens of whole episodes that lie side by
side, without padding. A *sequence* is an episode, whatever the number of its turns and branches. `mask` marks
the tokens that are trained; the values of all other tokens cannot matter, NaN included.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The columns that a surrogate may look at. Values are 0 where `mask` is false."""

    logprobs: Tensor
    """[T] log π_θ of the current policy; the only column with a gradient"""
    proximal_logprobs: Tensor
    """[T] log π_p of the proximal policy: the learner at the start of the step"""
    behavior_logprobs: Tensor
    """[T] log μ of the behavior policy, which sampled the tokens"""
    advantages: Tensor
    """[T]"""
    mask: Tensor
    """[T] bool: the tokens that are trained"""
    sequence: Tensor
    """[T] int64: index of each token's episode"""


TokenLoss = Callable[[Tokens], Tensor]
"""Returns the loss [T] of each token, before weighting and aggregation: a surrogate with its parameters."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""Returns an estimate [T] of KL(p ‖ q) from log p [T] and log q [T]: one of `algos.kl.ESTIMATORS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch and the numbers of its objective. The columns hold whole episodes."""

    logprobs: Tensor
    """[T] log π_θ of the current policy, with a gradient"""
    proximal_logprobs: Tensor
    """[T] log π_p"""
    behavior_logprobs: Tensor
    """[T] log μ"""
    advantages: Tensor
    """[T]"""
    mask: Tensor
    """[T] bool: the tokens that are trained"""
    sequence: Tensor
    """[T] int64: index of each token's episode, from 0"""
    entropy: Tensor
    """[T] entropy H of the current policy at each token; with a gradient where it has a coefficient"""
    aggregation_weights: Tensor
    """[T] weight a of each token in the sum: one over the minibatch's denominator (`algos.aggregation`)"""
    off_policy_weights: Tensor
    """[T] weight w of each token for having been sampled by another policy; 0 drops the token"""
    surrogate: TokenLoss
    """The loss L of each token"""
    truncated: Tensor | None = None
    """[T] bool: tokens whose off-policy weight was cut at the cap; None where no weight can be. For
    metrics only"""
    reference_logprobs: Tensor | None = None
    """[T] log π_ref; None where no KL penalty stands in the loss"""
    kl_estimator: Divergence | None = None
    """Estimator of KL(π_θ ‖ π_ref); needed with `reference_logprobs`"""
    kl_coef: float = 0.0
    """β"""
    entropy_coef: float = 0.0
    """c"""
    imitation_weights: Tensor | None = None
    """[T] weight b of each token of a good sample, 0 elsewhere; None: no imitation"""
    imitation_coef: float = 0.0
    """m"""
    staleness: Tensor | None = None
    """[T] int: versions between sampling and training; None: all tokens count as fresh. For metrics only"""
    compares_sequences: bool = False
    """True when the surrogate's ratio is one of whole sequences. For metrics only"""
    corrects_itself: bool = False
    """True when the surrogate already multiplies by π_θ/μ. For metrics only"""
