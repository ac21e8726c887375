"""The memory that a rank of the learner will need, by arithmetic before anything is loaded, and the memory
that it has needed.

    weights        float32 masters / shards, of every model that the rank holds
    gradients      float32 / shards, of the models that are trained, one after the other; with
                   `accumulate=whole` not divided
    optimizer      AdamW's two moments, float32 / shards, of the models that are trained
    gathered       whole parameters in the dtype of computation: embedding and head during the whole pass, and
                   a layer with them; with more than one shard also the buffers of the gathers: another
                   embedding and head, or two more layers
    reduced        whole gradients on their way to their shards, in the dtype of computation, and the float32
                   buffer that sends them: of embedding and head, or of a layer, whichever is more
    activations    kept for the backward pass, of one microbatch, or of one branch of
                   `generators.max_model_len` where that is longer: for each token and layer about
                   6 H + 6 Q + 5 K + 5 F elements (H hidden, Q and K the widths of queries and of keys, F the
                   width of the MLP: counted on transformers' Llama and Qwen3), and for each expert of a token
                   5 F + 3 H; with activation checkpointing H, and the whole of one layer. Where ranks share
                   a sequence, the heads of keys and values that are repeated for it too
    head           three times the logits of a chunk, float32 (four times where the model caps them), and the
                   head's own gradient, float32
    published      with CUDA IPC, the version that engines copy from the first rank's GPU

Megatron's parts are in `learners/megatron/memory.py`. In the host's memory, beside a GPU:

    offloaded      with `cpu_offload` weights, optimizer and sharded gradients
    checkpoint     the copy of weights and optimizer that a thread writes to the disk as it is; replicas
                   divide it
    staging        this rank's part of a version on its way to shared memory

What the rank's host keeps of versions in shared memory is counted in `sync/kept_versions.py`. This file does
not need torch.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from configs.generators import EngineKind
from configs.learner import LearnerConfig, LearnerKind
from configs.parallel import Accumulate, LoraPublish
from configs.placement import CriticPlace, PlacementMode
from configs.schema import Config
from configs.sizes import Sizes, read_sizes
from configs.transports import TransportUse
from learners.megatron.memory import MegatronRank, count_rank_parts, count_state_elements

GIB = 2**30
CHUNK_ELEMENTS = 2**27
"""Logits that exist at the same time (512 MiB in float32): `learners.heads`."""
CPU_ELEMENTS = 2**23
"""The same on a CPU: so few that they stay in its cache."""
STATE_BYTES = 12
"""Bytes of a checkpoint for each trained parameter: the float32 master and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the rank that needs most, in bytes by part."""

    parts: dict[str, float]
    """On its GPU, or in the host's memory where it has none."""
    ranks: int
    host_parts: dict[str, float] = field(default_factory=dict)
    """In the host's memory, beside these."""

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host_parts.values())

    def __str__(self) -> str:
        own = f"memory of a learner rank ({self.ranks} in all), about: {describe_parts(self.parts)}"
        beside = describe_parts(self.host_parts)
        return f"{own}; in the host's memory: {beside}" if self.host_bytes else own


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """The models of a rank, in elements."""

    trained: int
    """Parameters of all that are trained."""
    largest: int
    """Parameters of the largest of these."""
    frozen: int
    """Parameters that are not trained."""
    num_trained: int = 1
    num_frozen: int = 0
    has_policy: bool = True
    """False on the ranks of a critic of its own."""


def plan_memory(config: Config, *, cuda: bool) -> MemoryPlan | None:
    """Returns None where the model's files do not tell (another kind of model, the simulated learner)."""
    path = Path(config.model.path)
    if config.learner.engine is LearnerKind.simulated or not (path / "config.json").exists():
        return None
    try:
        sizes = read_sizes(path)
    except ValueError:
        return None
    return plan_policy_rank(config, sizes, cuda=cuda)


def plan_policy_rank(config: Config, sizes: Sizes, *, cuda: bool) -> MemoryPlan:
    """Plans a rank that holds the policy, and the models beside it."""
    return _plan_rank(config, config.learner, sizes, _count_models(config, sizes), cuda)


def plan_critic_rank(config: Config, sizes: Sizes, *, cuda: bool) -> MemoryPlan:
    """Plans a rank of a critic of its own (`placement.critic=own`)."""
    learner = replace(config.learner, ranks=config.placement.critic_ranks)
    size = sizes.parameters
    return _plan_rank(config, learner, sizes, ModelCounts(size, size, 0, has_policy=False), cuda)


def count_trained_parameters(config: Config, sizes: Sizes) -> int:
    """Counts the parameters whose state a checkpoint holds."""
    own = sizes.parameters if config.num_learner_ranks > config.learner.ranks else 0
    return _count_models(config, sizes).trained + own


def count_published_bytes(config: Config, sizes: Sizes) -> int:
    """Counts the bytes of one published version, as the learner writes it."""
    lora = config.learner.lora
    if lora.rank is not None and lora.publish is LoraPublish.adapter:
        return 4 * min(sizes.parameters, lora.rank * sizes.lora_parameters_per_rank)
    return config.model.dtype.num_bytes * sizes.published


def _plan_rank(
    config: Config, learner: LearnerConfig, sizes: Sizes, counts: ModelCounts, cuda: bool
) -> MemoryPlan:
    compute_bytes = config.model.dtype.num_bytes if cuda else 4
    # A branch of an episode is never divided, so one of the longest may be more than a microbatch.
    tokens = max(learner.tokens_per_microbatch, config.generators.max_model_len)
    if learner.engine is LearnerKind.megatron:
        rank = MegatronRank(
            ranks=learner.ranks,
            num_trained=counts.num_trained,
            num_frozen=counts.num_frozen,
            tokens=tokens,
            element_bytes=compute_bytes,
            chunk_elements=CHUNK_ELEMENTS,
            checkpoints_activations=learner.activation_checkpointing,
            has_policy=counts.has_policy,
        )
        parts = count_rank_parts(sizes, learner.megatron, rank)
        state = count_state_elements(sizes, learner.megatron, learner.ranks) * counts.num_trained
        offloaded = 0.0
    else:
        parts = _count_fsdp_parts(learner, sizes, counts, tokens, compute_bytes, cuda)
        state = counts.trained / learner.ranks
        offloaded = _count_offloaded(learner, counts, cuda)
    publishes = counts.has_policy
    if publishes and cuda and _keeps_device_copy(config):
        parts["published"] = float(config.model.dtype.num_bytes * sizes.parameters)
    return MemoryPlan(
        parts=parts,
        ranks=config.num_learner_ranks,
        host_parts={
            "offloaded": offloaded,
            "checkpoint": float(STATE_BYTES * state),
            "staging": publishes * count_published_bytes(config, sizes) / learner.ranks,
        },
    )


def _count_fsdp_parts(
    learner: LearnerConfig, sizes: Sizes, counts: ModelCounts, tokens: int, compute_bytes: int, cuda: bool
) -> dict[str, float]:
    """Returns bytes by part under FSDP."""
    shards = _count_shards(learner)
    on_device = 0 if learner.fsdp.cpu_offload and cuda else 1
    gradients = on_device * 4.0 * counts.largest / shards
    if learner.fsdp.accumulate is Accumulate.whole:  # on the GPU, whatever is offloaded
        gradients = 4.0 * counts.largest
    # Adapters are a small part of each layer, so nothing as large as the embedding is reduced at once.
    is_whole = counts.largest == sizes.parameters
    reduced = (
        max(sizes.embedding_parameters, sizes.layer_parameters)
        if is_whole
        else counts.largest / sizes.num_layers
    )
    buffers = max(sizes.embedding_parameters, 2 * sizes.layer_parameters) if shards > 1 else 0
    own_tokens = tokens / learner.fsdp.sequence_parallel
    kept = sizes.activations
    if learner.activation_checkpointing:
        kept = sizes.hidden * sizes.num_layers + sizes.layer_activations
    layers_kept = 1 if learner.activation_checkpointing else sizes.num_layers
    kept += layers_kept * sizes.count_repeated_kv(1, learner.fsdp.sequence_parallel)
    chunk = min(own_tokens * sizes.vocabulary, CHUNK_ELEMENTS if cuda else CPU_ELEMENTS)
    head = 4.0 * ((3 + sizes.caps_logits) * chunk + is_whole * sizes.matrix_parameters)
    return {
        "weights": on_device * 4.0 * (counts.trained + counts.frozen) / shards,
        "gradients": gradients,
        "optimizer": on_device * 8.0 * counts.trained / shards,
        "gathered": float(compute_bytes * (sizes.embedding_parameters + sizes.layer_parameters + buffers)),
        "reduced": (compute_bytes + 4.0) * reduced,
        "activations": float(compute_bytes * kept * own_tokens),
        "head": head if counts.has_policy else 0.0,
        "published": 0.0,
    }


def _count_offloaded(learner: LearnerConfig, counts: ModelCounts, cuda: bool) -> float:
    """Returns the bytes of a rank that `cpu_offload` keeps in the host's memory."""
    if not (learner.fsdp.cpu_offload and cuda):
        return 0.0
    gradients = 0 if learner.fsdp.accumulate is Accumulate.whole else counts.largest
    state = 4.0 * (counts.trained + counts.frozen) + 8.0 * counts.trained + 4.0 * gradients
    return state / _count_shards(learner)


def _count_shards(learner: LearnerConfig) -> int:
    return max(1, learner.ranks // learner.fsdp.replicas)


def _count_models(config: Config, sizes: Sizes) -> ModelCounts:
    """Counts the models of a rank that holds the policy."""
    algo, lora, size = config.algo, config.learner.lora, sizes.parameters
    policy, num_frozen = size, 0
    if lora.rank is not None:
        policy, num_frozen = min(size, lora.rank * sizes.lora_parameters_per_rank), 1
    elif algo.needs_reference:
        num_frozen = 1
    has_critic = algo.needs_critic and config.placement.critic is CriticPlace.with_actor
    others = has_critic + algo.needs_reward_model
    return ModelCounts(
        trained=policy + others * size,
        largest=size if others else policy,
        frozen=num_frozen * size,
        num_trained=1 + others,
        num_frozen=num_frozen,
    )


def _keeps_device_copy(config: Config) -> bool:
    """Returns whether the first rank keeps a version on its GPU.

    An engine of vLLM's that shares the GPU asks for it, unless the model leaves the GPU's memory to others
    (`sync.transports.auto`). An engine of several GPUs shares none.
    """
    leaves = config.learner.fsdp.cpu_offload or config.placement.mode is PlacementMode.colocated
    generators = config.generators
    can_ask = generators.engine is EngineKind.vllm and generators.tensor_parallel == 1 and not leaves
    shares = (config.learner.gpu_memory_fraction or 1.0) < 1.0
    copies = config.sync.transport.row.copies_to_device
    return copies is TransportUse.always or (copies is TransportUse.where_it_helps and shares and can_ask)


class OutOfMemory(ValueError):
    """A rank does not fit into its GPU.

    Another life of it would not fit either, so it is not started again.
    """


@contextmanager
def explain_shortage(config: Config) -> Iterator[None]:
    """Raises OutOfMemory, with the plan, where the GPU's memory does not suffice."""
    try:
        yield
    except RuntimeError as error:
        import torch  # whoever ran out of GPU memory has imported it

        text = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "CUDA error: out of memory" not in text:
            raise
        planned = plan_memory(config, cuda=True) or "the memory plan knows no model of this kind"
        raise OutOfMemory(
            "a rank of the learner must fit into its GPU (docs/learner.md says what makes it smaller), "
            f"got: {text} Planned: {planned}"
        ) from error


class MemoryMeter:
    """Measures the most memory that this process has needed since the meter was made: of its GPU, or else of
    the host."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._before = 0 if cuda else psutil.Process().memory_info().rss
        if cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def measure_peak(self) -> float:
        """Returns the peak in bytes."""
        if self._cuda:
            import torch

            return float(torch.cuda.max_memory_allocated())
        return max(0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 - self._before)


def describe_parts(parts: dict[str, float]) -> str:
    """Returns a sum for people: `weights 1.0 GiB + head 3.0 GiB = 4.0 GiB`."""
    found = [f"{name} {format_bytes(part)}" for name, part in parts.items() if part]
    return " + ".join(found) + (f" = {format_bytes(sum(parts.values()))}" if len(found) > 1 else "")


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
