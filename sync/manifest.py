"""What a version's weights are: name, dtype, shape, place and digest of each tensor, and one digest over all."""

import msgspec


class DigestMismatch(RuntimeError):
    """Weights are not what the manifest says. They must never be served."""


class TensorEntry(msgspec.Struct, frozen=True):
    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Torch's name, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the raw little-endian bytes, hex."""


class Manifest(msgspec.Struct, frozen=True, tag=True):
    version: int
    incarnation: str
    """Names the process life of the learner that published it."""
    path: str
    """Safetensors file, complete and immutable."""
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    """In the file's order."""
    digest: str
    """xxh3-128 over (name, dtype, shape, digest) of all tensors in order, hex."""
