"""The transport of a run that names none.

On the learner's host weights travel through its memory, or its GPU where an engine shares it; over TCP
elsewhere.
"""

from pathlib import Path

from configs.placement import PlacementMode
from configs.schema import Config
from sync.transports import cuda_ipc, tcp
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    ends = tcp.open_learner_ends(config, folder, guards)
    # A model that leaves its GPU's memory to others publishes no copy there: engines take the host's.
    if not config.learner.fsdp.cpu_offload and config.placement.mode is PlacementMode.apart:
        ends += cuda_ipc.open_learner_ends(config, folder, guards)
    return ends


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    end = tcp.open_generator_end(config, folder, guards)
    return end if config.placement.mode is PlacementMode.colocated else cuda_ipc.SharedGpuEnd(end)
