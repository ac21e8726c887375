"""`generators`: the engines that sample."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE, above_up_to, gpu_share
from configs.setting import Condition, Section, section, setting


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
    """KV cache of one engine, in MB (on each of its GPUs, where it has several). Null: 64 on a CPU; on a GPU
    what its part of the memory leaves."""
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
    (docs/learner.md), and gives an engine of several as many as `generators.tensor_parallel` says. 0: the
    CPU."""
    tensor_parallel: int = setting(1, POSITIVE)
    """GPUs of one node (on a CPU: processes) that share each layer's matrices in one engine
    (docs/big-engines.md). It must divide the model's attention heads."""
    gpu_memory_fraction: float | None = setting(None, above_up_to(0, 1))
    """Share of its GPU's memory that an engine may take (of each, where it has several). Null: 0.9, or an
    even part of it where others share the GPU."""
    simulated: SimulatedConfig = section(SimulatedConfig)

    def conditions(self) -> list[Condition]:
        is_parallel = self.tensor_parallel > 1
        return [
            Condition(
                not is_parallel or self.engine is EngineKind.vllm,
                "generators.tensor_parallel",
                "be 1 unless generators.engine=vllm",
                f"{self.tensor_parallel} with {self.engine}",
            ),
            Condition(
                self.gpus is None
                or (self.gpus in (0, self.tensor_parallel) if is_parallel else self.gpus <= 1),
                "generators.gpus",
                "be null, 0 or generators.tensor_parallel, or a part of one GPU where that is 1 (an engine "
                "uses as many GPUs as share its matrices)",
                f"{self.gpus} with {self.tensor_parallel}",
            ),
        ]
