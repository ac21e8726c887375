"""The transport of a run that names none.

On the learner's host weights travel through its memory, or its GPU where an engine shares it; over TCP
elsewhere.
"""

from pathlib import Path

from configs.generators import EngineKind
from configs.placement import PlacementMode
from configs.schema import Config
from sync.transports import cuda_ipc, tcp
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    ends = tcp.open_learner_ends(config, folder, guards)
    # A model that leaves its GPU's memory to others publishes no copy there: engines take the host's. Only
    # vLLM copies from one GPU's memory to its own.
    leaves = config.learner.fsdp.cpu_offload or config.placement.mode is PlacementMode.colocated
    if not leaves and config.generators.engine is EngineKind.vllm:
        ends += cuda_ipc.open_learner_ends(config, folder, guards)
    return ends


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    end = tcp.open_generator_end(config, folder, guards)
    # An engine of several GPUs shares none, and takes its parts from the host's memory. One that sleeps can
    # receive nothing on its GPU.
    is_colocated = config.placement.mode is PlacementMode.colocated
    return end if is_colocated or config.generators.tensor_parallel > 1 else cuda_ipc.SharedGpuEnd(end)
