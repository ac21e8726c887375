"""Memory for KV on a GPU that the engine shares with other processes, computed by arithmetic.

vLLM would measure it: the memory that is free on the device before and after a trial. Memory that the learner
or another engine takes or gives back meanwhile would count as vLLM's own, and vLLM stops when more is free
than before.
"""

from configs.sizes import Sizes

OVERHEAD_BYTES = 2 << 30
"""Memory for everything else: CUDA, its graphs, the kernels' workspaces and the digests of an update."""
FLOAT32_BYTES = 4
COPIES_OF_LOGITS = 3
"""The logits as they come, as they are sampled from, and sorted."""


TOKENS_PER_STEP = 2048
"""Tokens that an engine computes in one step at most, unless it has more sequences: vLLM's default."""
BLOCK_TOKENS = 16
"""Tokens of a block of KV: vLLM's default."""
PAGE_TOKENS = {"cpu": 32, "cuda": 256}
"""The same of transformers' engine. FlashAttention's pages are multiples of 256."""
MAX_BATCH_TOKENS = 8192
"""Tokens of a batch of transformers' engine, unless `max_model_len` is greater."""


def count_engine_parts(
    sizes: Sizes, *, element_bytes: int, max_sequences: int, tokens_per_step: int, ranks: int = 1
) -> dict[str, float]:
    """Returns the bytes that an engine needs on each of its GPUs besides KV, by part. `ranks`: GPUs that
    share each layer's matrices.

    Between the matrices every rank of tensor parallelism has whole vectors.
    """
    between = 6 * sizes.hidden
    activations = between + (sizes.layer_activations - between) / ranks
    return {
        "weights": element_bytes * count_engine_weights(sizes, ranks),
        "activations": element_bytes * tokens_per_step * activations,
        "logits": float(COPIES_OF_LOGITS * FLOAT32_BYTES * max_sequences * sizes.vocabulary),
        "overhead": float(OVERHEAD_BYTES),
    }


def count_engine_weights(sizes: Sizes, ranks: int = 1) -> float:
    """Returns the elements of a model that each GPU of an engine holds. Ranks beyond the heads of keys and
    values hold copies of these; norms, routers and projections to latent vectors are whole on each."""
    heads = min(ranks, sizes.num_key_value_heads)
    layers = sum(
        (layer.divided - layer.key_value + layer.experts) / ranks
        + layer.key_value / heads
        + layer.whole
        + layer.buffers
        for layer in sizes.layers
    )
    ends = (sizes.embedding_parameters - sizes.hidden) / ranks
    return layers + ends + sizes.hidden


def count_kv_token_bytes(sizes: Sizes, element_bytes: int, ranks: int = 1) -> int:
    """Returns the bytes of KV that one token takes on each GPU of an engine, all layers counted whole
    (a window keeps less)."""
    heads = max(1, sizes.num_key_value_heads // ranks)
    return element_bytes * sizes.head_kv * heads * sizes.num_layers


def count_kv_tokens(kv_bytes: float, token_bytes: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Returns the tokens of the whole blocks that fit."""
    return int(kv_bytes // (token_bytes * block_tokens)) * block_tokens


def compute_kv_cache_bytes(
    sizes: Sizes,
    *,
    budget: float,
    element_bytes: int,
    max_sequences: int,
    tokens_per_step: int,
    ranks: int = 1,
) -> int:
    """Returns the bytes that remain of `budget` bytes of each GPU after its part of the weights, one layer's
    activations, the sampler's logits and the overhead. Raises ValueError if nothing remains."""
    parts = count_engine_parts(
        sizes,
        element_bytes=element_bytes,
        max_sequences=max_sequences,
        tokens_per_step=tokens_per_step,
        ranks=ranks,
    )
    left = budget - sum(parts.values())
    if left <= 0:
        words = " + ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items())
        raise ValueError(
            f"generators.gpu_memory_fraction must leave room for KV on a GPU that the engine shares, got "
            f"{budget / 2**30:.1f} GiB for {words} GiB"
        )
    return int(left)
