"""The manifest of a version: name, dtype, shape and digest of each tensor, their file, and one digest over
all."""

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
MAX_ENTRIES = 1 << 20
"""Most tensors of a version, and most parts of its file."""
MAX_SOURCES = 4096
"""Most hosts of a learner's ranks."""
ADDRESS = r"tcp://[\w.:\[\]-]{1,255}:\d{1,5}"

HexDigest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""An xxh3-128 as 32 hexadecimal digits."""
BoundedText = Annotated[str, Meta(max_length=4096)]
BoundedSize = Annotated[int, Meta(ge=0, le=1 << 50)]


class DigestMismatch(RuntimeError):
    """Weights differ from their manifest. They must never be served."""


class EngineMismatch(DigestMismatch):
    """An engine does not hold the weights that it was given. It must not go on before a later update
    succeeds."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a version."""

    name: BoundedText
    """Hugging Face parameter name."""
    dtype: BoundedText
    """Torch's name, e.g. `bfloat16`."""
    shape: Annotated[tuple[BoundedSize, ...], Meta(max_length=16)]
    digest: HexDigest
    """Digest of the raw little-endian bytes: see `sync.digest`."""


class AdapterRecipe(msgspec.Struct, frozen=True):
    """Base model and scaling of an adapter-only version, of which a host makes a whole model
    (`sync.adapters`)."""

    base: BoundedText
    """Hugging Face folder of the base model, the same path on every host."""
    base_digest: HexDigest
    """Digest over (name, dtype, shape, digest) of the base model's tensors."""
    scaling: float
    """Factor of the product of an adapter's matrices."""
    dtype: BoundedText
    """Dtype of the whole weights that engines serve."""


class PartSource(msgspec.Struct, frozen=True):
    """A host of the learner's ranks that has rows of a version, in a file of the version's name."""

    host: BoundedText
    """Its name, for people."""
    address: Annotated[str, Meta(pattern=rf"\A{ADDRESS}\Z")]
    """Where it serves its file."""


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the file, after those of the part before. They are the header, or of one tensor."""

    end: BoundedSize
    source: Annotated[int, Meta(ge=0, lt=MAX_SOURCES)]
    """Number of the host that has them."""
    digest: HexDigest
    """Xxh3-128 over the digests of its pieces: it is cut where chunks of the tensor begin (`sync.digest`)."""


class FileParts(msgspec.Struct, frozen=True):
    """Where the bytes of a version are that ranks on several hosts have written. Each host's file has holes
    where others have rows.

    No digest of the manifest covers it: wherever bytes come from, they have the tensors' digests or do not
    serve.
    """

    sources: Annotated[tuple[PartSource, ...], Meta(min_length=1, max_length=MAX_SOURCES)]
    """The first one has the header."""
    parts: Annotated[tuple[FilePart, ...], Meta(min_length=1, max_length=MAX_ENTRIES)]


class Manifest(msgspec.Struct, frozen=True, tag=True):
    """All that a host needs to verify a version."""

    version: BoundedSize
    incarnation: BoundedText
    """Name of the life of the learner that published it: no two processes have the same."""
    path: BoundedText
    """Safetensors file, complete and immutable."""
    num_bytes: BoundedSize
    """Size of that file."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_ENTRIES)]
    """The tensors, in the file's order."""
    digest: HexDigest
    """Digest over (name, dtype, shape, digest) of all tensors in order, and over `adapter`."""
    adapter: AdapterRecipe | None = None
    """Set when the tensors are adapters: engines take up the whole model that a host makes of them."""
    parts: FileParts | None = None
    """Set when no host has the whole file."""

    @property
    def locator(self) -> str:
        """Path of the manifest's own file, beside the snapshot. It is announced, and `read_manifest` reads
        it."""
        return str(Path(self.path).with_suffix(".json"))


def parse_manifest(data: bytes | bytearray, where: str, name: str, digest: str = "") -> Manifest:
    """Returns the manifest of the version `name` (`v<k>-<life>`).

    `where`: its origin, for messages. `digest`: the announced one, if any. Raises DigestMismatch when the
    data is no manifest, or is one of another version, contradicts itself, or does not have the announced
    digest.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        # ValueError: msgspec's errors, and text that is not UTF-8. RecursionError: nesting without end.
        raise DigestMismatch(f"{where} is not a manifest: {error}") from None
    if name != f"v{manifest.version}-{manifest.incarnation}":
        raise DigestMismatch(
            f"{where} is the manifest of version {manifest.version} of {manifest.incarnation[:80]!r}"
        )
    dtypes = {entry.dtype for entry in manifest.tensors}
    if manifest.adapter is not None:
        dtypes.add(manifest.adapter.dtype)
    if unknown := dtypes - SAFETENSORS_DTYPES.keys():
        raise DigestMismatch(f"{where} has tensors of a kind that there is not: {sorted(unknown)[:3]}")
    if whole_digest(manifest.tensors, manifest.adapter) != manifest.digest:
        raise DigestMismatch(f"{where}: the list of tensors does not have the manifest's digest")
    if manifest.parts is not None:
        ends = [part.end for part in manifest.parts.parts]
        sources = max(part.source for part in manifest.parts.parts)
        if ends != sorted(set(ends)) or ends[-1] != manifest.num_bytes:
            raise DigestMismatch(f"{where}: the parts do not make up {manifest.num_bytes} bytes")
        if sources >= len(manifest.parts.sources):
            raise DigestMismatch(f"{where} has a part of host {sources}, which it does not name")
    if digest and manifest.digest != digest:
        raise DigestMismatch(f"{where} has the digest {manifest.digest}, but {digest} was announced")
    return manifest


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole_digest(tensors: Iterable[TensorEntry], adapter: AdapterRecipe | None = None) -> str:
    """Returns the digest over all entries in order, and over the recipe, if any."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([*tensors, *([] if adapter is None else [adapter])]))
