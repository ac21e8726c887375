"""`algo.<surrogate>`: the parameters of each surrogate of `algos/surrogates.py`, and what each surrogate
needs.

A new surrogate adds a dataclass here and a row to `SurrogateSections`; the row's name is the name of the
function.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from configs.rules import POSITIVE, above, above_up_to
from configs.setting import Condition, Section, section, setting


@dataclass(kw_only=True, slots=True)
class SurrogateConfig(Section):
    """Parameters of a surrogate, and as class variables what it needs and bears."""

    corrects_itself: ClassVar[bool] = False
    """True when the surrogate already multiplies by π/μ, so `algo.correction` must be `none`."""
    bounds_ratio: ClassVar[bool] = False
    """True when the surrogate bounds the weight of the tokens that it clips. With `algo.proximal=behavior`
    its ratio is π/μ, and this bounded ratio is a correction."""
    uses_proximal: ClassVar[bool] = True
    """False when no proximal policy stands in the surrogate's equation."""
    clips_around_proximal: ClassVar[bool] = False
    """True when the surrogate only clips where π has left the proximal policy: never in the first update of a
    step."""
    compares_sequences: ClassVar[bool] = False
    """True when the ratio is one of whole sequences: the mean of the log-ratios of their tokens."""
    max_shown_staleness: ClassVar[int] = 8
    """Staleness up to which the surrogate is known to learn, once it is corrected. Decoupled PPO: 8 (AReaL,
    2025). CISPO in a pipeline of 8 (ScaleRL, 2025). Surrogates that nobody has measured are taken to be like
    them."""

    @property
    def second_moment_threshold(self) -> float | None:
        """Largest second moment of log π/μ over a minibatch's trained tokens; None for surrogates without
        this mask."""
        return None


@dataclass(kw_only=True, slots=True)
class PpoConfig(SurrogateConfig):
    """PPO's clip (Schulman et al., 2017, arXiv 1707.06347), around the proximal policy."""

    clips_around_proximal: ClassVar[bool] = True
    clip_low: float = setting(0.2, POSITIVE)
    """Distance below 1 at which a token's ratio is clipped."""
    clip_high: float = setting(0.2, POSITIVE)
    """Distance above 1 at which a token's ratio is clipped."""
    dual_clip: float | None = setting(3.0, above(1, "3 is usual; null: no bound"))
    """Bound on the loss of tokens with negative advantage (Ye et al., 2020, arXiv 1912.09729). Null: no
    bound."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                max(self.clip_low, self.clip_high) >= 0.01,
                "algo.ppo.clip_low and clip_high",
                "be at least 0.01, because they bound single tokens (0.2 is usual; algo.surrogate=gspo "
                "takes ranges like these)",
                f"{self.clip_low} and {self.clip_high}",
            )
        ]


@dataclass(kw_only=True, slots=True)
class GspoConfig(SurrogateConfig):
    """GSPO (Zheng et al., 2025, arXiv 2507.18071): a clip of each sequence's mean ratio."""

    bounds_ratio: ClassVar[bool] = True
    clips_around_proximal: ClassVar[bool] = True
    compares_sequences: ClassVar[bool] = True
    clip_low: float = setting(3e-4, POSITIVE)
    """Distance below 1 at which a sequence's mean ratio is clipped."""
    clip_high: float = setting(4e-4, POSITIVE)
    """Distance above 1 at which a sequence's mean ratio is clipped."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                max(self.clip_low, self.clip_high) <= 0.1,
                "algo.gspo.clip_low and clip_high",
                "be at most 0.1, because they bound means over a sequence (3e-4 and 4e-4 in the paper; "
                "algo.surrogate=ppo takes ranges like these)",
                f"{self.clip_low} and {self.clip_high}",
            )
        ]


@dataclass(kw_only=True, slots=True)
class CispoConfig(SurrogateConfig):
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): the weight of a token is clipped, the token never."""

    bounds_ratio: ClassVar[bool] = True
    clip_low: float = setting(1.0, POSITIVE)
    """Distance below 1 at which a token's weight is clipped. 1: no lower bound."""
    clip_high: float = setting(5.0, POSITIVE)
    """Distance above 1 at which a token's weight is clipped."""


@dataclass(kw_only=True, slots=True)
class SapoConfig(SurrogateConfig):
    """SAPO (Qwen, 2025, arXiv 2511.20347): a soft gate instead of a clip."""

    bounds_ratio: ClassVar[bool] = True
    tau_positive: float = setting(1.0, POSITIVE)
    """Temperature of the gate for tokens with positive advantage. Higher: the gate closes sooner."""
    tau_negative: float = setting(1.05, POSITIVE)
    """Temperature of the gate for tokens with negative advantage."""


@dataclass(kw_only=True, slots=True)
class ToprConfig(SurrogateConfig):
    """TOPR (Le Roux et al., 2025, arXiv 2503.14286), which has no parameters."""

    corrects_itself: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False


@dataclass(kw_only=True, slots=True)
class DppoConfig(SurrogateConfig):
    """DPPO (Qi et al., 2026), binary total variation: a trust region around the behavior policy."""

    corrects_itself: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False
    low: float = setting(0.2, above_up_to(0, 1, "a probability moves no further than 1"))
    """Fall of a token's probability, from the behavior policy's, at which it stops counting (δ_low). 1: no
    bound."""
    high: float = setting(0.2, above_up_to(0, 1, "a probability moves no further than 1"))
    """Rise of a token's probability, from the behavior policy's, at which it stops counting (δ_high). 1: no
    bound."""


@dataclass(kw_only=True, slots=True)
class AipoConfig(SurrogateConfig):
    """AIPO (LlamaRL, 2025, arXiv 2505.24034): truncated importance weights of the current against the
    behavior policy."""

    corrects_itself: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False
    cap: float = setting(4.0, POSITIVE)
    """Value at which π/μ is truncated (ρ). 2 to 10 in the paper."""


@dataclass(kw_only=True, slots=True)
class M2poConfig(SurrogateConfig):
    """M2PO (Zheng et al., 2025, arXiv 2510.01161): a mask that keeps the second moment of log π/μ small."""

    corrects_itself: ClassVar[bool] = True
    max_shown_staleness: ClassVar[int] = 256
    threshold: float = setting(0.04, POSITIVE)
    """Largest second moment of log π/μ among the tokens that are trained (τ)."""

    @property
    def second_moment_threshold(self) -> float | None:
        return self.threshold


@dataclass(kw_only=True, slots=True)
class KimiConfig(SurrogateConfig):
    """Kimi k1.5 (2025, arXiv 2501.12599): mirror descent with a squared penalty for leaving the proximal
    policy."""

    tau: float = setting(0.1, POSITIVE)
    """Weight of the penalty (τ)."""


@dataclass(kw_only=True, slots=True)
class OpmdConfig(SurrogateConfig):
    """OPMD (Trinity-RFT, 2025, arXiv 2505.17826): mirror descent with a soft baseline."""

    tau: float = setting(1.0, POSITIVE)
    """Temperature of the surrogate `opmd`, and of the advantage of this name (τ)."""


@dataclass(kw_only=True, slots=True)
class SurrogateSections(Section):
    """One section for each surrogate. Only that of `algo.surrogate` may be changed."""

    ppo: PpoConfig = section(PpoConfig)
    gspo: GspoConfig = section(GspoConfig)
    cispo: CispoConfig = section(CispoConfig)
    sapo: SapoConfig = section(SapoConfig)
    topr: ToprConfig = section(ToprConfig)
    dppo: DppoConfig = section(DppoConfig)
    aipo: AipoConfig = section(AipoConfig)
    m2po: M2poConfig = section(M2poConfig)
    kimi: KimiConfig = section(KimiConfig)
    opmd: OpmdConfig = section(OpmdConfig)


SURROGATE_NAMES = tuple(field.name for field in dataclasses.fields(SurrogateSections))
"""Names of all surrogates."""
