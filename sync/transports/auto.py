"""The transport of a run that names none.

On the learner's host weights travel through its memory, or its GPU where an engine shares it; over TCP
elsewhere.
"""

from pathlib import Path

from configs.generators import EngineKind
from configs.schema import Config
from sync.transports import cuda_ipc, tcp
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    ends = tcp.open_learner_ends(config, folder, guards)
    # An offloaded model leaves its GPU's memory to others: engines take the host's copy.
    # Only vLLM copies from one GPU's memory to its own.
    if not config.learner.fsdp.cpu_offload and config.generators.engine is EngineKind.vllm:
        ends += cuda_ipc.open_learner_ends(config, folder, guards)
    return ends


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    end = tcp.open_generator_end(config, folder, guards)
    # An engine of several GPUs shares none, and takes its parts from the host's memory.
    return end if config.generators.tensor_parallel > 1 else cuda_ipc.SharedGpuEnd(end)
