"""What a version's weights are: name, dtype, shape and digest of each tensor, their file, and one digest over all."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
import xxhash


class DigestMismatch(RuntimeError):
    """Weights are not what the manifest says. They must never be served."""


class EngineMismatch(DigestMismatch):
    """An engine does not hold what it was given. It must not go on before a later update succeeds."""


class TensorEntry(msgspec.Struct, frozen=True):
    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Torch's name, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the raw little-endian bytes, hex."""


class Adapter(msgspec.Struct, frozen=True):
    """Of a version that holds low-rank adapters only: what they belong to. See `sync.adapter`."""

    base: str
    """Hugging Face folder of the base model, the same path on every host."""
    base_digest: str
    """xxh3-128 over (name, dtype, shape, digest) of the base model's tensors, hex."""
    scaling: float
    """The product of an adapter's matrices counts so much."""
    dtype: str
    """Of the whole weights that engines serve."""


class Manifest(msgspec.Struct, frozen=True, tag=True):
    version: int
    incarnation: str
    """Names the process life of the learner that published it."""
    path: str
    """Safetensors file, complete and immutable."""
    num_bytes: int
    """Size of that file."""
    tensors: tuple[TensorEntry, ...]
    """In the file's order."""
    digest: str
    """xxh3-128 over (name, dtype, shape, digest) of all tensors in order, and over `adapter`, hex."""
    adapter: Adapter | None = None
    """The tensors are adapters: engines take up what a host makes of them."""

    @property
    def locator(self) -> str:
        """The manifest's own file, beside the snapshot: what is announced, and what `read_manifest` takes."""
        return str(Path(self.path).with_suffix(".json"))


def parse_manifest(data: bytes | memoryview, where: str) -> Manifest:
    """Raises DigestMismatch, saying `where` it is from, when it is none or contradicts itself."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise DigestMismatch(f"{where} is not a manifest: {error}") from None
    if whole_digest(manifest.tensors, manifest.adapter) != manifest.digest:
        raise DigestMismatch(f"{where}: the list of tensors does not have the manifest's digest")
    return manifest


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; without a copy where it is contiguous and on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def tensor_digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(raw_bytes(tensor))


def whole_digest(tensors: Iterable[TensorEntry], adapter: Adapter | None = None) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([*tensors, *([] if adapter is None else [adapter])]))
