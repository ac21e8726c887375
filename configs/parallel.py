"""`learner.fsdp`, `learner.megatron`, `learner.lora` and `learner.moe`: what one model of the learner
consists of."""

from dataclasses import dataclass
from enum import StrEnum

from configs.rules import NOT_NEGATIVE, POSITIVE
from configs.setting import Section, setting


class Accumulate(StrEnum):
    """How the FSDP engine adds up the gradients of several microbatches."""

    reduce = "reduce"
    """Shard the gradients after each microbatch."""
    whole = "whole"
    """Keep them unsharded on every rank, and shard them once an update: less to send, but 4 bytes for each
    trained parameter of the whole model, on each rank's GPU."""


class LoraPublish(StrEnum):
    """Part of a model with adapters that the learner publishes."""

    merged = "merged"
    """The whole model with the adapters merged in."""
    adapter = "adapter"
    """The adapters alone, which generators merge."""


@dataclass(kw_only=True, slots=True)
class FsdpConfig(Section):
    """The engine `learner.engine=fsdp`."""

    replicas: int = setting(1, POSITIVE)
    """Copies of the model (hybrid sharding): each is sharded over ranks / replicas ranks. 1: one copy over
    all ranks."""
    sequence_parallel: int = setting(1, POSITIVE)
    """Ranks that share the tokens of each microbatch, and in attention its heads (Ulysses, 2023). For long
    sequences."""
    cpu_offload: bool = setting(False)
    """Keep parameters, gradients and optimizer in the host's memory. The GPU holds the layer at work."""
    accumulate: Accumulate = setting(Accumulate.reduce)
    """How the gradients of several microbatches are added up."""
    compile: bool = setting(False)
    """Run `torch.compile` on each layer (GPU)."""
    liger: bool = setting(False)
    """Use Liger's fused norm, rope and SwiGLU kernels (GPU, extra `liger`)."""


@dataclass(kw_only=True, slots=True)
class MegatronConfig(Section):
    """The engine `learner.engine=megatron` (extra `megatron`).

    Ranks beyond tensor, pipeline and context parallelism are data parallel. The distributed optimizer is
    divided over context-parallel ranks too.
    """

    tensor_parallel: int = setting(1, POSITIVE)
    """Ranks that share each layer's matrices. Above 1 with Megatron's sequence parallelism."""
    pipeline_parallel: int = setting(1, POSITIVE)
    """Stages of the pipeline, each with a share of the layers."""
    context_parallel: int = setting(1, POSITIVE)
    """Ranks that share the tokens of each microbatch, and in attention its heads. For long sequences."""
    expert_parallel: int = setting(1, POSITIVE)
    """Ranks beyond tensor and pipeline parallelism that share the experts of a mixture."""

    @property
    def num_pieces(self) -> int:
        """Ranks that hold one model between them."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_share(self) -> int:
        """Ranks that train one part of a batch together."""
        return self.num_pieces * self.context_parallel


@dataclass(kw_only=True, slots=True)
class LoraConfig(Section):
    """Low-rank adaptation (Hu et al., 2021, arXiv 2106.09685) by peft: the model's matrices stay, adapters
    are trained."""

    rank: int | None = setting(None, POSITIVE)
    """Rank of the adapters. Null trains the whole model."""
    alpha: float = setting(32.0, POSITIVE)
    """Scale of the adapters: their product counts alpha / rank."""
    targets: str = setting("all-linear")
    """Matrices that are adapted: `all-linear`, or names divided by commas (`q_proj,v_proj`)."""
    publish: LoraPublish = setting(LoraPublish.merged)
    """Part of the model that the learner publishes."""


@dataclass(kw_only=True, slots=True)
class MoeConfig(Section):
    """Mixtures of experts, in either engine."""

    aux_loss_coefficient: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the auxiliary load-balancing loss (`learners/routing.py`: 1 a layer where the load is even),
    over all tokens of a minibatch. Above 0 each update runs forward once more, to count where the tokens
    go."""
    router_replay: bool = setting(False)
    """Send every token in training to the experts that the generator's routers chose for it (R3: Ma et al.,
    2025, arXiv 2510.11370). Each trajectory then records them; their weights are the trained router's.
    Without it, rounding makes some tokens choose other experts."""
