"""The configuration of algorithms: advantages × off-policy correction × surrogate × aggregation (+ KL, entropy).

A surrogate is a function of `algos/surrogates.py` and a dataclass of `configs/surrogates.py`, which holds its parameters
and says what it takes; its field in `AlgoConfig` has its name. Presets, the named compositions, stand in `configs/algo/`.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum

from configs.rules import not_negative, positive, within_one
from configs.surrogates import (
    AipoConfig,
    CispoConfig,
    DppoConfig,
    GspoConfig,
    KimiConfig,
    M2poConfig,
    OpmdConfig,
    PpoConfig,
    SapoConfig,
    SurrogateConfig,
    ToprConfig,
)


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


CORRECTION_RANGES = {
    Correction.none: (0.0, float("inf")),
    Correction.token_tis: (0.0, 2.0),
    Correction.icepop: (0.5, 5.0),
    Correction.sequence_tis: (0.0, 2.0),
    Correction.sequence_mask: (0.5, 2.0),
    Correction.geometric_mask: (0.99, 1.01),
}
"""(floor, cap) of each one's weight where the configuration says nothing."""


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
        if self.loss_coef > 0 and self.estimator is Estimator.k1:
            found.append(
                "algo.kl.estimator must be k2 or k3 with algo.kl.loss_coef above 0 (the gradient of k1 is zero in expectation), got k1"
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
    correction_cap: float | None = None
    """Upper end of the weight: `token_tis` and `sequence_tis` truncate there, the others drop what is above. None: the correction's
    own, 2 for a token or a product over a sequence, 5 for `icepop`, 1.01 for `geometric_mask`, which is of a mean."""
    correction_floor: float | None = None
    """Lower end, where `correction` drops: what is below is dropped too. None: 0.5, and 0.99 for `geometric_mask`."""
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
    def correction_range(self) -> tuple[float, float]:
        """(floor, cap) of the weight of the correction in use."""
        floor, cap = CORRECTION_RANGES[self.correction]
        return (
            floor if self.correction_floor is None else self.correction_floor,
            cap if self.correction_cap is None else self.correction_cap,
        )

    @property
    def needs_reference(self) -> bool:
        return self.kl.loss_coef > 0 or self.kl.reward_coef > 0 or self.advantage is Advantage.prime

    @property
    def needs_minibatch(self) -> bool:
        """Do the weights of tokens depend on the whole minibatch?"""
        return self.normalise_weights or self.surrogate == "m2po"

    @property
    def _rejects(self) -> bool:
        return self.rejection.estimator is not None

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
        found += not_negative(
            **{"algo.entropy_coef": self.entropy_coef, "algo.imitation_coef": self.imitation_coef}
        )
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
        if self.advantage is Advantage.vtrace and self.loss.corrects:
            found.append(
                "algo.surrogate must not weigh tokens by π / μ itself for algo.advantage=vtrace (its advantages are weighed already; "
                f"ppo does not), got {self.surrogate}"
            )
        if (
            self.surrogate in ("topr", "dppo", "aipo")
            and self.proximal is Proximal.loglinear
            and not self._rejects
        ):
            found.append(
                f"algo.proximal must not be loglinear for algo.surrogate={self.surrogate} (it knows no proximal policy; behavior saves the "
                "forward pass for one), got loglinear"
            )
        if self.proximal is Proximal.behavior and self._rejects:
            found.append(
                "algo.rejection.estimator must be null for algo.proximal=behavior (the two policies it compares are one), got "
                f"{self.rejection.estimator}"
            )
        shaped = [name for name in ("normalise", "overlong_share") if getattr(self.reward, name)]
        if self.advantage is Advantage.remax and shaped:
            found.append(
                f"algo.reward.{shaped[0]} must be off for algo.advantage=remax (its baseline is a reward as the task gives it), got "
                f"{getattr(self.reward, shaped[0])}"
            )
        floor, cap = self.correction_range
        if floor >= cap:
            found.append(f"algo.correction_floor must be below algo.correction_cap, got {floor} and {cap}")
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
            name: (name == self.surrogate or name == self.advantage, f"algo.surrogate={name}")
            for name in _SURROGATES
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
        found = [
            f"{name} must not be set without {wanted}, got {value} with algo.advantage={self.advantage} and "
            f"algo.surrogate={self.surrogate}"
            for name, (value, wanted) in changed.items()
        ]
        drops = self.correction in (Correction.icepop, Correction.sequence_mask, Correction.geometric_mask)
        weighs = (
            self.correction is not Correction.none
            or self.rejection.estimator is not None
            or self.surrogate == "m2po"
        )
        without_effect = {
            "algo.correction_cap": (
                self.correction_cap is not None and self.correction is Correction.none, "a correction that has a cap",
                self.correction_cap,
            ),
            "algo.correction_floor": (
                self.correction_floor is not None and not drops, "a correction that drops what is below it",
                self.correction_floor,
            ),
            "algo.normalise_weights": (self.normalise_weights and not weighs, "weights other than 1", True),
            "algo.imitation_above": (
                self.imitation_above != 0 and not self.imitation_coef, "algo.imitation_coef above 0", self.imitation_above,
            ),
        }  # fmt: skip
        return found + [
            f"{name} must not be set without {wanted}, got {value} with algo.correction={self.correction} and "
            f"algo.surrogate={self.surrogate}"
            for name, (is_idle, wanted, value) in without_effect.items()
            if is_idle
        ]


_SURROGATES = [
    f.name for f in dataclasses.fields(AlgoConfig)
    if isinstance(f.default_factory, type) and issubclass(f.default_factory, SurrogateConfig)
]  # fmt: skip
