"""The memory that an engine keeps for KV on a GPU that others use too, by arithmetic.

vLLM would measure it: all that is free on the device, before and after a trial. What the learner or another engine takes or gives
back meanwhile would count as its own, and it stops when there is more than before.
"""

from configs.sizes import Sizes

OVERHEAD_BYTES = 2 << 30
"""What CUDA, its graphs, the kernels' workspaces and the digests of an update need beside."""


def kv_cache_bytes(
    sizes: Sizes, *, budget: float, element_bytes: int, max_sequences: int, tokens_per_step: int
) -> int:
    """What the weights, one layer's activations, the sampler's logits and the overhead leave of `budget` bytes. Raises ValueError if that
    is nothing."""
    parts = {
        "weights": element_bytes * sizes.parameters,
        "activations": element_bytes * tokens_per_step * sizes.activations,
        "logits": 3
        * 4
        * max_sequences
        * sizes.vocabulary,  # as they come, as they are sampled from, and sorted
        "overhead": OVERHEAD_BYTES,
    }
    left = budget - sum(parts.values())
    if left <= 0:
        words = " + ".join(f"{name} {part / 2**30:.1f}" for name, part in parts.items())
        raise ValueError(
            f"generators.gpu_memory_fraction must leave room for KV on a GPU that the engine shares, got {budget / 2**30:.1f} GiB for "
            f"{words} GiB"
        )
    return int(left)
