"""Translates names and layouts of a model's parameters between Hugging Face and Megatron, both ways.

Megatron keeps a layer's query, key and value in one matrix, interleaved by group of heads, and a gate with
its up-projection. Tensor parallelism then gives each rank equal parts along one dimension. This one table
serves loading, publication and checkpoints of every layout of ranks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from learners.model_files import ModelFiles


class ShardLayout(StrEnum):
    """How Megatron makes a matrix from Hugging Face's, and divides it over tensor-parallel ranks."""

    replicated = "replicated"
    rows = "rows"
    columns = "columns"
    gate_up = "gate_up"
    """Each rank has its rows of the gate, then its rows of the up-projection."""
    qkv = "qkv"
    """The rows go by group of heads: the queries of a group, its key, its value."""


def find_dimension(layout: ShardLayout) -> int | None:
    """Returns the dimension of Hugging Face's tensors along which the ranks have equal parts; None where
    each has the whole."""
    match layout:
        case ShardLayout.replicated:
            return None
        case ShardLayout.columns:
            return 1
        case _:
            return 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of Megatron's whole model."""

    name: str
    """Megatron's name, with numbers of layer and expert that count over the whole model."""
    sources: tuple[str, ...]
    """Names of its parts in Hugging Face's file."""
    layout: ShardLayout
    stage: int
    """The pipeline stage that holds it."""
    expert: int | None = None


LAYER = {
    "input_layernorm.weight": (ShardLayout.replicated, ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": (ShardLayout.qkv, [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_qkv.bias": (ShardLayout.qkv, [f"self_attn.{x}_proj.bias" for x in "qkv"]),
    "self_attention.q_layernorm.weight": (ShardLayout.replicated, ["self_attn.q_norm.weight"]),
    "self_attention.k_layernorm.weight": (ShardLayout.replicated, ["self_attn.k_norm.weight"]),
    "self_attention.linear_proj.weight": (ShardLayout.columns, ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": (ShardLayout.replicated, ["post_attention_layernorm.weight"]),
    "mlp.router.weight": (ShardLayout.replicated, ["mlp.gate.weight"]),
    "mlp.linear_fc1.weight": (ShardLayout.gate_up, ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": (ShardLayout.columns, ["mlp.down_proj.weight"]),
}
"""Parameters of one layer. The names in a model's file say which of them the model has."""

TE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names of norms in TransformerEngine, which holds a norm in the matrix that follows it."""

VALUE_HEAD = ("score.weight", "score.bias")
"""Parameters of a critic's head; a language model's folder has none."""

EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))"
)


class ParameterNames:
    """The parameters of one model by Megatron's name, in the order of its layers (`parameters`), and their
    shards."""

    def __init__(self, config: Any, files: ModelFiles, stages: int, critic: bool) -> None:
        """`config`: Hugging Face's. `stages`: number of pipeline stages, which have equally many layers.

        Raises ValueError where the files hold more parameters than Megatron's model, or fewer.
        """
        self._files = files
        self._groups = config.num_key_value_heads
        self._queries = config.num_attention_heads // config.num_key_value_heads
        self._experts = getattr(config, "num_experts", 0)
        last = stages - 1
        found = [
            Parameter(
                "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ShardLayout.rows, 0
            ),
            *self._list_layers(config.num_hidden_layers, stages),
            Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), ShardLayout.replicated, last),
        ]
        if critic:
            found += [Parameter(name, (name,), ShardLayout.replicated, last) for name in VALUE_HEAD]
        elif not config.tie_word_embeddings:
            found.append(Parameter("output_layer.weight", ("lm_head.weight",), ShardLayout.rows, last))
        self.parameters = {parameter.name: parameter for parameter in found}
        known = {source for parameter in found for source in parameter.sources} | {"lm_head.weight"}
        if unknown := sorted(
            name for name in files.entries.keys() - known if not name.endswith("rotary_emb.inv_freq")
        ):
            raise ValueError(
                f"model.path must hold no parameters but those that Megatron's model has, got {unknown[0]}"
            )
        optional = {*VALUE_HEAD} | ({"lm_head.weight"} if critic or config.tie_word_embeddings else set())
        if missing := sorted(known - files.entries.keys() - optional):
            raise ValueError(
                f"model.path must hold all parameters of its model, got none called {missing[0]}"
            )

    def _list_layers(self, number: int, stages: int) -> Iterator[Parameter]:
        for layer in range(number):
            stage, here, there = (
                layer * stages // number,
                f"decoder.layers.{layer}.",
                f"model.layers.{layer}.",
            )
            for name, (layout, sources) in LAYER.items():
                if there + sources[0] in self._files.entries:
                    yield Parameter(here + name, tuple(there + source for source in sources), layout, stage)
            for expert in range(self._experts):
                mine, its = f"{here}mlp.experts.{expert}.", f"{there}mlp.experts.{expert}."
                if f"{its}down_proj.weight" in self._files.entries:
                    up = (f"{its}gate_proj.weight", f"{its}up_proj.weight")
                    yield Parameter(f"{mine}linear_fc1.weight", up, ShardLayout.gate_up, stage, expert)
                    yield Parameter(
                        f"{mine}linear_fc2.weight",
                        (f"{its}down_proj.weight",),
                        ShardLayout.columns,
                        stage,
                        expert,
                    )

    def name_parameters(self, model: nn.Module, first_expert: int) -> dict[str, nn.Parameter]:
        """Returns this rank's own parameters by their names in the whole model, in that model's order.

        Megatron may hold a layer's experts in another order (TransformerEngine: first all of `linear_fc1`),
        which is not the same over ranks that divide the experts; the published order follows this one.
        `first_expert`: number of the rank's first expert.
        """
        named = {}
        for name, parameter in model.named_parameters():
            if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
                rest = TE_NORMS.get(match[2], match[2])
                if expert := EXPERT.fullmatch(rest):
                    number = first_expert + int(expert[1] or expert[4])
                    rest = f"mlp.experts.{number}.linear_fc{expert[2] or expert[3]}.weight"
                name = f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}.{rest}"
            named[name] = parameter
        order = {name: number for number, name in enumerate(self.parameters)}
        return dict(sorted(named.items(), key=lambda one: order.get(one[0], len(order))))

    def read_shard(self, parameter: Parameter, index: int, count: int) -> Tensor | None:
        """Returns shard `index` of `count` in the file's dtype, reading nothing else; None for a critic's
        head that the file lacks."""
        if self._lacks(parameter):
            return None
        dim = find_dimension(parameter.layout)
        parts = []
        for name in parameter.sources:
            size = 0 if dim is None else -(-self._files.entries[name].shape[dim] // count)
            places = () if dim is None else (*[slice(None)] * dim, slice(index * size, (index + 1) * size))
            parts.append(self._files.read_slice(name, *places))
        return self._merge_parts(parameter.layout, parts, count)

    def check_shape(self, parameter: Parameter, count: int, shape: torch.Size) -> None:
        """Raises ValueError where one of `count` shards has another shape in the files."""
        if self._lacks(parameter) or (found := self.find_shape(parameter, count)) == shape:
            return
        entries = {name: self._files.entries[name] for name in parameter.sources}
        told = ", ".join(f"{name} {list(one.shape)} in {one.file}" for name, one in entries.items())
        raise ValueError(
            f"one of {count} parts of {parameter.name} must have the shape {list(shape)} by the config.json "
            f"of model.path, got {list(found)} from {told}"
        )

    def _lacks(self, parameter: Parameter) -> bool:
        return parameter.name in VALUE_HEAD and parameter.name not in self._files.entries

    def find_shape(self, parameter: Parameter, count: int) -> torch.Size:
        """Returns the shape of the first of `count` shards, which is that of all where they divide it."""
        shapes = [self._files.entries[name].shape for name in parameter.sources]
        rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
        if parameter.layout is ShardLayout.columns:
            return torch.Size([rows, -(-rest[0] // count)])
        return torch.Size([-(-rows // count), *rest])

    def list_sources(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names and shapes of a parameter's parts in Hugging Face's file."""
        for source in self.parameters[name].sources:
            yield source, tuple(self._files.entries[source].shape)

    def cut_shard(self, layout: ShardLayout, whole: Sequence[Tensor], index: int, count: int) -> Tensor:
        """Makes Megatron's shard `index` of `count` from Hugging Face's tensors, in the order of
        `Parameter.sources`."""
        dim = find_dimension(layout)
        parts = whole if dim is None else [tensor.chunk(count, dim)[index] for tensor in whole]
        return self._merge_parts(layout, parts, count)

    def _merge_parts(self, layout: ShardLayout, parts: Sequence[Tensor], count: int) -> Tensor:
        """Makes one of `count` shards from its own parts of Hugging Face's tensors."""
        if layout is ShardLayout.qkv:
            groups = self._groups // count
            return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def join_shards(self, layout: ShardLayout, shards: Sequence[Tensor]) -> list[Tensor]:
        """Makes Hugging Face's tensors from all of Megatron's shards: the inverse of `cut_shard`."""
        match layout:
            case ShardLayout.replicated:
                return [shards[0]]
            case ShardLayout.rows:
                return [torch.cat(list(shards))]
            case ShardLayout.columns:
                return [torch.cat(list(shards), 1)]
            case ShardLayout.gate_up:
                gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
                return [torch.cat(gates), torch.cat(ups)]
            case ShardLayout.qkv:
                return self._split_groups(torch.cat(list(shards)), self._groups)

    def split_shard(self, layout: ShardLayout, shard: Tensor, count: int) -> list[Tensor]:
        """Returns what one of `count` shards has of each of Hugging Face's tensors, in the order of
        `Parameter.sources`: consecutive rows, or, of a matrix that is divided by columns, columns."""
        match layout:
            case ShardLayout.gate_up:
                return list(shard.chunk(2))
            case ShardLayout.qkv:
                return self._split_groups(shard, self._groups // count)
        return [shard]

    def _split_groups(self, shard: Tensor, groups: int) -> list[Tensor]:
        """Returns queries, keys and values of so many groups of heads."""
        by_group = shard.unflatten(0, (groups, -1))
        head = by_group.shape[1] // (self._queries + 2)
        return [part.flatten(0, 1) for part in by_group.split([self._queries * head, head, head], 1)]
