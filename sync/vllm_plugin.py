"""What runs inside vLLM's worker: takes up snapshots in place, and attests what the engine's parameters then hold.

vLLM keeps weights in a layout of its own: q, k and v in one matrix, gate and up in another, the vocabulary padded to a
multiple of 64 rows, a tied head not at all. `Layout` finds each published tensor in there again, so that what the
engine holds can be digested tensor by tensor and compared with what the learner published.

Tensor parallel size 1 only: a shard does not hold the tensors that were digested. Written against vLLM 0.32.
"""

from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sync.manifest import DigestMismatch, Manifest, TensorEntry, dtype_name, tensor_digest
from sync.subscriber import Snapshot, expect_digests


def keep_weights_unpacked() -> None:
    """CPU only, before the model is built: linear layers keep their weights as plain parameters.

    Otherwise vLLM moves them into packed copies that nothing can be compared with, and that leave a tied head stale
    after an update. The names are private to vLLM 0.32; `WeightSync.prepare_model` notices if they lose their effect.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as linear

    ops._supports_onednn = False
    linear._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0


def steady_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, K] -> [T, N]: a linear layer in which no row's result depends on how many others there are.

    In float32 MKL sums in another order below 16 rows than above (found for K from 64 to 4096 and up to 2048 rows);
    padding to 16 is what makes a sample the same, to the last bit, alone and in a crowd.
    """
    missing = 16 - len(x)
    if missing <= 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]


class WeightSync:
    """vLLM's `worker_extension_cls`: its methods become the worker's, called through `collective_rpc`."""

    model_runner: Any

    def prepare_model(self) -> None:
        """Once, after the model is built: sees that weights are where updates reach them; makes CPU linears steady."""
        model = self.model_runner.get_model()
        packed = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if packed:
            raise RuntimeError(f"vLLM has packed weights away, they cannot be updated nor attested: {packed[:3]}")
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = steady_linear

    def load_snapshot(self, manifest: dict[str, Any]) -> None:
        """Copies a snapshot into the parameters, and verifies that they now hold what was published.

        `manifest`: a `Manifest` as builtins. Raises FileNotFoundError, the parameters untouched, when the file is gone;
        DigestMismatch, the parameters in an unknown state, when they do not end up with the published digests.
        """
        expected = msgspec.convert(manifest, Manifest)
        snapshot = Snapshot(expected)
        model = self.model_runner.get_model()
        layout = Layout(model, expected)
        with torch.no_grad():
            model.load_weights(snapshot.tensors())
        held = layout.digests()
        try:
            expect_digests(expected, held, "the engine")
        except DigestMismatch:
            snapshot.verify()  # says so if it is the file that is wrong
            raise

    def held_digests(self, manifest: dict[str, Any]) -> dict[str, str]:
        """Digest of what the parameters hold now, by the names of the manifest's tensors."""
        return Layout(self.model_runner.get_model(), msgspec.convert(manifest, Manifest)).digests()


class Layout:
    """Where each tensor of a manifest lies in a vLLM model: some rows of some parameter."""

    def __init__(self, model: nn.Module, manifest: Manifest) -> None:
        """Raises DigestMismatch unless the manifest's tensors make up the model's parameters, all of them."""
        self._packed = {
            part: (merged, parts)
            for merged, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied head under both its names
        vocabulary = {
            f"{name}.weight": module.org_vocab_size
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, VocabParallelEmbedding)
        }
        self._views: dict[str, torch.Tensor] = {}
        rows: dict[int, int] = {}
        for entry in manifest.tensors:
            name, first = self._place(entry)
            self._views[entry.name] = self._view(entry, name, first)
            of = id(self._parameters[name])
            rows[of] = max(rows.get(of, 0), first + (entry.shape[0] if entry.shape else 1))
        lacking = [
            name
            for name, parameter in self._parameters.items()
            if rows.get(id(parameter), 0) != vocabulary.get(name, len(parameter) if parameter.dim() else 1)
        ]
        if lacking:
            raise DigestMismatch(f"version {manifest.version} does not fill parameters of the engine: {lacking[:3]}")

    def digests(self) -> dict[str, str]:
        return {name: tensor_digest(view) for name, view in self._views.items()}

    def _place(self, entry: TensorEntry) -> tuple[str, int]:
        """The parameter that holds a tensor, and its first row there."""
        *module, leaf, kind = entry.name.rsplit(".", 2)
        if leaf not in self._packed:
            return entry.name, 0
        merged, parts = self._packed[leaf]
        siblings = [".".join([*module, part, kind]) for part in parts[: parts.index(leaf)]]
        lacking = [name for name in siblings if name not in self._entries]
        if lacking:
            raise DigestMismatch(f"the snapshot has {entry.name} but lacks {lacking}")
        return ".".join([*module, merged, kind]), sum(self._entries[name].shape[0] for name in siblings)

    def _view(self, entry: TensorEntry, name: str, first: int) -> torch.Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            raise DigestMismatch(f"the engine's model has no place for the published {entry.name}")
        view = parameter.data[first : first + entry.shape[0]] if entry.shape else parameter.data
        if (dtype_name(view.dtype), tuple(view.shape)) != (entry.dtype, entry.shape):
            raise DigestMismatch(
                f"{entry.name} was published as {entry.dtype} {entry.shape}, "
                f"the engine holds {dtype_name(view.dtype)} {tuple(view.shape)}"
            )
        return view
