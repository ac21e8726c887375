"""Low-rank adapters (LoRA: Hu et al., 2021), by peft: injected into a model before it is sharded, merged for publication."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.learner import LoraConfig

ADAPTER = "default"
PREFIX = "base_model.model."
"""What peft's files put before a model's own names."""


def inject(model: nn.Module, lora: LoraConfig) -> None:
    """Puts adapters into the model and freezes all else. Raises ValueError where `learner.lora.targets` names nothing in it."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = lora.targets if lora.targets == "all-linear" else [name.strip() for name in lora.targets.split(",")]
    try:
        inject_adapter_in_model(PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets), model, ADAPTER)
    except ValueError as error:
        raise ValueError(
            f"learner.lora.targets must be all-linear or names of the model's matrices, got {lora.targets!r}: {error}"
        ) from error


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name of a parameter in a model without adapters."""
    return name.replace(".base_layer.", ".")


def published_name(name: str) -> str:
    """The name of an adapter's matrix in peft's files."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, as long as this lasts."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """By the name of each adapted matrix W [out, in]: how to make W + B A · alpha / rank, sharded as W is."""

    def merge(layer: Any) -> Tensor:
        weight, a, b = (x.weight.detach() for x in (layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]))
        if not isinstance(weight, DTensor):
            return merge_into(weight, a, b, layer.scaling[ADAPTER])
        rows = merge_into(weight.to_local(), a.full_tensor(), b.to_local(), layer.scaling[ADAPTER])
        return DTensor.from_local(
            rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    def later(layer: Any) -> Callable[[], Tensor]:
        return lambda: merge(layer)

    return {f"{name}.base_layer.weight": later(layer) for name, layer in _layers(model)}


def merge_into(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W [out, in] + B [out, r] A [r, in] · scaling, in the dtype of W."""
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scaling)
