"""`learner`: what trains, how a batch is divided, and the optimizer."""

from dataclasses import dataclass
from enum import StrEnum

from configs.parallel import FsdpConfig, LoraConfig, MegatronConfig, MoeConfig
from configs.rules import NOT_NEGATIVE, POSITIVE, SHARE, Rule, above_up_to, gpu_share
from configs.setting import Condition, Section, section, setting

ADAM_BETAS = (0.9, 0.99)
"""Decay of AdamW's first and second moment, unless `learner.betas` says otherwise."""

BETAS = Rule("two numbers in [0, 1)", lambda values: len(values) == 2 and all(0 <= b < 1 for b in values))


class LearnerKind(StrEnum):
    """The training engine."""

    fsdp = "fsdp"
    """FSDP2 over a Hugging Face model."""
    megatron = "megatron"
    """Megatron-core (extra `megatron`)."""
    simulated = "simulated"
    """Keeps time like a real learner and trains nothing. For benchmarks of overlap."""


class Attention(StrEnum):
    """The attention kernel of the FSDP engine, over packed sequences."""

    auto = "auto"
    """`flash_attention_2` where a GPU and flash-attn exist, `varlen` on other GPUs (not for a model that caps
    its attention scores), else `packed_sdpa`."""
    packed_sdpa = "packed_sdpa"
    """PyTorch's scaled dot product. Runs everywhere."""
    varlen = "varlen"
    """PyTorch's kernel for sequences of different lengths. GPU only."""
    flash_attention_2 = "flash_attention_2"
    """The package flash-attn. GPU only."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig(Section):
    """The training engine, the division of a batch, and the optimizer."""

    engine: LearnerKind = setting(LearnerKind.fsdp)
    """The training engine."""
    ranks: int = setting(1, POSITIVE)
    """Processes that share the model. One GPU each where there are GPUs."""
    fsdp: FsdpConfig = section(FsdpConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    lora: LoraConfig = section(LoraConfig)
    moe: MoeConfig = section(MoeConfig)
    interface: str | None = setting(None)
    """Network interface over which ranks on several hosts talk (gloo, NCCL), such as `eth1`; each host must
    have it. Null: on each host the one over which it reaches the first rank's host."""
    max_restarts: int = setting(3, NOT_NEGATIVE)
    """Lost ranks after which the run stops. Before that the learner goes on from its newest checkpoint."""
    groups_per_step: int = setting(64, POSITIVE)
    """Groups that one step consumes (B)."""
    samples_per_prompt: int = setting(8, POSITIVE)
    """Episodes in a group. Each is one trajectory, or several where its context was rewritten."""
    minibatches: int = setting(1, POSITIVE)
    """Optimizer updates in a step. Must divide `groups_per_step`."""
    tokens_per_microbatch: int = setting(16384, POSITIVE)
    """Packed tokens that one forward pass holds at most, or one longer branch of an episode. A longer
    episode is cut between its branches."""
    lr: float = setting(2e-4, POSITIVE)
    """Peak learning rate of AdamW. The default is for the tiny model; 1e-6 to 1e-5 is usual for whole
    pretrained models."""
    warmup_steps: int = setting(10, NOT_NEGATIVE)
    """Steps over which the learning rate rises linearly from zero."""
    lr_end: float = setting(0.1, SHARE)
    """Share of `lr` that is left after `decay_steps`. 1: the rate does not fall."""
    decay_steps: int | None = setting(None, POSITIVE)
    """Steps, counted from the first, over which the rate falls linearly once it has risen. Null: the
    `run.steps` that the run began with, also where the run is continued to more steps."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay of AdamW."""
    betas: list[float] = setting(list(ADAM_BETAS), BETAS)
    """Decay of AdamW's first and second moment."""
    max_grad_norm: float = setting(1.0, POSITIVE)
    """Norm to which a larger gradient is scaled down."""
    activation_checkpointing: bool = setting(False)
    """Compute activations again in the backward pass instead of keeping them: less memory, and one more
    forward pass."""
    attention: Attention = setting(Attention.auto)
    """Attention kernel of the FSDP engine."""
    threads: int | None = setting(1, POSITIVE)
    """CPU threads of a rank. Null leaves the choice to torch. On a machine that generators share, one is
    fastest: threads that spin while they wait take the cores from the engines."""
    checkpoint_every: int = setting(50, POSITIVE)
    """Steps between checkpoints. The learner also writes one at the end and when a run is stopped."""
    keep_checkpoints: int = setting(2, POSITIVE)
    """Checkpoints kept. Older ones are deleted."""
    parity_tolerance: float | None = setting(None, POSITIVE)
    """Largest difference of a token's log-probability between generator and learner that counts as rounding.
    The mean must be below a tenth of it (`learners/parity.py`). Null: 1e-3 for float32, 1 for bfloat16, over
    the sampling temperature where that is below 1."""
    parity_every: int = setting(50, NOT_NEGATIVE)
    """Steps between parity probes of an asynchronous run. The learner waits for each as long as an engine
    takes to sample 32 tokens. 0: only before the first step. At S = 0 every step compares its own tokens."""
    gpus: float | None = setting(None, gpu_share(most=1))
    """GPUs of one rank. Null divides those of the driver's host between generators and learner
    (docs/learner.md). 0: the CPU."""
    gpu_memory_fraction: float | None = setting(None, above_up_to(0, 1))
    """Share of its GPU's memory that a rank may take. Null: all, or an even part of 0.9 where engines share
    the GPU."""

    @property
    def num_shares(self) -> int:
        """Number of parts that a batch is divided into. Ranks that hold pieces of one model train one part
        together."""
        if self.engine is LearnerKind.megatron:
            return self.ranks // self.megatron.ranks_per_share
        return self.ranks // self.fsdp.sequence_parallel

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.groups_per_step % self.minibatches == 0,
                "learner.minibatches",
                "divide learner.groups_per_step",
                f"{self.minibatches} and {self.groups_per_step}",
            ),
            *self._fsdp_conditions(),
            *self._megatron_conditions(),
        ]

    def _fsdp_conditions(self) -> list[Condition]:
        """Returns the rules of the FSDP engine. What only this engine heeds must be left alone with
        another."""
        is_fsdp = self.engine is LearnerKind.fsdp
        return [
            Condition(
                is_fsdp or self.fsdp == FsdpConfig(),
                "learner.fsdp",
                "be left alone unless learner.engine=fsdp",
                f"{self.fsdp} with {self.engine}",
            ),
            Condition(
                is_fsdp or self.lora.rank is None,
                "learner.lora.rank",
                "be null unless learner.engine=fsdp",
                f"{self.lora.rank} with {self.engine}",
            ),
            Condition(
                is_fsdp or self.attention is Attention.auto,
                "learner.attention",
                "be auto unless learner.engine=fsdp",
                f"{self.attention} with {self.engine}",
            ),
            Condition(
                self.lora.rank is not None or self.lora == LoraConfig(),
                "learner.lora.rank",
                "be set where other settings of learner.lora are",
                f"null with {self.lora}",
            ),
            Condition(
                self.ranks % self.fsdp.replicas == 0,
                "learner.fsdp.replicas",
                "divide learner.ranks",
                f"{self.fsdp.replicas} and {self.ranks}",
            ),
            Condition(
                self.ranks % self.fsdp.sequence_parallel == 0,
                "learner.fsdp.sequence_parallel",
                "divide learner.ranks",
                f"{self.fsdp.sequence_parallel} and {self.ranks}",
            ),
        ]

    def _megatron_conditions(self) -> list[Condition]:
        """Returns the rules of the Megatron engine. What only this engine heeds must be left alone with
        another."""
        megatron = self.megatron
        pieces = megatron.num_pieces
        return [
            Condition(
                self.engine is LearnerKind.megatron or megatron == MegatronConfig(),
                "learner.megatron",
                "be left alone unless learner.engine=megatron",
                f"{megatron} with {self.engine}",
            ),
            Condition(
                not (self.moe.router_replay and self.activation_checkpointing)
                or megatron.pipeline_parallel == 1,
                "learner.moe.router_replay",
                "be false with learner.activation_checkpointing and learner.megatron.pipeline_parallel > 1",
                f"true with {megatron.pipeline_parallel}",
            ),
            Condition(
                self.ranks % megatron.ranks_per_share == 0,
                "learner.megatron.tensor_parallel × pipeline_parallel × context_parallel",
                "divide learner.ranks",
                f"{megatron.tensor_parallel} × {megatron.pipeline_parallel} × {megatron.context_parallel} "
                f"and {self.ranks}",
            ),
            Condition(
                self.ranks % pieces != 0 or self.ranks // pieces % megatron.expert_parallel == 0,
                "learner.megatron.expert_parallel",
                "divide the data- and context-parallel ranks (learner.ranks / (tensor_parallel × "
                "pipeline_parallel))",
                f"{megatron.expert_parallel} and {self.ranks // pieces}",
            ),
        ]
