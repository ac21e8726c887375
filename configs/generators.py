"""`generators`: the engines that sample."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE, above_up_to, gpu_share
from configs.setting import Section, section, setting


class EngineKind(StrEnum):
    """The inference engine of a generator."""

    vllm = "vllm"
    """vLLM, on a GPU or a CPU."""
    transformers = "transformers"
    """transformers' continuous batching, for architectures that vLLM lacks."""
    simulated = "simulated"
    """Keeps time like a real engine and samples nothing. For benchmarks of overlap."""


@dataclass(kw_only=True, slots=True)
class SimulatedConfig(Section):
    """The simulated engine and learner, which keep time like real ones and use no CPU. For benchmarks of
    overlap."""

    tokens_per_s: float = setting(100.0, POSITIVE)
    """Tokens that one sequence decodes a second."""
    slots: int = setting(16, POSITIVE)
    """Sequences that one engine decodes at a time."""
    mean_tokens: float = setting(100.0, POSITIVE)
    """Mean response length in tokens. Lengths are lognormal, truncated at 8 × the mean."""
    cv: float = setting(0.5, NOT_NEGATIVE)
    """Coefficient of variation of the response length."""
    train_tokens_per_s: float = setting(3200.0, POSITIVE)
    """Sampled tokens that the simulated learner trains a second."""


@dataclass(kw_only=True, slots=True)
class GeneratorsConfig(Section):
    """The engines that sample."""

    count: int = setting(2, NOT_NEGATIVE)
    """Generators that this command starts. Others may join a run at any time (`role=generators`)."""
    engine: EngineKind = setting(EngineKind.vllm)
    """The inference engine."""
    max_sequences: int = setting(256, POSITIVE)
    """Sequences in flight in one engine. Must hold a whole group of `learner.samples_per_prompt`."""
    max_model_len: int = setting(64, POSITIVE)
    """Longest prompt and response together that an engine takes, in tokens."""
    kv_cache_mb: int | None = setting(None, POSITIVE)
    """KV cache of one engine, in MB. Null: 64 on a CPU; on a GPU what its part of the memory leaves."""
    prefix_cache: bool = setting(False)
    """Reuse the KV of shared prompts. The cache is salted with the version, so no request reads another
    version's KV."""
    max_restarts: int = setting(5, NOT_NEGATIVE)
    """Crashes of one generator after which the run stops. Before that it is started again."""
    grace_s: float = setting(20.0, NOT_NEGATIVE)
    """Seconds that a generator has after SIGTERM to hand in the groups that it has begun. The others are
    leased again at once. 0: it leaves at once. Spot hosts mostly give 30 s."""
    gpus: float | None = setting(None, gpu_share(most=1024))
    """GPUs of one engine. Null divides those of the driver's host between generators and learner
    (docs/learner.md). 0: the CPU."""
    tensor_parallel: int = setting(1, POSITIVE)
    """GPUs (on a CPU: processes) that share each layer's matrices in one engine. `generators.gpus` counts them
    all."""
    gpu_memory_fraction: float | None = setting(None, above_up_to(0, 1))
    """Share of its GPU's memory that an engine may take. Null: 0.9, or an even part of it where others share
    the GPU."""
    simulated: SimulatedConfig = section(SimulatedConfig)
