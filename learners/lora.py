"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv 2106.09685), by peft: injected into a model before it is
sharded, merged for publication."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.parallel import LoraConfig
from learners.engine import AbsentEngine, Engine
from learners.packing import Packed
from learners.shards import sharded_like
from sync.adapters import PEFT_PREFIX, merge_into

ADAPTER = "default"


@runtime_checkable
class Adapted(Protocol):
    """An engine whose adapters can be switched off."""

    def without_adapters(self) -> AbstractContextManager[None]: ...


class BaseModelEngine(AbsentEngine):
    """The model under an engine's adapters, as the run began with it: a frozen reference that needs no memory
    of its own.

    It has nothing to train, to publish or to write.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, Adapted), "only an engine with adapters can do without them"
        self._engine, self._without_adapters = engine, engine.without_adapters
        self.share = engine.share

    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        with self._without_adapters():
            # A reference's routers choose by themselves: no replay of recorded experts.
            if microbatches and microbatches[0].experts is not None:
                microbatches = [replace(packed, experts=None) for packed in microbatches]
            return self._engine.infer(microbatches)


def inject_adapters(model: Any, lora: LoraConfig) -> None:
    """Puts adapters into the model, which has no memory (`meta`), and freezes all else. Raises ValueError
    where a target names no linear layer.

    Adapters are drawn in the host's memory.

    `all-linear` is every linear layer except the head, whose forward pass is the engine's own. Experts that a
    model holds as one tensor are no linear layers.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    ]
    targets = linear
    if lora.targets != "all-linear":
        wanted = [target.strip() for target in lora.targets.split(",")]
        if wrong := [target for target in wanted if not any(_ends_with(name, target) for name in linear)]:
            raise ValueError(
                "learner.lora.targets must be all-linear or names of the model's linear layers, "
                f"divided by commas ({', '.join(sorted({name.rpartition('.')[2] for name in linear}))}), "
                f"got {wrong[0]!r} in {lora.targets!r}"
            )
        targets = [name for name in linear if any(_ends_with(name, target) for target in wanted)]
    assert lora.rank is not None, "without a rank there are no adapters"
    for name in targets:
        # peft moves adapters to where the matrix is: one element, seen everywhere, stands for it on the host.
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(torch.zeros(1).expand(layer.weight.shape))
    # Full names, because peft's own matching would also take a head or an expert whose name ends alike.
    inject_adapter_in_model(
        PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets), model, ADAPTER
    )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """Returns the name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def published_name(name: str) -> str:
    """Returns the name of an adapter's matrix in peft's files."""
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def _find_adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Switches the model's adapters off while the context lasts."""
    layers = [layer for _, layer in _find_adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def make_merges(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Returns, by the name of each adapted matrix W [out, in], a function that makes W + B A · alpha / rank,
    sharded as W is."""

    def merge_layer(layer: Any) -> Tensor:
        weight, a, b = (
            x.weight.detach() for x in (layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
        )
        if not isinstance(weight, DTensor):
            return merge_into(weight, a, b, layer.scaling[ADAPTER])
        rows = merge_into(weight.to_local(), a.full_tensor(), b.to_local(), layer.scaling[ADAPTER])
        return sharded_like(weight, rows)

    return {
        f"{name}.base_layer.weight": partial(merge_layer, layer)
        for name, layer in _find_adapted_layers(model)
    }
