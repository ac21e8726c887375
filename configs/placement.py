"""`placement`: the nodes that hold the roles, and the ranks that hold the critic."""

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


class PlacementStrategy(StrEnum):
    """The order in which engines fill the nodes of a Ray cluster, among places that are equally free."""

    pack = "pack"
    """One node after the other, the driver's first."""
    spread = "spread"
    """The node with the fewest engines first."""


class PlacementMode(StrEnum):
    """How learner and engines divide the GPUs."""

    apart = "apart"
    """Each has GPUs, or parts of GPUs, of its own, and all work at the same time."""
    colocated = "colocated"
    """They share the same GPUs and take turns: the learner has them from a batch to the publication, the
    engines otherwise. docs/learner.md says when to choose it."""


@dataclass(kw_only=True, slots=True)
class PlacementConfig(Section):
    """The nodes of a Ray cluster that hold the roles, and the ranks that hold the critic."""

    mode: PlacementMode = setting(PlacementMode.apart)
    """How learner and engines divide the GPUs."""
    learner: dict[str, str] = setting({})
    """Labels (`ray start --labels=KEY=VALUE`) of the nodes that may hold ranks of the learner. Empty: any
    node; all on one if it has room for them, the driver's before others."""
    generators: dict[str, str] = setting({})
    """Labels of the nodes that may hold generators and evaluators. Empty: any node."""
    strategy: PlacementStrategy = setting(PlacementStrategy.pack)
    """The order in which engines fill the nodes, among places that are equally free."""
    critic: CriticPlace = setting(CriticPlace.with_actor)
    """Where a critic lives."""
    critic_ranks: int = setting(1, POSITIVE)
    """Ranks of a critic with `critic=own`."""
