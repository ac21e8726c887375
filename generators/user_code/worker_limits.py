"""The bounds on the processes of a task's code."""

import resource
from dataclasses import dataclass

from configs.schema import Config

_DESCRIPTORS = 2
"""Open files for one worker: a socket and a pipe."""
_OTHER_DESCRIPTORS = 512
"""Open files that are left for everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """The settings of the section `episodes` that bound worker processes."""

    max_workers: int = 64
    memory_mb: int = 4096
    output_mb: int = 16
    start_timeout_s: float = 300.0

    @classmethod
    def from_config(cls, config: Config) -> "WorkerLimits":
        episodes = config.episodes
        return cls(
            max_workers=episodes.max_workers or config.max_episodes,
            memory_mb=episodes.worker_memory_mb,
            output_mb=episodes.worker_output_mb,
            start_timeout_s=episodes.start_timeout_s,
        )


def raise_descriptor_limit(max_workers: int) -> None:
    """Lets this process open the descriptors that so many workers need. Raises ValueError when the host's
    hard limit forbids it."""
    needed = max_workers * _DESCRIPTORS + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = (hard - _OTHER_DESCRIPTORS) // _DESCRIPTORS
        raise ValueError(
            f"episodes.max_workers must be at most {most} here (this host allows {hard} open files), "
            f"got {max_workers}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
