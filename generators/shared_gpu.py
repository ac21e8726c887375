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
    parts = {
        "weights": element_bytes * sizes.parameters / ranks,
        "activations": element_bytes * tokens_per_step * sizes.layer_activations,
        "logits": COPIES_OF_LOGITS * FLOAT32_BYTES * max_sequences * sizes.vocabulary,
        "overhead": OVERHEAD_BYTES,
    }
    left = budget - sum(parts.values())
    if left <= 0:
        words = " + ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items())
        raise ValueError(
            f"generators.gpu_memory_fraction must leave room for KV on a GPU that the engine shares, got "
            f"{budget / 2**30:.1f} GiB for {words} GiB"
        )
    return int(left)
