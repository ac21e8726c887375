"""The parameters of the surrogates of `algos/surrogates.py`, one dataclass each, and what each of them takes."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from configs.rules import positive


@dataclass(kw_only=True, slots=True)
class SurrogateConfig:
    """The parameters of a surrogate. Each is a finite number above 0 unless `problems` says otherwise."""

    corrects: ClassVar[bool] = False
    """Does it weigh tokens by π / μ itself? Then it takes no correction besides."""
    corrects_by_behavior: ClassVar[bool] = False
    """Does it bound the weight of what it clips? Then with `algo.proximal=behavior` its own ratio is the correction."""
    tolerates: ClassVar[int] = 8
    """Staleness up to which it has been shown to hold, once it is corrected: decoupled PPO up to 8 (AReaL, 2025), CISPO in a pipeline of
    8 (ScaleRL, 2025); what nobody has measured is taken to be like them."""

    def problems(self, section: str) -> list[str]:
        names = [f.name for f in dataclasses.fields(self)]
        return positive(**{f"{section}.{name}": getattr(self, name) for name in names})


@dataclass(kw_only=True, slots=True)
class PpoConfig(SurrogateConfig):
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    """Bound on the loss of tokens with negative advantage (Ye et al., 2020); None: no bound."""

    def problems(self, section: str) -> list[str]:
        found = SurrogateConfig.problems(self, section)
        if self.dual_clip is not None and self.dual_clip <= 1:
            found.append(
                f"{section}.dual_clip must be > 1 (3 is usual), or null for no bound, got {self.dual_clip}"
            )
        if 0 < max(self.clip_low, self.clip_high) < 0.01:
            found.append(
                f"{section}.clip_low and clip_high must be at least 0.01, for they are of single tokens (0.2 is usual; "
                f"algo.surrogate=gspo takes ranges like these), got {self.clip_low} and {self.clip_high}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class GspoConfig(SurrogateConfig):
    corrects_by_behavior: ClassVar[bool] = True
    clip_low: float = 3e-4
    """Of a sequence's mean."""
    clip_high: float = 4e-4

    def problems(self, section: str) -> list[str]:
        found = SurrogateConfig.problems(self, section)
        if max(self.clip_low, self.clip_high) > 0.1:
            found.append(
                f"{section}.clip_low and clip_high must be at most 0.1, for they are of means over a sequence (3e-4 and 4e-4 in the "
                f"paper; algo.surrogate=ppo takes ranges like these), got {self.clip_low} and {self.clip_high}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class CispoConfig(SurrogateConfig):
    corrects_by_behavior: ClassVar[bool] = True
    clip_low: float = 1.0
    """1: no lower bound."""
    clip_high: float = 5.0


@dataclass(kw_only=True, slots=True)
class SapoConfig(SurrogateConfig):
    corrects_by_behavior: ClassVar[bool] = True
    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(kw_only=True, slots=True)
class ToprConfig(SurrogateConfig):
    corrects: ClassVar[bool] = True


@dataclass(kw_only=True, slots=True)
class DppoConfig(SurrogateConfig):
    corrects: ClassVar[bool] = True
    low: float = 0.2
    """δ_low: how far a token's probability may have fallen; at most 1, which is no bound."""
    high: float = 0.2

    def problems(self, section: str) -> list[str]:
        return SurrogateConfig.problems(self, section) + [
            f"{section}.{name} must be at most 1 (a probability moves no further), got {value}"
            for name, value in (("low", self.low), ("high", self.high))
            if value > 1
        ]


@dataclass(kw_only=True, slots=True)
class AipoConfig(SurrogateConfig):
    corrects: ClassVar[bool] = True
    cap: float = 4.0
    """ρ: where π / μ is truncated; 2 to 10 in the paper."""


@dataclass(kw_only=True, slots=True)
class M2poConfig(SurrogateConfig):
    corrects: ClassVar[bool] = True
    tolerates: ClassVar[int] = 256
    threshold: float = 0.04
    """τ: the largest second moment of log π / μ among the tokens that are trained."""


@dataclass(kw_only=True, slots=True)
class KimiConfig(SurrogateConfig):
    tau: float = 0.1


@dataclass(kw_only=True, slots=True)
class OpmdConfig(SurrogateConfig):
    tau: float = 1.0
    """Of the surrogate and of the advantage of this name."""
