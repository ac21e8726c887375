"""The learner's settings: what trains, how it is divided over ranks, and what it costs in memory."""

from dataclasses import dataclass, field
from enum import StrEnum

from configs.rules import gpu_share, not_negative, positive, within_one


class LearnerKind(StrEnum):
    fsdp = "fsdp"
    megatron = "megatron"
    simulated = "simulated"


class Attention(StrEnum):
    auto = "auto"
    packed_sdpa = "packed_sdpa"
    varlen = "varlen"
    flash_attention_2 = "flash_attention_2"


class Accumulate(StrEnum):
    reduce = "reduce"
    whole = "whole"


class LoraPublish(StrEnum):
    merged = "merged"
    adapter = "adapter"


class CriticPlace(StrEnum):
    with_actor = "with_actor"
    own = "own"


@dataclass(kw_only=True, slots=True)
class FsdpConfig:
    """`learner.engine=fsdp`."""

    replicas: int = 1
    """Hybrid sharding: the model is sharded over ranks / replicas ranks, and held `replicas` times. 1: over all ranks."""
    sequence_parallel: int = 1
    """Ulysses (2023): so many ranks share the tokens of each microbatch, and in attention its heads: for long sequences."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live in the host's memory; the GPU holds the layer at work."""
    accumulate: Accumulate = Accumulate.reduce
    """Gradients of several microbatches: `reduce` shards them after each one; `whole` keeps them unsharded on every rank, and shards
    them once an update: less to send, but 4 bytes for each trained parameter of the whole model, on each rank's GPU."""
    compile: bool = False
    """`torch.compile` of each layer (GPU)."""
    liger: bool = False
    """Liger's fused norm, rope and SwiGLU kernels (GPU, extra `liger`)."""

    def problems(self) -> list[str]:
        return positive(
            **{
                "learner.fsdp.replicas": self.replicas,
                "learner.fsdp.sequence_parallel": self.sequence_parallel,
            }
        )


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    """`learner.engine=megatron` (extra `megatron`). What the three leave of `learner.ranks` is data parallel, with the distributed
    optimizer."""

    tensor_parallel: int = 1
    """Ranks that share each layer's matrices; above 1 with Megatron's sequence parallelism."""
    pipeline_parallel: int = 1
    """Stages, each with a share of the layers."""
    expert_parallel: int = 1
    """Data-parallel ranks that share the experts of a mixture."""

    def problems(self) -> list[str]:
        return positive(
            **{
                "learner.megatron.tensor_parallel": self.tensor_parallel,
                "learner.megatron.pipeline_parallel": self.pipeline_parallel,
                "learner.megatron.expert_parallel": self.expert_parallel,
            }
        )


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adaptation (Hu et al., 2021) by peft: the policy's matrices stay as they are, and adapters are trained."""

    rank: int | None = None
    """Rank of the adapters; None trains the whole model."""
    alpha: float = 32.0
    """The adapter's product counts alpha / rank."""
    targets: str = "all-linear"
    """Which matrices are adapted: `all-linear`, or names divided by commas (`q_proj,v_proj`)."""
    publish: LoraPublish = LoraPublish.merged
    """What is published: the whole model with the adapters merged in, or the adapters alone, which generators merge."""

    def problems(self) -> list[str]:
        return positive(**{"learner.lora.rank": self.rank, "learner.lora.alpha": self.alpha})


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """Mixtures of experts, in either engine."""

    aux_loss_coefficient: float = 0.0
    """Weight of the auxiliary load-balancing loss (`learners/routing.py`: 1 a layer where the load is even), over all tokens of a
    minibatch. Above 0 each update runs forward once more, to count where they go."""

    router_replay: bool = False
    """Training sends every token to the experts that the generator's routers chose for it (R3: Ma et al., 2025, arXiv 2510.11370), which
    each trajectory then records; their weights are the trained router's. Otherwise rounding makes some tokens choose others."""

    def problems(self) -> list[str]:
        return not_negative(**{"learner.moe.aux_loss_coefficient": self.aux_loss_coefficient})


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    critic: CriticPlace = CriticPlace.with_actor
    """Where a critic lives: on the ranks of the policy, which train one after the other, or on ranks of its own, at the same time."""
    critic_ranks: int = 1
    """`own` only: how many."""

    def problems(self) -> list[str]:
        return positive(**{"placement.critic_ranks": self.critic_ranks})


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    engine: LearnerKind = LearnerKind.fsdp
    ranks: int = 1
    """Processes that share the model; one GPU each where there are GPUs."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    max_restarts: int = 3
    """How often the learner may lose a rank and go on from its newest checkpoint before the run stops."""
    groups_per_step: int = 64
    """B: groups that one step consumes."""
    samples_per_prompt: int = 8
    """Trajectories in a group."""
    minibatches: int = 1
    """Optimizer updates in a step; must divide `groups_per_step`."""
    tokens_per_microbatch: int = 16384
    """Packed tokens that one forward pass holds at most; a longer sequence goes alone."""
    lr: float = 2e-4
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from zero."""
    lr_end: float = 0.1
    """Share of `lr` that is left after `decay_steps`; 1: it does not fall."""
    decay_steps: int | None = None
    """Steps, counted from the first, over which it falls linearly, once it has risen. None: the `run.steps` that the run began with, also
    where it goes on to more."""
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    max_grad_norm: float = 1.0
    activation_checkpointing: bool = False
    attention: Attention = Attention.auto
    """`auto`: `flash_attention_2` where a GPU and flash-attn are found, `varlen` on other GPUs (not for a model that
    caps its attention scores), else `packed_sdpa`."""
    threads: int | None = 1
    """CPU threads of a rank; None leaves the choice to torch. On a machine that generators share, one is fastest: threads
    that spin while they wait take the cores from the engines."""
    checkpoint_every: int = 50
    """Steps between checkpoints; one is also written at the end and when a run is stopped."""
    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are deleted."""
    parity_tolerance: float | None = None
    """Largest difference of a token's log-probability between generator and learner that counts as rounding; the mean must be below a
    tenth of it (`learners/parity.py`). None: 1e-3 for float32, 1 for bfloat16, over the sampling temperature where that is below 1."""
    parity_every: int = 50
    """Steps between parity probes of an asynchronous run, for which the learner waits as long as an engine takes to sample 32 tokens;
    0: only before the first step. At S = 0 every step compares its own tokens."""
    gpus: float | None = None
    """GPUs of one rank; None divides what the driver's host has between generators and learner (docs/learner.md); 0: the CPU."""
    gpu_memory_fraction: float | None = None
    """Share of its GPU's memory that a rank may take. None: all, or an even part of 0.9 where engines share the GPU."""

    def problems(self) -> list[str]:
        found = positive(
            **{
                "learner.ranks": self.ranks,
                "learner.groups_per_step": self.groups_per_step,
                "learner.samples_per_prompt": self.samples_per_prompt,
                "learner.minibatches": self.minibatches,
                "learner.tokens_per_microbatch": self.tokens_per_microbatch,
                "learner.lr": self.lr,
                "learner.decay_steps": self.decay_steps,
                "learner.max_grad_norm": self.max_grad_norm,
                "learner.threads": self.threads,
                "learner.checkpoint_every": self.checkpoint_every,
                "learner.keep_checkpoints": self.keep_checkpoints,
                "learner.parity_tolerance": self.parity_tolerance,
                "learner.gpu_memory_fraction": self.gpu_memory_fraction,
            }
        )
        found += within_one(
            **{"learner.gpu_memory_fraction": self.gpu_memory_fraction, "learner.lr_end": self.lr_end}
        )
        found += gpu_share("learner.gpus", self.gpus, most=1)
        found += not_negative(
            **{"learner.max_restarts": self.max_restarts, "learner.parity_every": self.parity_every}
        )
        found += self.fsdp.problems() + self.megatron.problems() + self.lora.problems() + self.moe.problems()
        found = found or self._of_engine()
        if self.minibatches > 0 and self.groups_per_step % self.minibatches:
            found.append(
                f"learner.minibatches must divide learner.groups_per_step, got {self.minibatches} and {self.groups_per_step}"
            )
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            found.append(f"learner.betas must be two numbers in [0, 1), got {list(self.betas)}")
        if self.warmup_steps < 0:
            found.append(f"learner.warmup_steps must be >= 0, got {self.warmup_steps}")
        if self.lr_end < 0:
            found.append(f"learner.lr_end must be >= 0, got {self.lr_end}")
        return found

    @property
    def num_shares(self) -> int:
        """Parts that a batch is divided into: ranks that hold pieces of one model between them have one together."""
        if self.engine is LearnerKind.megatron:
            return self.ranks // (self.megatron.tensor_parallel * self.megatron.pipeline_parallel)
        return self.ranks // self.fsdp.sequence_parallel

    def _of_engine(self) -> list[str]:
        """Rules of the engine that was chosen; what only another one heeds must be left alone."""
        fsdp, megatron, is_fsdp = self.fsdp, self.megatron, self.engine is LearnerKind.fsdp
        pieces = megatron.tensor_parallel * megatron.pipeline_parallel
        rules = [
            (
                self.moe.router_replay and self.activation_checkpointing and megatron.pipeline_parallel > 1,
                "learner.moe.router_replay must be false with learner.activation_checkpointing and "
                f"learner.megatron.pipeline_parallel > 1, got true with {megatron.pipeline_parallel}",
            ),
            (
                not is_fsdp and fsdp != FsdpConfig(),
                f"learner.fsdp must be left alone unless learner.engine=fsdp, got {fsdp} with {self.engine}",
            ),
            (
                not is_fsdp and self.lora.rank is not None,
                f"learner.lora.rank must be null unless learner.engine=fsdp, got {self.lora.rank} with {self.engine}",
            ),
            (
                not is_fsdp and self.attention is not Attention.auto,
                f"learner.attention must be auto unless learner.engine=fsdp, got {self.attention} with {self.engine}",
            ),
            (
                self.lora.rank is None and self.lora != LoraConfig(),
                f"learner.lora.rank must be set where other settings of learner.lora are, got null with {self.lora}",
            ),
            (
                self.engine is not LearnerKind.megatron and megatron != MegatronConfig(),
                f"learner.megatron must be left alone unless learner.engine=megatron, got {megatron} with {self.engine}",
            ),
            (
                self.ranks % fsdp.replicas != 0,
                f"learner.fsdp.replicas must divide learner.ranks, got {fsdp.replicas} and {self.ranks}",
            ),
            (
                self.ranks % fsdp.sequence_parallel != 0,
                f"learner.fsdp.sequence_parallel must divide learner.ranks, got {fsdp.sequence_parallel} and {self.ranks}",
            ),
            (
                self.ranks % pieces != 0,
                "learner.megatron.tensor_parallel × pipeline_parallel must divide learner.ranks, got "
                f"{megatron.tensor_parallel} × {megatron.pipeline_parallel} and {self.ranks}",
            ),
            (
                self.ranks % pieces == 0 and self.ranks // pieces % megatron.expert_parallel != 0,
                "learner.megatron.expert_parallel must divide the data-parallel ranks (learner.ranks / (tensor_parallel × "
                f"pipeline_parallel)), got {megatron.expert_parallel} and {self.ranks // pieces}",
            ),
        ]
        return [problem for broken, problem in rules if broken]
