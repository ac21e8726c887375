"""The memory of a rank under Megatron, by arithmetic. This file needs neither torch nor Megatron.

weights        in the dtype of computation: the stage's layers, their matrices / tensor parallelism, their
               experts / expert parallelism; embedding on the first stage, head on the last, vocabulary
               / tensor parallelism; of every model that the rank holds
gradients      float32, as many as the weights of the models that are trained: the buffers stay
optimizer      AdamW's two moments, float32, and masters where the weights are bfloat16, / data-parallel
               ranks (the distributed optimizer)
reduced        the largest gradient, in the dtype of computation, before it is added to its buffer
activations    as under FSDP, / tensor parallelism, because Megatron divides what stands between matrices
               too (sequence parallelism: Korthikanti et al., 2022, arXiv 2205.05198), and / context
               parallelism; of as many microbatches as are under way on the stage: p on the first of p
               stages, 1 on the last; and the whole input of one matrix, gathered
head           on the last stage five times the logits of a chunk, float32, and two gradients of the head
"""

from dataclasses import dataclass

from configs.parallel import MegatronConfig
from configs.sizes import LayerSizes, Sizes

LOGITS_COPIES = 5
"""Logits as they come, as float32, shifted, as powers, and their gradient."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Parameters of one rank of a pipeline stage, in elements."""

    dense: int
    experts: int
    largest: int
    """Those of the largest matrix."""

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRank:
    """The load of a rank, whatever its layout."""

    ranks: int
    """Ranks of the learner."""
    num_trained: int
    """Models that are trained, all of one size."""
    num_frozen: int
    tokens: float
    """Tokens of a microbatch."""
    element_bytes: int
    """Bytes of an element in computation."""
    chunk_elements: int
    """Most logits that exist at a time."""
    checkpoints_activations: bool
    has_policy: bool = True
    """False on the ranks of a critic of its own, whose head gives one value a token."""


def count_rank_parts(sizes: Sizes, layout: MegatronConfig, rank: MegatronRank) -> dict[str, float]:
    """Returns bytes by part, of the stage that needs most."""
    stages = [_count_stage_parts(sizes, layout, rank, stage) for stage in range(layout.pipeline_parallel)]
    return max(stages, key=lambda parts: sum(parts.values()))


def count_state_elements(sizes: Sizes, layout: MegatronConfig, ranks: int) -> float:
    """Returns the parameters of one model whose optimizer state a rank holds, on the stage with most."""
    stages = [count_stage_sizes(sizes, layout, stage) for stage in range(layout.pipeline_parallel)]
    return max(_divide_state(stage, layout, ranks) for stage in stages)


def count_stage_sizes(sizes: Sizes, layout: MegatronConfig, stage: int) -> StageSizes:
    """Counts the parameters that a rank of this stage holds."""
    tensor, is_last = layout.tensor_parallel, stage == layout.pipeline_parallel - 1
    layers = _select_layers(sizes, layout, stage)
    matrix = sizes.matrix_parameters // tensor
    dense = sum(layer.divided // tensor + layer.whole for layer in layers)
    if stage == 0:
        dense += matrix
    if is_last:
        # A last stage that is not the first has a copy of an embedding that is the head too.
        dense += sizes.hidden + (0 if sizes.is_tied and stage == 0 else matrix)
    experts = sum(layer.experts for layer in layers) // count_expert_pieces(layout)
    widest = max((layer.divided // 4 // tensor for layer in layers), default=0)
    return StageSizes(dense, experts, matrix if stage == 0 or is_last else widest)


def count_expert_pieces(layout: MegatronConfig) -> int:
    """Returns the number of ranks that divide the experts of a layer: dealt out whole, or each divided."""
    return layout.expert_parallel if layout.expert_parallel > 1 else layout.tensor_parallel


def _select_layers(sizes: Sizes, layout: MegatronConfig, stage: int) -> tuple[LayerSizes, ...]:
    number = sizes.num_layers // layout.pipeline_parallel
    return sizes.layers[stage * number : (stage + 1) * number]


def _divide_state(stage: StageSizes, layout: MegatronConfig, ranks: int) -> float:
    """Divides a stage's parameters over the ranks that hold them: the experts' replicas are fewer."""
    per_stage = ranks // layout.pipeline_parallel
    dense_replicas = per_stage // layout.tensor_parallel
    expert_replicas = per_stage // count_expert_pieces(layout)
    return stage.dense / dense_replicas + stage.experts / expert_replicas


def _count_stage_parts(
    sizes: Sizes, layout: MegatronConfig, rank: MegatronRank, stage: int
) -> dict[str, float]:
    held, element = count_stage_sizes(sizes, layout, stage), rank.element_bytes
    state = _divide_state(held, layout, rank.ranks)
    tokens = rank.tokens / layout.context_parallel
    has_logits = rank.has_policy and stage == layout.pipeline_parallel - 1
    vocabulary = sizes.vocabulary / layout.tensor_parallel
    logits = 4.0 * LOGITS_COPIES * min(tokens * vocabulary, rank.chunk_elements)
    return {
        "weights": float(element * held.parameters * (rank.num_trained + rank.num_frozen)),
        "gradients": 4.0 * held.parameters * rank.num_trained,
        "optimizer": (8.0 if element == 4 else 12.0) * state * rank.num_trained,
        "reduced": float(element * held.largest),
        "activations": element * _count_activations(sizes, layout, rank, stage),
        "head": has_logits * (logits + 2.0 * element * vocabulary * sizes.hidden),
    }


def _count_activations(sizes: Sizes, layout: MegatronConfig, rank: MegatronRank, stage: int) -> float:
    """Returns elements kept for the backward pass on one rank."""
    layers = _select_layers(sizes, layout, stage)
    tokens = rank.tokens / layout.context_parallel
    under_way = layout.pipeline_parallel - stage
    divided = tokens / layout.tensor_parallel
    gathered = tokens * sizes.hidden if layout.tensor_parallel > 1 else 0.0
    repeated = tokens * sizes.count_repeated_kv(layout.tensor_parallel, layout.context_parallel)
    if rank.checkpoints_activations:
        inputs = sizes.hidden * len(layers) * under_way
        return (
            divided * (inputs + max((layer.activations for layer in layers), default=0)) + gathered + repeated
        )
    kept = divided * sum(layer.activations for layer in layers) + repeated * len(layers)
    return kept * under_way + gathered
