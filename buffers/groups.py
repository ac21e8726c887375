"""Records of groups: an open or complete group, the groups that a step is handed, and a group's part in a
trained step."""

from dataclasses import dataclass, field

from buffers import events as e
from buffers.state import GroupState


@dataclass(slots=True)
class GroupRecord:
    """A group that may still be trained."""

    due: int
    """The step that the group is made for."""
    prompt: int = -1
    """Index of the prompt that the group asks."""
    attempts: set[int] = field(default_factory=set)
    """Leases of the group that are under way. A complete group has none."""
    content: e.Accepted | None = None
    """Where the rows of a complete group are; None while the group is open."""
    num_failures: int = 0
    """Failed attempts that count against `buffer.max_attempts`."""
    num_uses: int = 0
    """Steps that have trained the group."""


@dataclass(frozen=True, slots=True)
class Handout:
    """The groups that a step trains."""

    groups: list[int]
    """Numbers of the groups, in ascending order."""
    group_weights: list[float]
    """Importance weight of each group; empty when all are 1."""


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A group's part in a trained step. The buffer keeps it until no checkpoint can undo the step."""

    number: int
    group: GroupRecord
    num_trained: int
    """Tokens of the group that the step trained."""
    num_excluded: int
    """Sampled tokens of the group that were beyond the staleness bound."""
    is_first: bool
    """True when no step before had trained the group."""


def export_group(number: int, group: GroupRecord) -> GroupState:
    return GroupState(
        number,
        group.due,
        group.num_failures,
        group.num_uses,
        sorted(group.attempts),
        group.content,
        group.prompt,
    )


def restore_group(state: GroupState) -> GroupRecord:
    return GroupRecord(
        state.due, state.prompt, set(state.attempts), state.content, state.num_failures, state.num_uses
    )
