"""A group under way in a generator, and the rows that it becomes."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from buffers.messages import Lease
from buffers.trajectory import Trajectory
from generators.engine import Completion
from generators.episode import Opening
from generators.task import Score


@dataclass(slots=True)
class Group:
    """A lease being worked on."""

    lease: Lease
    opening: Opening
    started_at: float
    done: dict[int, Completion] = field(default_factory=dict)
    """Finished samples by index; beyond the lease's `num_samples` stands ReMax's greedy one."""

    def num_tokens(self, completions: Iterable[Completion]) -> int:
        """Sampled tokens of those that are the group's."""
        return sum(len(c.tokens) for c in completions if sample_of(c.id) < self.lease.num_samples)


def sample_seed(run_seed: int, split: str, group: int, sample: int) -> int:
    """The seed of one sample: the same for every attempt at the group, whoever makes it."""
    return xxhash.xxh32_intdigest(f"{run_seed}/{split}/{group}/{sample}".encode())


def trajectory(
    group: Group,
    sample: int,
    completion: Completion,
    score: Score,
    baseline: dict[str, float],
    generator: str,
) -> Trajectory:
    prompt = group.opening.tokens
    return Trajectory(
        group=group.lease.group,
        sample=sample,
        due=group.lease.due,
        prompt_id=group.lease.index,
        task=group.lease.task,
        tokens=[*prompt, *completion.tokens],
        sampled=[False] * len(prompt) + [True] * len(completion.tokens),
        logprobs=[0.0] * len(prompt) + completion.logprobs,
        versions=[-1] * len(prompt) + completion.versions,
        reward=score.reward,
        rewards=score.components | baseline,
        finish_reason=completion.finish_reason,
        generator=generator,
        started_at=group.started_at,
        finished_at=time.time(),
        experts=[] if completion.experts is None else completion.experts.reshape(-1),
    )


def lease_of(sample_id: str) -> int:
    return int(sample_id.partition("/")[0])


def sample_of(sample_id: str) -> int:
    return int(sample_id.partition("/")[2])
