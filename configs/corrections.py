"""`algo.correction` and `algo.rejection`: how a loss makes up for tokens that an older policy sampled."""

from dataclasses import dataclass
from enum import StrEnum

from configs.kl import Estimator
from configs.rules import POSITIVE
from configs.setting import Section, setting


class Correction(StrEnum):
    """Off-policy weight of tokens or sequences: proximal against behavior policy, r = π_p/μ
    (`algos/corrections.py`)."""

    none = "none"
    """Weight 1."""
    token_tis = "token_tis"
    """r of the token, truncated at the cap."""
    icepop = "icepop"
    """r of the token, and 0 outside floor and cap."""
    sequence_tis = "sequence_tis"
    """Product of r over the sequence, truncated at the cap."""
    sequence_mask = "sequence_mask"
    """1, and 0 for sequences whose product of r is outside floor and cap."""
    geometric_mask = "geometric_mask"
    """1, and 0 for sequences whose geometric mean of r is outside floor and cap."""

    @property
    def drops(self) -> bool:
        """True when weights below the floor or above the cap become 0, so that both ends count."""
        return self in (Correction.icepop, Correction.sequence_mask, Correction.geometric_mask)

    @property
    def truncates(self) -> bool:
        """True when weights above the cap become the cap."""
        return self in (Correction.token_tis, Correction.sequence_tis)


CORRECTION_RANGES = {
    Correction.none: (0.0, float("inf")),
    Correction.token_tis: (0.0, 2.0),
    Correction.icepop: (0.5, 5.0),
    Correction.sequence_tis: (0.0, 2.0),
    Correction.sequence_mask: (0.5, 2.0),
    Correction.geometric_mask: (0.99, 1.01),
}
"""Floor and cap of each correction's weight where the configuration says nothing."""


class Proximal(StrEnum):
    """Source of the proximal log-probabilities."""

    recompute = "recompute"
    """A forward pass at the start of the step: exact."""
    loglinear = "loglinear"
    """Interpolation between behavior and current policy by staleness: no forward pass."""
    behavior = "behavior"
    """The behavior policy's: two policies instead of three."""


class Level(StrEnum):
    """Unit that the rejection looks at, and drops."""

    token = "token"
    """Each token by itself."""
    sequence_sum = "sequence_sum"
    """The sum over a sequence."""
    sequence_mean = "sequence_mean"
    """The mean over a sequence."""
    sequence_max = "sequence_max"
    """The largest value in a sequence."""


@dataclass(kw_only=True, slots=True)
class RejectionConfig(Section):
    """Drops tokens, or sequences, whose estimated KL(μ ‖ π) is above a threshold."""

    estimator: Estimator | None = setting(None)
    """Estimator of the divergence. Null: nothing is dropped."""
    level: Level = setting(Level.token)
    """Unit that is compared with the threshold, and dropped."""
    threshold: float = setting(2.0, POSITIVE)
    """Estimated KL above which a token or sequence is dropped."""

    @property
    def is_used(self) -> bool:
        return self.estimator is not None
