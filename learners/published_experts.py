"""The experts of a layer that a model holds as one tensor [E, ...], under the names that they are published
with.

transformers makes such tensors of a file's many when it loads a model, and takes them apart to save it
(`revert_weight_conversion`). Each rank takes apart the experts that it holds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TakeApart = Callable[[Tensor], Mapping[str, Tensor]]
"""Takes apart a tensor of one or more experts, which it counts from 0; returns their tensors by name."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    take_apart: TakeApart
    names: tuple[tuple[str, ...], ...]
    """By expert, the names of its tensors, in one order."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of an expert's tensors, in that order."""

    def split_experts(self, first: int, experts: Tensor, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and tensors of experts [n, ...], the first of which has this number. As many are
        taken apart at a time as there are in `bucket_bytes`, or one."""
        step = max(1, bucket_bytes // max(1, experts[:1].nbytes))
        for begin in range(0, len(experts), step):
            group = experts[begin : begin + step]
            parts = self.take_apart(group)
            for number in range(len(group)):
                of_expert = self.names[first + begin + number]
                for name, its_name in zip(self.names[number], of_expert, strict=True):
                    yield its_name, parts[name]

    def list_from(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names and shapes of the experts from this number on."""
        for of_expert in self.names[number:]:
            yield from zip(of_expert, self.shapes, strict=True)


def find_expert_names(take_apart: TakeApart, shape: torch.Size) -> ExpertNames | None:
    """Returns the names for a stack of experts; None for a tensor [E, ...] that is none: taken apart row by
    row it is not the same tensors."""
    one, whole = (
        {name: tuple(tensor.shape) for name, tensor in take_apart(torch.empty(size, device="meta")).items()}
        for size in ((1, *shape[1:]), tuple(shape))
    )
    digit = ".0."
    if not all(name.count(digit, name.find("experts")) == 1 for name in one):
        return None
    names = tuple(tuple(_rename(name, digit, f".{number}.") for name in one) for number in range(shape[0]))
    renamed = {name: form for each in names for name, form in zip(each, one.values(), strict=True)}
    return ExpertNames(take_apart, names, tuple(one.values())) if renamed == whole else None


def _rename(name: str, old: str, new: str) -> str:
    """Replaces the number of an expert, the last one in a name."""
    before, _, after = name.rpartition(old)
    return before + new + after
