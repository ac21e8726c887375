"""What a rank of the learner will need of memory, by arithmetic before anything is loaded, and what it has needed.

    weights        float32 masters / shards, of every model that the rank holds
    gradients      float32 / shards, of what is trained, one model after the other; with `accumulate=whole` not divided
    optimizer      AdamW's two moments, float32 / shards, of what is trained
    gathered       parameters whole, in the dtype of computation: embedding and head during the whole pass, and with them a layer; with
                   more than one shard the buffers of the gathers too: another embedding and head, or two more layers
    reduced        whole gradients on their way to their shards, in the dtype of computation, and the float32 buffer that sends them:
                   of embedding and head, or of a layer, whichever is more
    activations    kept for the backward pass, of one microbatch: by token and layer about 6 H + 6 Q + 5 K + 5 F elements (H hidden,
                   Q and K the widths of queries and of keys, F the width of the MLP: counted on transformers' Llama and Qwen3);
                   with activation checkpointing H, and one layer's whole
    head           three times the logits of a chunk, float32 (four times where the model caps them), and its own gradient, float32
    published      with CUDA IPC, the version that engines copy from the first rank's GPU

On a GPU with `cpu_offload` weights, optimizer and sharded gradients are in the host's memory. A checkpoint's copy (weights and
optimizer) and a published snapshot are in the host's memory too, and are not counted. torch is not needed here.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from configs.learner import LearnerKind
from configs.model import Dtype
from configs.parallel import Accumulate
from configs.placement import CriticPlace
from configs.schema import Config
from configs.sizes import count_sizes
from configs.sync import Transport

GIB = 2**30
CHUNK_ELEMENTS = 2**27
"""Logits that exist at the same time (512 MiB in float32): `learners.heads`."""
CPU_ELEMENTS = 2**23
"""The same on a CPU: so few that they stay in its cache."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """In bytes, of the rank that needs most."""

    parts: dict[str, float]
    ranks: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {format_bytes(part)}" for name, part in self.parts.items() if part)
        return f"memory of a learner rank ({self.ranks} in all), about: {parts} = {format_bytes(self.total)}"


def plan_memory(config: Config, *, cuda: bool) -> MemoryPlan | None:
    """None where the model's files do not tell (another kind of model, the simulated learner)."""
    learner, algo = config.learner, config.algo
    path = Path(config.model.path)
    if learner.engine is LearnerKind.simulated or not (path / "config.json").exists():
        return None
    hf = json.loads((path / "config.json").read_text())
    try:
        sizes = count_sizes(hf)
    except KeyError:
        return None
    each, frozen = sizes.parameters, 0  # of a model that is trained
    if learner.lora.rank is not None:
        each, frozen = (
            min(sizes.parameters, learner.lora.rank * sizes.lora_parameters_per_rank),
            sizes.parameters,
        )
    with_actor = config.placement.critic is CriticPlace.with_actor
    others = (algo.needs_critic and with_actor) + algo.needs_reward_model
    if algo.needs_reference and learner.lora.rank is None:
        frozen += sizes.parameters
    trained = each + others * sizes.parameters
    largest = sizes.parameters if others else each
    shards = learner.ranks // learner.fsdp.replicas
    pieces = learner.num_shares and learner.ranks // learner.num_shares
    compute = 2 if cuda and config.model.dtype is Dtype.bfloat16 else 4
    tokens = learner.tokens_per_microbatch / max(1, pieces)
    kept = (
        sizes.hidden * sizes.num_layers + sizes.layer_activations
        if learner.activation_checkpointing
        else (sizes.layer_activations * sizes.num_layers)
    )
    chunk = min(tokens * sizes.vocabulary, CHUNK_ELEMENTS if cuda else CPU_ELEMENTS)
    on_device = 0 if learner.fsdp.cpu_offload and cuda else 1
    gradients = on_device * 4.0 * largest / shards
    if learner.fsdp.accumulate is Accumulate.whole:  # on the GPU, whatever is offloaded
        gradients = 4.0 * largest
    is_whole = largest == sizes.parameters  # not adapters alone
    reduced = (
        max(sizes.embedding_parameters, sizes.layer_parameters) if is_whole else largest / sizes.num_layers
    )
    buffers = max(sizes.embedding_parameters, 2 * sizes.layer_parameters) if shards > 1 else 0
    sharded = learner.engine is LearnerKind.fsdp
    published = 2 if config.model.dtype is Dtype.bfloat16 else 4
    return MemoryPlan(
        parts={
            "weights": on_device * 4.0 * (trained + frozen) / shards,
            "gradients": gradients,
            "optimizer": on_device * 8.0 * trained / shards,
            "gathered": sharded
            * float(compute * (sizes.embedding_parameters + sizes.layer_parameters + buffers)),
            "reduced": sharded * (compute + 4.0) * reduced,
            "activations": float(compute * kept * tokens),
            "head": 4.0 * ((3 + sizes.caps_logits) * chunk + is_whole * sizes.vocabulary * sizes.hidden),
            "published": float(published * sizes.parameters) if cuda and _keeps_a_version(config) else 0.0,
        },
        ranks=config.num_learner_ranks,
    )


def _keeps_a_version(config: Config) -> bool:
    """Does the first rank keep a version on its GPU? An engine that shares the GPU asks for it, unless all is offloaded."""
    shares = (config.learner.gpu_memory_fraction or 1.0) < 1.0 and not config.learner.fsdp.cpu_offload
    return config.sync.transport is Transport.cuda_ipc or (config.sync.transport is Transport.auto and shares)


class OutOfMemory(ValueError):
    """A rank does not fit into its GPU: another life of it would not either."""


@contextmanager
def explain_shortage(config: Config) -> Iterator[None]:
    """Raises OutOfMemory, with the plan, where the GPU's memory does not suffice."""
    try:
        yield
    except RuntimeError as error:
        import torch  # who ran out of it has imported it

        text = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "CUDA error: out of memory" not in text:
            raise
        planned = plan_memory(config, cuda=True) or "the memory plan knows no model of this kind"
        raise OutOfMemory(
            f"a rank of the learner must fit into its GPU (docs/learner.md says what makes it smaller), got: {text} Planned: {planned}"
        ) from error


class MemoryMeter:
    """What this process has needed since the meter was made, at most: of its GPU, or else of the host's memory."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._before = 0 if cuda else psutil.Process().memory_info().rss
        if cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def measure_peak(self) -> float:
        """Bytes"""
        if self._cuda:
            import torch

            return float(torch.cuda.max_memory_allocated())
        return max(0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 - self._before)


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
