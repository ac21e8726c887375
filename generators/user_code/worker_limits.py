"""The bounds on the processes of a task's code."""

from dataclasses import dataclass

from configs.schema import Config


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
