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
                   width of the MLP: counted on transformers' Llama and Qwen3); with activation checkpointing
                   H, and the whole of one layer. Where ranks share the tokens of a sequence, key heads that
                   are repeated for it count too (`learners.key_heads`); what travels between these ranks has
                   room in what the MLP has given back by then
    head           three times the logits of a chunk, float32 (four times where the model caps them), and the
                   head's own gradient, float32
    published      with CUDA IPC, the version that engines copy from the first rank's GPU

On a GPU with `cpu_offload` weights, optimizer and sharded gradients are in the host's memory. The copy of a
checkpoint (weights and optimizer) and a published snapshot are in the host's memory too, and are not counted.
This file does not need torch.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs.learner import LearnerKind
from configs.model import Dtype
from configs.parallel import Accumulate
from configs.placement import CriticPlace
from configs.schema import Config
from configs.sizes import Sizes, count_sizes
from configs.transports import TransportUse
from learners.key_heads import count_repeated_elements

GIB = 2**30
CHUNK_ELEMENTS = 2**27
"""Logits that exist at the same time (512 MiB in float32): `learners.heads`."""
CPU_ELEMENTS = 2**23
"""The same on a CPU: so few that they stay in its cache."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the rank that needs most, in bytes by part."""

    parts: dict[str, float]
    ranks: int

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {format_bytes(part)}" for name, part in self.parts.items() if part)
        total = format_bytes(self.total_bytes)
        return f"memory of a learner rank ({self.ranks} in all), about: {parts} = {total}"


def plan_memory(config: Config, *, cuda: bool) -> MemoryPlan | None:
    """Returns None where the model's files do not tell (another kind of model, the simulated learner)."""
    learner = config.learner
    path = Path(config.model.path)
    if learner.engine is LearnerKind.simulated or not (path / "config.json").exists():
        return None
    try:
        hf = json.loads((path / "config.json").read_text())
        sizes = count_sizes(hf)
    except KeyError:
        return None
    trained, largest, frozen = _count_parameters(config, sizes)
    shards = learner.ranks // learner.fsdp.replicas
    compute_bytes = 2 if cuda and config.model.dtype is Dtype.bfloat16 else 4
    published_bytes = 2 if config.model.dtype is Dtype.bfloat16 else 4
    on_device = 0 if learner.fsdp.cpu_offload and cuda else 1
    gradients = on_device * 4.0 * largest / shards
    if learner.fsdp.accumulate is Accumulate.whole:  # on the GPU, whatever is offloaded
        gradients = 4.0 * largest
    # Adapters are a small part of each layer, so nothing as large as the embedding is reduced at once.
    is_whole = largest == sizes.parameters
    reduced = (
        max(sizes.embedding_parameters, sizes.layer_parameters) if is_whole else largest / sizes.num_layers
    )
    buffers = max(sizes.embedding_parameters, 2 * sizes.layer_parameters) if shards > 1 else 0
    is_sharded = learner.engine is LearnerKind.fsdp
    tokens, kept = _count_activations(config, sizes)
    kept += _count_repeated(config, hf)
    chunk = min(tokens * sizes.vocabulary, CHUNK_ELEMENTS if cuda else CPU_ELEMENTS)
    return MemoryPlan(
        parts={
            "weights": on_device * 4.0 * (trained + frozen) / shards,
            "gradients": gradients,
            "optimizer": on_device * 8.0 * trained / shards,
            "gathered": is_sharded
            * float(compute_bytes * (sizes.embedding_parameters + sizes.layer_parameters + buffers)),
            "reduced": is_sharded * (compute_bytes + 4.0) * reduced,
            "activations": float(compute_bytes * kept * tokens),
            "head": 4.0 * ((3 + sizes.caps_logits) * chunk + is_whole * sizes.vocabulary * sizes.hidden),
            "published": float(published_bytes * sizes.parameters)
            if cuda and _keeps_device_copy(config)
            else 0.0,
        },
        ranks=config.num_learner_ranks,
    )


def _count_parameters(config: Config, sizes: Sizes) -> tuple[int, int, int]:
    """Returns (parameters of all trained models, of the largest trained one, frozen parameters) of a rank's
    models."""
    algo, lora = config.algo, config.learner.lora
    policy, frozen = sizes.parameters, 0
    if lora.rank is not None:
        policy, frozen = min(sizes.parameters, lora.rank * sizes.lora_parameters_per_rank), sizes.parameters
    elif algo.needs_reference:
        frozen = sizes.parameters
    has_critic = algo.needs_critic and config.placement.critic is CriticPlace.with_actor
    others = has_critic + algo.needs_reward_model
    return policy + others * sizes.parameters, sizes.parameters if others else policy, frozen


def _count_activations(config: Config, sizes: Sizes) -> tuple[float, float]:
    """Returns (tokens of a microbatch on one rank, elements kept for the backward pass for each token)."""
    learner = config.learner
    ranks_per_share = learner.num_shares and learner.ranks // learner.num_shares
    # A branch of an episode is never divided, so one of the longest may be more than a microbatch.
    longest = max(learner.tokens_per_microbatch, config.generators.max_model_len)
    tokens = longest / max(1, ranks_per_share)
    if learner.activation_checkpointing:
        return tokens, sizes.hidden * sizes.num_layers + sizes.layer_activations
    return tokens, sizes.layer_activations * sizes.num_layers


def _count_repeated(config: Config, hf: dict[str, Any]) -> int:
    """Returns the elements of repeated key heads that are kept for each token. `hf`: the model's
    configuration."""
    learner, heads = config.learner, hf["num_attention_heads"]
    tensor = learner.megatron.tensor_parallel
    repeated = count_repeated_elements(
        heads // tensor,
        max(1, (hf.get("num_key_value_heads") or heads) // tensor),
        hf.get("head_dim") or hf["hidden_size"] // heads,
        max(learner.fsdp.sequence_parallel, learner.megatron.context_parallel),
    )
    return repeated * (1 if learner.activation_checkpointing else hf["num_hidden_layers"])


def _keeps_device_copy(config: Config) -> bool:
    """Returns whether the first rank keeps a version on its GPU.

    An engine that shares the GPU asks for it, unless all is offloaded.
    """
    shares = (config.learner.gpu_memory_fraction or 1.0) < 1.0 and not config.learner.fsdp.cpu_offload
    copies = config.sync.transport.row.copies_to_device
    return copies is TransportUse.always or (copies is TransportUse.where_it_helps and shares)


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


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
