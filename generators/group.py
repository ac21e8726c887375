"""A group that a generator samples, and the trajectory rows that it becomes."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from buffers.messages import Lease
from buffers.trajectory import Trajectory
from generators.engine import Completion
from generators.episode import EncodedPrompt
from generators.task import Score


@dataclass(slots=True)
class SampledGroup:
    """A lease, its prompt, and the samples of it that are finished."""

    lease: Lease
    prompt: EncodedPrompt
    started_at: float
    """Unix time in seconds."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """Finished samples by index. The index `lease.num_samples` is ReMax's greedy sample, which is not
    trained."""

    def is_trained(self, sample_id: str) -> bool:
        """True for the group's own samples, false for ReMax's greedy one."""
        return parse_sample_index(sample_id) < self.lease.num_samples

    def count_tokens(self, completions: Iterable[Completion]) -> int:
        """Returns the sampled tokens of those completions that are trained."""
        return sum(len(completion.tokens) for completion in completions if self.is_trained(completion.id))

    def list_completions(self) -> list[Completion]:
        """Returns the completions of a group that is whole, in the order of their index."""
        return [self.completions[index] for index in range(len(self.completions))]


def make_sample_id(lease_id: int, index: int) -> str:
    return f"{lease_id}/{index}"


def parse_lease_id(sample_id: str) -> int:
    return int(sample_id.partition("/")[0])


def parse_sample_index(sample_id: str) -> int:
    return int(sample_id.partition("/")[2])


def make_sample_seed(run_seed: int, split: str, group: int, index: int) -> int:
    """Returns the seed of one sample: the same for every attempt at the group, in any generator."""
    return xxhash.xxh32_intdigest(f"{run_seed}/{split}/{group}/{index}".encode())


def make_trajectory(
    group: SampledGroup,
    index: int,
    completion: Completion,
    score: Score,
    baseline: dict[str, float],
    generator: str,
) -> Trajectory:
    """Returns the row of a finished and scored sample. `baseline` holds ReMax's greedy reward by its name;
    else it is empty."""
    prompt = group.prompt.tokens
    return Trajectory(
        group=group.lease.group,
        sample=index,
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
