"""`sampling`: how generators draw tokens from the policy."""

from dataclasses import dataclass

from configs.rules import POSITIVE, SHARE, above_up_to, at_least
from configs.setting import Condition, Section, setting


@dataclass(kw_only=True, slots=True)
class SamplingConfig(Section):
    """How generators draw tokens from the policy."""

    temperature: float = setting(1.0, POSITIVE)
    """Sampling temperature. Behavior log-probabilities are those after it."""
    max_tokens: int = setting(16, POSITIVE)
    """Longest response, in tokens. Must be below `generators.max_model_len`."""
    top_p: float = setting(1.0, above_up_to(0, 1))
    """Sample from the likeliest tokens whose probabilities add up to this. 1: from all tokens."""
    top_k: int = setting(-1, at_least(-1, "-1 and 0 switch it off"))
    """Sample from this many of the likeliest tokens. -1: from all tokens."""
    min_p: float = setting(0.0, SHARE)
    """Sample from tokens that have at least this share of the likeliest token's probability. 0: from all
    tokens."""
    accept_truncation_bias: bool = setting(False)
    """Allow `top_p`, `top_k` and `min_p`. They change the support of the behavior policy, which no importance
    weight repairs, so they are refused unless this is true."""

    @property
    def is_truncated(self) -> bool:
        """True when some tokens cannot be sampled although the model gives them a probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                not self.is_truncated or self.accept_truncation_bias,
                "sampling.top_p, top_k and min_p",
                "be 1, -1 and 0 unless sampling.accept_truncation_bias=true",
                f"{self.top_p}, {self.top_k} and {self.min_p}",
            )
        ]
