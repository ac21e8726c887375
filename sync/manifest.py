"""What a version's weights are: name, dtype, shape and digest of each tensor, their file, and one digest over all."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import xxhash
from msgspec import Meta

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
MAX_MANIFEST_BYTES = 64 << 20

HexDigest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""xxh3-128, hex."""
BoundedText = Annotated[str, Meta(max_length=4096)]
BoundedSize = Annotated[int, Meta(ge=0, le=1 << 50)]


class DigestMismatch(RuntimeError):
    """Weights are not what the manifest says. They must never be served."""


class EngineMismatch(DigestMismatch):
    """An engine does not hold what it was given. It must not go on before a later update succeeds."""


class TensorEntry(msgspec.Struct, frozen=True):
    name: BoundedText
    """Hugging Face parameter name."""
    dtype: BoundedText
    """Torch's name, e.g. `bfloat16`."""
    shape: Annotated[tuple[BoundedSize, ...], Meta(max_length=16)]
    digest: HexDigest
    """Digest of the raw little-endian bytes: see `sync.digest`."""


class AdapterRecipe(msgspec.Struct, frozen=True):
    """Of a version that holds low-rank adapters only: what they belong to. See `sync.adapter`."""

    base: BoundedText
    """Hugging Face folder of the base model, the same path on every host."""
    base_digest: HexDigest
    """Digest over (name, dtype, shape, digest) of the base model's tensors."""
    scaling: float
    """The product of an adapter's matrices counts so much."""
    dtype: BoundedText
    """Of the whole weights that engines serve."""


class Manifest(msgspec.Struct, frozen=True, tag=True):
    version: BoundedSize
    incarnation: BoundedText
    """Names the process life of the learner that published it."""
    path: BoundedText
    """Safetensors file, complete and immutable."""
    num_bytes: BoundedSize
    """Size of that file."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 20)]
    """In the file's order."""
    digest: HexDigest
    """Digest over (name, dtype, shape, digest) of all tensors in order, and over `adapter`."""
    adapter: AdapterRecipe | None = None
    """The tensors are adapters: engines take up what a host makes of them."""

    @property
    def locator(self) -> str:
        """The manifest's own file, beside the snapshot: what is announced, and what `read_manifest` takes."""
        return str(Path(self.path).with_suffix(".json"))


def parse_manifest(data: bytes | bytearray, where: str, name: str, digest: str = "") -> Manifest:
    """The manifest of the version `name` (`v<k>-<life>`). Raises DigestMismatch, saying `where` it is from, when it is none, is
    another version's, contradicts itself, or does not have the `digest` that was announced, if one was."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (
        ValueError,
        RecursionError,
    ) as error:  # msgspec's errors, text that is not UTF-8, nesting without end
        raise DigestMismatch(f"{where} is not a manifest: {error}") from None
    if name != f"v{manifest.version}-{manifest.incarnation}":
        raise DigestMismatch(
            f"{where} is the manifest of version {manifest.version} of {manifest.incarnation[:80]!r}"
        )
    dtypes = {entry.dtype for entry in manifest.tensors} | (
        {manifest.adapter.dtype} if manifest.adapter else set()
    )
    if unknown := dtypes - SAFETENSORS_DTYPES.keys():
        raise DigestMismatch(f"{where} has tensors of a kind that there is not: {sorted(unknown)[:3]}")
    if whole_digest(manifest.tensors, manifest.adapter) != manifest.digest:
        raise DigestMismatch(f"{where}: the list of tensors does not have the manifest's digest")
    if digest and manifest.digest != digest:
        raise DigestMismatch(f"{where} has the digest {manifest.digest}, but {digest} was announced")
    return manifest


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole_digest(tensors: Iterable[TensorEntry], adapter: AdapterRecipe | None = None) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([*tensors, *([] if adapter is None else [adapter])]))
