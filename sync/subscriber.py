"""A generator's side of the weights: reads a manifest, maps the snapshot it names, verifies the bytes."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from sync.manifest import DigestMismatch, Manifest, dtype_name, tensor_digest, whole_digest


def read_manifest(locator: str | Path) -> Manifest:
    """The manifest at `locator` (`Manifest.locator`); its snapshot is looked for beside it, wherever that is mounted.

    Raises FileNotFoundError when a newer version has replaced it, DigestMismatch when it contradicts itself.
    """
    locator = Path(locator)
    try:
        manifest = msgspec.json.decode(locator.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise DigestMismatch(f"{locator} is not a manifest: {error}") from None
    if whole_digest(manifest.tensors) != manifest.digest:
        raise DigestMismatch(f"{locator}: the list of tensors does not have the manifest's digest")
    return msgspec.structs.replace(manifest, path=str(locator.with_suffix(".safetensors")))


class Snapshot:
    """The tensors of a version, mapped: nothing is copied until it is read, and deleting the file does not end it."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises FileNotFoundError when the file is gone, DigestMismatch when it is not the size that it should be."""
        self.manifest = manifest
        with open(manifest.path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != manifest.num_bytes:
                raise DigestMismatch(f"{manifest.path} has {num_bytes} bytes, its manifest says {manifest.num_bytes}")
            try:
                # safe_open opens twice by name; between the two the publisher may delete the file.
                self._file = safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")
            except SafetensorError as error:
                raise DigestMismatch(f"{manifest.path} is not a snapshot: {error}") from None
        absent = {entry.name for entry in manifest.tensors}.symmetric_difference(self._file.keys())
        if absent:
            raise DigestMismatch(f"{manifest.path} and its manifest differ in the tensors {sorted(absent)[:3]}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order, as views of the file. Read only: writing to one has no effect."""
        for entry in self.manifest.tensors:
            tensor = self._file.get_tensor(entry.name)
            if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise DigestMismatch(f"{entry.name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, not {entry}")
            yield entry.name, tensor

    def verify(self) -> None:
        """Raises DigestMismatch, naming the first tensors whose bytes differ, unless the file is what was published."""
        expect_digests(self.manifest, {name: tensor_digest(tensor) for name, tensor in self.tensors()}, "the file")


def expect_digests(manifest: Manifest, digests: dict[str, str], holder: str) -> None:
    """Raises DigestMismatch unless `holder` has exactly the manifest's tensors; `digests`: by name."""
    differ = [entry.name for entry in manifest.tensors if digests.get(entry.name) != entry.digest]
    if differ:
        names = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
        raise DigestMismatch(
            f"version {manifest.version}: {len(differ)} of {len(manifest.tensors)} tensors in {holder} "
            f"do not have the published digest: {names}"
        )
