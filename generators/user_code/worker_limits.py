"""The bounds on the processes of a task's code."""

import resource
import sys
from dataclasses import dataclass

from configs.schema import Config

_DESCRIPTORS = 2
"""Open files for one worker: a socket and a pipe."""
_OTHER_DESCRIPTORS = 512
"""Open files that are left for everything else."""
_CONNECTIONS = 8
"""Connections to the gateway for one agent, which may ask side by side."""


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
    needed = count_descriptors(max_workers)
    hard = _raise_soft_limit(needed)
    if hard < needed:
        most = (hard - _OTHER_DESCRIPTORS) // _DESCRIPTORS
        raise ValueError(
            f"episodes.max_workers must be at most {most} here (this host allows {hard} open files), "
            f"got {max_workers}"
        )


def claim_connections(num_episodes: int, max_workers: int) -> int:
    """Lets this process open the connections of so many agents, beside its workers; returns how many there
    may be. Raises ValueError when the host's hard limit leaves less than one for each agent."""
    held, wanted = count_descriptors(max_workers), num_episodes * _CONNECTIONS
    hard = _raise_soft_limit(held + wanted)
    if hard < held + num_episodes:
        raise ValueError(
            f"episodes.max_concurrent must be at most {max(0, hard - held)} for agents here (this host "
            f"allows {hard} open files, of which {held} are for workers and the rest of the generator), "
            f"got {num_episodes}"
        )
    return min(wanted, hard - held)


def count_descriptors(max_workers: int) -> int:
    return max_workers * _DESCRIPTORS + _OTHER_DESCRIPTORS


def _raise_soft_limit(needed: int) -> int:
    """Raises the soft limit as far as it goes and is needed; returns the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < min(needed, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), hard))
    return most
