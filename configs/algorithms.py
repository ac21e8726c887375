"""The configuration of algorithms: advantages × off-policy correction × surrogate × aggregation (+ KL, entropy).

A surrogate is a function of `algos/surrogates.py` and a dataclass here, of the same name in `AlgoConfig`, which holds its parameters
and says what it takes. Presets, the named compositions, stand in `configs/algo/`.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from configs.rules import not_negative, positive, within_one


class Advantage(StrEnum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    remax = "remax"
    opmd = "opmd"
    gae = "gae"
    vtrace = "vtrace"
    prime = "prime"

    @property
    def needs_critic(self) -> bool:
        return self in (Advantage.gae, Advantage.vtrace)

    @property
    def needs_group(self) -> bool:
        """Does it compare the samples of a prompt?"""
        return self not in (Advantage.reinforce_pp, Advantage.remax, Advantage.gae, Advantage.vtrace)


class Correction(StrEnum):
    none = "none"
    token_tis = "token_tis"
    icepop = "icepop"
    sequence_tis = "sequence_tis"
    sequence_mask = "sequence_mask"
    geometric_mask = "geometric_mask"


class Aggregation(StrEnum):
    token_mean = "token_mean"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    constant_horizon = "constant_horizon"


class Proximal(StrEnum):
    recompute = "recompute"
    """By a forward pass at the start of the step: exact."""
    loglinear = "loglinear"
    """Between behaviour and current policy, by staleness: no forward pass."""
    behavior = "behavior"
    """The behaviour's: two policies instead of three."""


class Estimator(StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Level(StrEnum):
    token = "token"
    sequence_sum = "sequence_sum"
    sequence_mean = "sequence_mean"
    sequence_max = "sequence_max"


class Span(StrEnum):
    token = "token"
    turn = "turn"


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
            found.append(f"{section}.dual_clip must be > 1 (3 is usual), or null for no bound, got {self.dual_clip}")
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
    """δ_low: how far a token's probability may have fallen."""
    high: float = 0.2


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


@dataclass(kw_only=True, slots=True)
class RejectionConfig:
    """Drops tokens, or sequences, whose estimated KL(μ ‖ π) is above a threshold."""

    estimator: Estimator | None = None
    """None: nothing is dropped."""
    level: Level = Level.token
    threshold: float = 2.0


@dataclass(kw_only=True, slots=True)
class KlConfig:
    """The penalty for leaving the reference policy, which is the model that the run began with."""

    estimator: Estimator = Estimator.k3
    loss_coef: float = 0.0
    """β of the penalty in the loss."""
    reward_coef: float = 0.0
    """β of the penalty in the reward."""
    target: float | None = None
    """The KL a token that the coefficient in use is adapted to (Ziegler et al., 2019); None: it is constant."""
    horizon: int = 10_000
    """Sequences over which it adapts."""

    def problems(self) -> list[str]:
        found = not_negative(**{"algo.kl.loss_coef": self.loss_coef, "algo.kl.reward_coef": self.reward_coef})
        found += positive(**{"algo.kl.target": self.target, "algo.kl.horizon": self.horizon})
        if self.loss_coef > 0 and self.reward_coef > 0:
            found.append(
                "algo.kl.loss_coef and reward_coef must not both be above 0 (the penalty stands in the loss or in the reward), got "
                f"{self.loss_coef} and {self.reward_coef}"
            )
        if self.target is not None and not (self.loss_coef or self.reward_coef):
            found.append(
                "algo.kl.target must be set only with algo.kl.loss_coef or reward_coef above 0 (the coefficient that it adapts), got "
                f"{self.target}"
            )
        return found


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """What is done to rewards before they become advantages."""

    overlong_share: float | None = None
    """DAPO's soft overlong penalty: the last share of `sampling.max_tokens`, over which a sample's reward falls linearly by 1."""
    overlong_filter: bool = False
    """Samples that were cut off at `sampling.max_tokens` are not learned from by policy and critic (they count for their group)."""
    normalise: bool = False
    """(R − mean) / std over the step's batch."""
    clip: float | None = None
    """Rewards are kept within ± this, after `normalise`."""
    filter_power: float | None = None
    """PF-PPO: sequences are drawn again, with replacement, in proportion to |reward|^power. None: each counts once."""

    def problems(self) -> list[str]:
        found = positive(**{"algo.reward.clip": self.clip, "algo.reward.filter_power": self.filter_power})
        if self.overlong_share is not None and not 0 < self.overlong_share <= 1:
            found.append(f"algo.reward.overlong_share must be in (0, 1], got {self.overlong_share}")
        return found


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The value model: a copy of the policy's with a head of one number, with weights and optimizer of its own."""

    path: str | None = None
    """The model that it starts from; None: `model.path`."""
    lr: float = 1e-3
    """Its peak learning rate."""
    clip: float | None = 0.2
    """How far a value may move from the one at the start of the step before its loss is clipped; None: no clip."""
    pretrain_steps: int = 0
    """First steps of the run in which the critic alone is trained."""

    def problems(self) -> list[str]:
        return positive(**{"algo.critic.lr": self.lr, "algo.critic.clip": self.clip}) + not_negative(
            **{"algo.critic.pretrain_steps": self.pretrain_steps}
        )


@dataclass(kw_only=True, slots=True)
class GaeConfig:
    gamma: float = 1.0
    lam: float = 0.95
    """λ of the advantages."""
    critic_lam: float = 0.95
    """λ of the returns that the critic learns; 1: the whole return, whatever the critic thinks."""
    length_alpha: float | None = None
    """α of VAPO's length-adaptive λ = 1 − 1 / (α · length), which then takes the place of `lam`; None: `lam`."""
    span: Span = Span.token
    """What an action is: a token, or a turn (what is sampled without a break)."""
    whiten: bool = True
    """Advantages are brought to mean 0 and deviation 1 over the trained tokens of the batch."""

    def problems(self) -> list[str]:
        return within_one(
            **{"algo.gae.gamma": self.gamma, "algo.gae.lam": self.lam, "algo.gae.critic_lam": self.critic_lam}
        ) + positive(**{"algo.gae.length_alpha": self.length_alpha})


@dataclass(kw_only=True, slots=True)
class VtraceConfig:
    gamma: float = 1.0
    lam: float = 1.0
    rho_bar: float = 1.0
    """Where π / μ of a step is truncated."""
    c_bar: float = 1.0
    """Where it is truncated in the traces."""

    def problems(self) -> list[str]:
        return within_one(**{"algo.vtrace.gamma": self.gamma, "algo.vtrace.lam": self.lam}) + positive(
            **{"algo.vtrace.rho_bar": self.rho_bar, "algo.vtrace.c_bar": self.c_bar}
        )


@dataclass(kw_only=True, slots=True)
class PrimeConfig:
    """The implicit process reward model: a copy of the policy's model that learns from outcomes alone."""

    beta: float = 0.05
    """β: r_t = β log π_φ / π_ref."""
    lr: float = 1e-4
    """Its peak learning rate."""
    gamma: float = 1.0

    def problems(self) -> list[str]:
        return positive(**{"algo.prime.beta": self.beta, "algo.prime.lr": self.lr}) + within_one(
            **{"algo.prime.gamma": self.gamma}
        )


@dataclass(kw_only=True, slots=True)
class AlgoConfig:
    """An algorithm. Presets in `configs/algo/`."""

    name: str = "grpo"
    advantage: Advantage = Advantage.grpo
    surrogate: str = "ppo"
    """The loss of a token (`algos/surrogates.py`); its parameters stand in the section of its name."""
    ppo: PpoConfig = field(default_factory=PpoConfig)
    gspo: GspoConfig = field(default_factory=GspoConfig)
    cispo: CispoConfig = field(default_factory=CispoConfig)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    topr: ToprConfig = field(default_factory=ToprConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    aipo: AipoConfig = field(default_factory=AipoConfig)
    m2po: M2poConfig = field(default_factory=M2poConfig)
    kimi: KimiConfig = field(default_factory=KimiConfig)
    opmd: OpmdConfig = field(default_factory=OpmdConfig)
    proximal: Proximal = Proximal.recompute
    """Where the proximal log-probabilities come from."""
    correction: Correction = Correction.token_tis
    """Weight of each token, or sequence, for proximal policy against behaviour policy (`algos/corrections.py`)."""
    correction_cap: float = 2.0
    """Upper end of the weight: `token_tis` and `sequence_tis` truncate there, the others drop what is above."""
    correction_floor: float = 0.5
    """Lower end, where `correction` drops: what is below is dropped too."""
    normalise_weights: bool = False
    """Divide the weights by their mean over the minibatch, after truncation."""
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    accept_uncorrected: bool = False
    """A loss that does not correct for stale tokens is refused above S = 0 unless this is true (for studies of what it does)."""
    aggregation: Aggregation = Aggregation.token_mean
    horizon: int | None = None
    """`constant_horizon` only: the tokens that a sequence's sum is divided by; None: `sampling.max_tokens`."""
    kl: KlConfig = field(default_factory=KlConfig)
    entropy_coef: float = 0.0
    """Of the entropy bonus."""
    imitation_coef: float = 0.0
    """VAPO's μ: of the mean −log π of the tokens of good samples."""
    imitation_above: float = 0.0
    """A sample is good when its reward from the task is above this."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal and lease a fresh group in their place (DAPO)."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    gae: GaeConfig = field(default_factory=GaeConfig)
    vtrace: VtraceConfig = field(default_factory=VtraceConfig)
    prime: PrimeConfig = field(default_factory=PrimeConfig)

    @property
    def loss(self) -> SurrogateConfig:
        """The surrogate's parameters."""
        section: SurrogateConfig = getattr(self, self.surrogate)
        return section

    @property
    def needs_reference(self) -> bool:
        return self.kl.loss_coef > 0 or self.kl.reward_coef > 0 or self.advantage is Advantage.prime

    @property
    def needs_minibatch(self) -> bool:
        """Do the weights of tokens depend on the whole minibatch?"""
        return self.normalise_weights or self.surrogate == "m2po"

    @property
    def is_corrected(self) -> bool:
        """Does the loss weigh tokens for having been sampled by another policy?"""
        if self.loss.corrects or self.advantage is Advantage.vtrace:
            return True
        if self.proximal is Proximal.behavior:
            return self.loss.corrects_by_behavior
        return self.correction is not Correction.none

    @property
    def tolerates(self) -> int:
        """The staleness up to which this composition has been shown to hold; 0 without a correction."""
        return self.loss.tolerates if self.is_corrected else 0

    def problems(self) -> list[str]:
        if self.surrogate not in _SURROGATES:
            return [f"algo.surrogate must be one of {', '.join(_SURROGATES)}, got {self.surrogate!r}"]
        found = positive(
            **{
                "algo.correction_cap": self.correction_cap,
                "algo.correction_floor": self.correction_floor,
                "algo.rejection.threshold": self.rejection.threshold,
                "algo.horizon": self.horizon,
            }
        )
        found += not_negative(**{"algo.entropy_coef": self.entropy_coef, "algo.imitation_coef": self.imitation_coef})
        found += self.loss.problems(f"algo.{self.surrogate}")
        for part in (self.kl, self.reward, self.critic, self.gae, self.vtrace, self.prime):
            found += part.problems()
        found += self._unused()
        if self.loss.corrects and self.correction is not Correction.none:
            found.append(
                f"algo.correction must be none for algo.surrogate={self.surrogate} (it weighs tokens by π / μ itself), "
                f"got {self.correction}"
            )
        if self.advantage is Advantage.vtrace and self.correction is not Correction.none:
            found.append(
                "algo.correction must be none for algo.advantage=vtrace (its advantages are weighed by π / μ already), got "
                f"{self.correction}"
            )
        shaped = [name for name in ("normalise", "overlong_share") if getattr(self.reward, name)]
        if self.advantage is Advantage.remax and shaped:
            found.append(
                f"algo.reward.{shaped[0]} must be off for algo.advantage=remax (its baseline is a reward as the task gives it), got "
                f"{getattr(self.reward, shaped[0])}"
            )
        if self.correction_floor >= self.correction_cap:
            found.append(
                "algo.correction_floor must be below algo.correction_cap, "
                f"got {self.correction_floor} and {self.correction_cap}"
            )
        if self.normalise_weights and self.proximal is Proximal.loglinear:
            found.append(
                "algo.normalise_weights must be false when algo.proximal=loglinear (weights are known token by token only, in the "
                "loss; recompute works), got true"
            )
        if self.surrogate == "m2po" and self.proximal is not Proximal.recompute:
            found.append(
                f"algo.proximal must be recompute for algo.surrogate=m2po (its mask needs it), got {self.proximal}"
            )
        if self.advantage is Advantage.vtrace and self.proximal is not Proximal.recompute:
            found.append(
                "algo.proximal must be recompute for algo.advantage=vtrace (its weights are π_p / μ, known beforehand), got "
                f"{self.proximal}"
            )
        if self.horizon is not None and self.aggregation is not Aggregation.constant_horizon:
            found.append(
                f"algo.horizon must be set only with algo.aggregation=constant_horizon, got {self.horizon} with {self.aggregation}"
            )
        return found

    def _unused(self) -> list[str]:
        """A problem for each section that was changed and plays no part: its parameters were meant for something."""
        uses_critic = self.advantage.needs_critic
        parts = {
            name: (name == self.surrogate or name == self.advantage, f"algo.surrogate={name}") for name in _SURROGATES
        } | {
            "critic": (uses_critic, "algo.advantage=gae or vtrace"),
            "gae": (self.advantage is Advantage.gae, "algo.advantage=gae"),
            "vtrace": (self.advantage is Advantage.vtrace, "algo.advantage=vtrace"),
            "prime": (self.advantage is Advantage.prime, "algo.advantage=prime"),
            "rejection": (self.rejection.estimator is not None, "algo.rejection.estimator=k1, k2 or k3"),
        }
        changed = {
            f"algo.{name}.{f.name}": (getattr(getattr(self, name), f.name), wanted)
            for name, (used, wanted) in parts.items()
            if not used
            for f in dataclasses.fields(getattr(self, name))
            if getattr(getattr(self, name), f.name) != f.default
        }
        return [
            f"{name} must not be set without {wanted}, got {value} with algo.advantage={self.advantage} and "
            f"algo.surrogate={self.surrogate}"
            for name, (value, wanted) in changed.items()
        ]


_SURROGATES = [
    f.name for f in dataclasses.fields(AlgoConfig)
    if isinstance(f.default_factory, type) and issubclass(f.default_factory, SurrogateConfig)
]  # fmt: skip
