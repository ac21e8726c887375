"""`placement`: the ranks that hold the critic."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import POSITIVE
from configs.setting import Section, setting


class CriticPlace(StrEnum):
    """Where a critic lives."""

    with_actor = "with_actor"
    """On the ranks of the policy. The two train one after the other."""
    own = "own"
    """On ranks of its own. The two train at the same time."""


@dataclass(kw_only=True, slots=True)
class PlacementConfig(Section):
    """The ranks that hold the critic."""

    critic: CriticPlace = setting(CriticPlace.with_actor)
    """Where a critic lives."""
    critic_ranks: int = setting(1, POSITIVE)
    """Ranks of a critic with `critic=own`."""
