"""`algo.kl`: the penalty for leaving the reference policy."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE
from configs.setting import Condition, Section, setting


class Estimator(StrEnum):
    """Estimator of a KL divergence from sampled tokens, with ℓ = log p − log q (`algos/kl.py`)."""

    k1 = "k1"
    """ℓ: unbiased, noisy, may be negative."""
    k2 = "k2"
    """½ ℓ²: biased, small where p and q are close."""
    k3 = "k3"
    """e^−ℓ − 1 + ℓ: unbiased, never negative."""


@dataclass(kw_only=True, slots=True)
class KlConfig(Section):
    """The penalty for leaving the reference policy, which is the model that the run began with."""

    estimator: Estimator = setting(Estimator.k3)
    """Estimator of the divergence."""
    loss_coef: float = setting(0.0, NOT_NEGATIVE)
    """Coefficient β of the penalty in the loss."""
    reward_coef: float = setting(0.0, NOT_NEGATIVE)
    """Coefficient β of the penalty in the reward."""
    target: float | None = setting(None, POSITIVE)
    """KL of a token to which the coefficient in use is adapted (Ziegler et al., 2019, arXiv 1909.08593).
    Null: the coefficient is constant."""
    horizon: int = setting(10_000, POSITIVE)
    """Sequences over which the coefficient adapts."""

    @property
    def is_used(self) -> bool:
        return self.loss_coef > 0 or self.reward_coef > 0

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.loss_coef == 0 or self.reward_coef == 0,
                "algo.kl.loss_coef and reward_coef",
                "not both be above 0 (the penalty stands in the loss or in the reward)",
                f"{self.loss_coef} and {self.reward_coef}",
            ),
            Condition(
                self.loss_coef == 0 or self.estimator is not Estimator.k1,
                "algo.kl.estimator",
                "be k2 or k3 with algo.kl.loss_coef above 0 (the gradient of k1 is zero in expectation)",
                self.estimator,
            ),
            Condition(
                self.target is None or self.is_used,
                "algo.kl.target",
                "be set only with algo.kl.loss_coef or reward_coef above 0 (it adapts the coefficient)",
                self.target,
            ),
        ]
