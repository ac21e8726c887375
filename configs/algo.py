"""`algo`: advantages × off-policy correction × surrogate × aggregation, plus KL penalty and entropy bonus.

The sections below it stand in `advantages.py`, `corrections.py`, `surrogates.py`, `kl.py` and `rewards.py`.
Presets, the named compositions, stand in `configs/algo/`. What an algorithm needs of the run is a property
here, which the other packages ask instead of comparing names.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from configs.advantages import Advantage, CriticConfig, GaeConfig, PrimeConfig, VtraceConfig
from configs.corrections import CORRECTION_RANGES, Correction, Proximal, RejectionConfig
from configs.kl import KlConfig
from configs.reward_shaping import RewardShapingConfig
from configs.rules import NOT_NEGATIVE, POSITIVE, one_of
from configs.setting import Condition, section, setting, show_value
from configs.surrogates import SURROGATE_NAMES, SurrogateConfig, SurrogateSections


class Aggregation(StrEnum):
    """How the losses of tokens become one number."""

    token_mean = "token_mean"
    """Mean over all tokens of the minibatch."""
    sequence_mean_token_mean = "sequence_mean_token_mean"
    """Mean over sequences of the mean over their tokens."""
    sequence_mean_token_sum = "sequence_mean_token_sum"
    """Mean over sequences of the sum over their tokens."""
    constant_horizon = "constant_horizon"
    """Mean over sequences of the sum over their tokens, divided by `horizon`."""


@dataclass(kw_only=True, slots=True)
class AlgoConfig(SurrogateSections):
    """The algorithm: how rewards become an update of the policy."""

    name: str = setting("grpo")
    """Name of the preset, for the run's folder and its records. `algo=NAME` chooses a preset of
    `configs/algo/`."""
    advantage: Advantage = setting(Advantage.grpo)
    """How rewards become the advantages of tokens."""
    surrogate: str = setting("ppo", one_of(SURROGATE_NAMES))
    """Loss of a token (`algos/surrogates.py`). Its parameters stand in the section of its name."""
    proximal: Proximal = setting(Proximal.recompute)
    """Source of the proximal log-probabilities: those of the policy around which the loss holds the new
    one."""
    correction: Correction = setting(Correction.token_tis)
    """Off-policy weight of each token, or sequence: proximal against behavior policy."""
    correction_cap: float | None = setting(None, POSITIVE)
    """Upper end of the off-policy weight. `token_tis` and `sequence_tis` truncate there, the others drop what
    is above. Null: the correction's own, 2 for a token or a product over a sequence, 5 for `icepop`, 1.01 for
    `geometric_mask`, which bounds a mean."""
    correction_floor: float | None = setting(None, POSITIVE)
    """Lower end of the off-policy weight, for corrections that drop what is below. Null: 0.5, and 0.99 for
    `geometric_mask`."""
    normalize_weights: bool = setting(False)
    """Divide the off-policy weights by their mean over the minibatch, after truncation."""
    rejection: RejectionConfig = section(RejectionConfig)
    accept_uncorrected: bool = setting(False)
    """Allow a loss that does not correct for stale tokens at `staleness.max_versions` above 0. For studies of
    what it does."""
    aggregation: Aggregation = setting(Aggregation.token_mean)
    """How the losses of tokens become one number."""
    horizon: int | None = setting(None, POSITIVE)
    """Tokens by which the sum over an episode is divided, for `aggregation=constant_horizon` only. Null:
    `sampling.max_tokens`, the longest reply of one turn."""
    kl: KlConfig = section(KlConfig)
    entropy_coef: float = setting(0.0, NOT_NEGATIVE)
    """Coefficient of the entropy bonus."""
    imitation_coef: float = setting(0.0, NOT_NEGATIVE)
    """Coefficient μ of VAPO's imitation: of the mean −log π over the tokens of good samples."""
    imitation_above: float = setting(0.0)
    """Reward from the task above which a sample is good. For `imitation_coef` above 0 only."""
    reward: RewardShapingConfig = section(RewardShapingConfig)
    dynamic_sampling: bool = setting(False)
    """Reject groups whose rewards are all equal, and lease a fresh group in their place (DAPO)."""
    critic: CriticConfig = section(CriticConfig)
    gae: GaeConfig = section(GaeConfig)
    vtrace: VtraceConfig = section(VtraceConfig)
    prime: PrimeConfig = section(PrimeConfig)

    # ---- what the algorithm needs, and bears

    @property
    def surrogate_section(self) -> SurrogateConfig:
        """Parameters of the surrogate in use, and what it needs."""
        chosen: SurrogateConfig = getattr(self, self.surrogate)
        return chosen

    @property
    def correction_range(self) -> tuple[float, float]:
        """Floor and cap of the weight of the correction in use."""
        floor, cap = CORRECTION_RANGES[self.correction]
        return (
            floor if self.correction_floor is None else self.correction_floor,
            cap if self.correction_cap is None else self.correction_cap,
        )

    @property
    def needs_critic(self) -> bool:
        return self.advantage.needs_critic

    @property
    def needs_reward_model(self) -> bool:
        return self.advantage.needs_reward_model

    @property
    def needs_greedy_response(self) -> bool:
        return self.advantage.needs_greedy_response

    @property
    def needs_reference(self) -> bool:
        return self.kl.is_used or self.needs_reward_model

    @property
    def needs_whole_minibatch(self) -> bool:
        """True when the off-policy weight of a token depends on all tokens of its minibatch."""
        return self.normalize_weights or self.masks_second_moment

    @property
    def masks_second_moment(self) -> bool:
        """True when a mask over the minibatch keeps the second moment of log π/μ small, for the policy as it
        is now."""
        return self.surrogate_section.second_moment_threshold is not None

    @property
    def needs_proximal_beforehand(self) -> bool:
        """True when the proximal log-probabilities must be known before the first update, however many there
        are."""
        return self.needs_whole_minibatch or self.kl.reward_coef > 0 or self.advantage.corrects_itself

    @property
    def is_corrected(self) -> bool:
        """True when the loss weighs tokens because another policy sampled them."""
        if self.surrogate_section.corrects_itself or self.advantage.corrects_itself:
            return True
        if self.proximal is Proximal.behavior:
            return self.surrogate_section.bounds_ratio
        return self.correction is not Correction.none

    @property
    def max_shown_staleness(self) -> int:
        """Staleness in versions up to which this composition is known to learn; 0 without a correction."""
        return self.surrogate_section.max_shown_staleness if self.is_corrected else 0

    # ---- rules over several keys

    def conditions(self) -> list[Condition]:
        return [
            *self._unused_section_conditions(),
            *self._idle_key_conditions(),
            *self._correction_conditions(),
            *self._proximal_conditions(),
            *self._reward_conditions(),
        ]

    def _unused_section_conditions(self) -> list[Condition]:
        """Returns the rules that sections which play no part keep their defaults: a change of them meant
        something."""
        users = {
            name: (name in (self.surrogate, self.advantage), f"algo.surrogate={name}")
            for name in SURROGATE_NAMES
        } | {
            "critic": (self.needs_critic, "algo.advantage=gae or vtrace"),
            "gae": (self.advantage is Advantage.gae, "algo.advantage=gae"),
            "vtrace": (self.advantage is Advantage.vtrace, "algo.advantage=vtrace"),
            "prime": (self.needs_reward_model, "algo.advantage=prime"),
            "rejection": (self.rejection.is_used, "algo.rejection.estimator=k1, k2 or k3"),
        }
        conditions = []
        for name, (is_used, wanted) in users.items():
            part = getattr(self, name)
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                holds = is_used or value == field.default
                conditions.append(self._effect_condition(holds, f"algo.{name}.{field.name}", wanted, value))
        return conditions

    def _idle_key_conditions(self) -> list[Condition]:
        """Returns the rules that keys without effect keep their defaults."""
        weighs = self.correction is not Correction.none or self.rejection.is_used or self.masks_second_moment
        cap, floor, above = self.correction_cap, self.correction_floor, self.imitation_above
        return [
            self._effect_condition(
                cap is None or self.correction is not Correction.none,
                "algo.correction_cap", "a correction that has a cap", cap,
            ),
            self._effect_condition(
                floor is None or self.correction.drops,
                "algo.correction_floor", "a correction that drops what is below it", floor,
            ),
            self._effect_condition(
                weighs or not self.normalize_weights, "algo.normalize_weights", "weights other than 1", True
            ),
            self._effect_condition(
                above == 0 or self.imitation_coef > 0,
                "algo.imitation_above", "algo.imitation_coef above 0", above,
            ),
            Condition(
                self.horizon is None or self.aggregation is Aggregation.constant_horizon,
                "algo.horizon",
                "be set only with algo.aggregation=constant_horizon",
                f"{self.horizon} with {self.aggregation}",
            ),
        ]  # fmt: skip

    def _effect_condition(self, holds: bool, key: str, wanted: str, value: object) -> Condition:
        """Returns the rule that a key without effect is left alone."""
        got = (
            f"{show_value(value)} with algo.advantage={self.advantage}, algo.correction={self.correction} "
            f"and algo.surrogate={self.surrogate}"
        )
        return Condition(holds, key, f"not be set without {wanted}", got)

    def _correction_conditions(self) -> list[Condition]:
        """Returns the rules against correcting twice, and for a range that is one."""
        surrogate = self.surrogate_section
        floor, cap = self.correction_range
        return [
            Condition(
                not surrogate.corrects_itself or self.correction is Correction.none,
                "algo.correction",
                f"be none for algo.surrogate={self.surrogate} (it multiplies by π/μ itself)",
                self.correction,
            ),
            Condition(
                not self.advantage.corrects_itself or self.correction is Correction.none,
                "algo.correction",
                f"be none for algo.advantage={self.advantage} (its advantages already hold π/μ)",
                self.correction,
            ),
            Condition(
                not self.advantage.corrects_itself or not surrogate.corrects_itself,
                "algo.surrogate",
                f"not multiply by π/μ itself for algo.advantage={self.advantage} (its advantages already "
                "hold π/μ; ppo does not)",
                str(self.surrogate),
            ),
            Condition(
                floor < cap,
                "algo.correction_floor",
                "be below algo.correction_cap",
                f"{floor} and {cap}",
            ),
        ]

    def _proximal_conditions(self) -> list[Condition]:
        """Returns the rules of where the proximal log-probabilities may come from."""
        is_recomputed = self.proximal is Proximal.recompute
        is_loglinear = self.proximal is Proximal.loglinear
        return [
            Condition(
                self.surrogate_section.uses_proximal or not is_loglinear or self.rejection.is_used,
                "algo.proximal",
                f"not be loglinear for algo.surrogate={self.surrogate} (no proximal policy stands in it; "
                "behavior saves the forward pass for one)",
                self.proximal,
            ),
            Condition(
                self.proximal is not Proximal.behavior or not self.rejection.is_used,
                "algo.rejection.estimator",
                "be null for algo.proximal=behavior (the two policies it compares are one)",
                self.rejection.estimator,
            ),
            Condition(
                not (self.normalize_weights and is_loglinear),
                "algo.normalize_weights",
                "be false when algo.proximal=loglinear (each weight is known only in the loss of its own "
                "token; recompute works)",
                True,
            ),
            Condition(
                is_recomputed or not self.masks_second_moment,
                "algo.proximal",
                f"be recompute for algo.surrogate={self.surrogate} (its mask needs it)",
                self.proximal,
            ),
            Condition(
                is_recomputed or not self.advantage.corrects_itself,
                "algo.proximal",
                f"be recompute for algo.advantage={self.advantage} (its weights are π_p/μ, known beforehand)",
                self.proximal,
            ),
        ]

    def _reward_conditions(self) -> list[Condition]:
        """Returns the rules that a greedy baseline and the rewards that it is compared with stay as the task
        gives them."""
        return [
            Condition(
                not self.needs_greedy_response or not value,
                f"algo.reward.{name}",
                f"be off for algo.advantage={self.advantage} (its baseline is a reward as the task gives it)",
                value,
            )
            for name, value in (
                ("normalize", self.reward.normalize),
                ("overlong_share", self.reward.overlong_share),
            )
        ]
