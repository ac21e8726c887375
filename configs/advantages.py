"""`algo.advantage`, and the sections of the advantages that have parameters: `gae`, `vtrace`, `prime`, and
`critic`."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE, SHARE
from configs.setting import Section, setting


class Advantage(StrEnum):
    """How rewards become the advantages of tokens, and what each way needs."""

    grpo = "grpo"
    """Reward less its group's mean, over the group's standard deviation."""
    dr_grpo = "dr_grpo"
    """Reward less its group's mean."""
    rloo = "rloo"
    """Reward less the mean of the group's other samples."""
    reinforce_pp = "reinforce_pp"
    """Return of each token, whitened over the batch."""
    reinforce_pp_baseline = "reinforce_pp_baseline"
    """Return of each token less its group's mean reward, whitened over the batch."""
    remax = "remax"
    """Reward less that of the greedy response."""
    opmd = "opmd"
    """Reward less a soft baseline of its group."""
    gae = "gae"
    """Generalized advantage estimation, with a critic."""
    vtrace = "vtrace"
    """V-trace, with a critic: corrected along the sequence."""
    prime = "prime"
    """Leave-one-out outcome reward, and process rewards of an implicit reward model."""

    @property
    def needs_critic(self) -> bool:
        return self in (Advantage.gae, Advantage.vtrace)

    @property
    def needs_groups(self) -> bool:
        """True when the samples of a prompt are compared, so that a group of one teaches nothing."""
        return self not in (Advantage.reinforce_pp, Advantage.remax, Advantage.gae, Advantage.vtrace)

    @property
    def needs_greedy_response(self) -> bool:
        """True when generators make a greedy response with every group, whose reward is the baseline."""
        return self is Advantage.remax

    @property
    def needs_reward_model(self) -> bool:
        """True when the learner trains an implicit process reward model, which also takes a reference
        policy."""
        return self is Advantage.prime

    @property
    def corrects_itself(self) -> bool:
        """True when the advantages already hold π_p/μ, so the loss must not weigh tokens by a ratio to μ
        again."""
        return self is Advantage.vtrace


class Span(StrEnum):
    """Size of one action in generalized advantage estimation."""

    token = "token"
    """A token."""
    turn = "turn"
    """A turn: the tokens that are sampled without a break."""


@dataclass(kw_only=True, slots=True)
class CriticConfig(Section):
    """The value model: a copy of the policy's model with a head of one number, with its own weights and
    optimizer."""

    path: str | None = setting(None)
    """Folder of the model that the critic starts from. Null: `model.path`."""
    lr: float = setting(1e-3, POSITIVE)
    """Peak learning rate of the critic."""
    clip: float | None = setting(0.2, POSITIVE)
    """Distance of a value from the one at the start of the step beyond which its loss is clipped. Null: no
    clip."""
    pretrain_steps: int = setting(0, NOT_NEGATIVE)
    """First steps of the run in which the critic alone is trained."""


@dataclass(kw_only=True, slots=True)
class GaeConfig(Section):
    """Generalized advantage estimation (Schulman et al., 2015, arXiv 1506.02438)."""

    gamma: float = setting(1.0, SHARE)
    """Discount γ."""
    lam: float = setting(0.95, SHARE)
    """Decay λ of the advantages."""
    critic_lam: float = setting(0.95, SHARE)
    """Decay λ of the returns that the critic learns. 1: the whole return, whatever the critic says."""
    length_alpha: float | None = setting(None, POSITIVE)
    """Factor α of VAPO's length-adaptive λ = 1 − 1 / (α · length), which replaces `lam`. Null: `lam`."""
    span: Span = setting(Span.token)
    """Size of one action."""
    whiten: bool = setting(True)
    """Bring advantages to mean 0 and deviation 1 over the trained tokens of the batch."""


@dataclass(kw_only=True, slots=True)
class VtraceConfig(Section):
    """V-trace (IMPALA; Espeholt et al., 2018, arXiv 1802.01561)."""

    gamma: float = setting(1.0, SHARE)
    """Discount γ."""
    lam: float = setting(1.0, SHARE)
    """Decay λ of the traces."""
    rho_bar: float = setting(1.0, POSITIVE)
    """Value at which a token's π/μ is truncated (ρ̄)."""
    c_bar: float = setting(1.0, POSITIVE)
    """Value at which π/μ is truncated in the traces (c̄)."""


@dataclass(kw_only=True, slots=True)
class PrimeConfig(Section):
    """The implicit process reward model of PRIME (Cui et al., 2025, arXiv 2502.01456), which learns from
    outcomes alone."""

    beta: float = setting(0.05, POSITIVE)
    """Scale β of a token's reward: r_t = β log π_φ / π_ref."""
    lr: float = setting(1e-4, POSITIVE)
    """Peak learning rate of the reward model."""
    gamma: float = setting(1.0, SHARE)
    """Discount γ of the process rewards."""
