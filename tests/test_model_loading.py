"""Loading a model into shards: the numbers of `from_pretrained` on any number of ranks, each of which reads
and holds its own rows alone; and files that do not fit."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine_batches import SIZES, save_model
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from test_families import made
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    conversion_mapping,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter

from configs.parallel import FsdpConfig
from learners import model_source
from learners.engine import ModelKind
from learners.fsdp import FsdpEngine
from learners.megatron.engine import MegatronEngine
from learners.model_files import ModelFiles
from learners.world import World

Named = dict[str, Tensor]
MODELS = ["qwen2, tied", "qwen3", "experts, in files of bfloat16", "buffers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a model folder of each of `MODELS`."""
    folder = tmp_path_factory.mktemp("models")
    save_model("qwen2", folder).rename(folder / "qwen2, tied")
    save_model("qwen3", folder)
    made("deepseek_v3", folder / "buffers")
    experts = AutoModelForCausalLM.from_pretrained(save_model("qwen3_moe", folder), dtype=torch.bfloat16)
    experts.save_pretrained(folder / "experts, in files of bfloat16", max_shard_size="20KB")
    assert len(list((folder / "experts, in files of bfloat16").glob("*.safetensors"))) > 2
    return folder


def collect_all(model: Any) -> Named:
    """Returns copies of the whole parameters and buffers by name."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in named
    }


def load_reference(model: Path, kind: ModelKind = ModelKind.policy) -> Named:
    if kind is not ModelKind.critic:
        return collect_all(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(model, num_labels=1)
        options: dict[str, Any] = dict(config=config, dtype=torch.float32)
        return collect_all(AutoModelForTokenClassification.from_pretrained(model, **options))


def require_equal(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def raised_by(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- the numbers


def load_models(world: World, folder: Path) -> list[Named]:
    """Every model, a critic, and replicas where there are two ranks."""
    torch.manual_seed(world.rank)
    engines = [FsdpEngine(folder / name) for name in MODELS]
    engines += [FsdpEngine(folder / name, kind=ModelKind.critic) for name in MODELS[:3]]
    engines.append(FsdpEngine(folder / MODELS[2], layout=FsdpConfig(replicas=world.size, cpu_offload=True)))
    return [collect_all(engine._model) for engine in engines]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_shards_hold_what_hugging_face_loads_to_the_bit(number: int, folder: Path, tmp_path: Path) -> None:
    """Tied weights, experts that are one by one in the files, buffers, a critic's head that is drawn. A layer
    of four experts leaves the last of three ranks without one."""
    expected = [load_reference(folder / name) for name in MODELS]
    expected += [load_reference(folder / name, ModelKind.critic) for name in MODELS[:3]]
    expected.append(expected[2])
    for found in on_ranks(number, load_models, tmp_path, folder):
        for one, reference in zip(found, expected, strict=True):
            require_equal(one, reference)


def load_elsewhere(world: World, own: list[Path], others: list[Path]) -> list[Named]:
    """The models whose files only the first of the ranks has."""
    pairs = zip(own, others, strict=True)
    return [collect_all(FsdpEngine(mine if world.rank == 0 else other)._model) for mine, other in pairs]


def test_a_host_that_lacks_the_files_or_holds_another_model_gets_the_first_ranks(
    folder: Path, tmp_path: Path
) -> None:
    own, others = [folder / MODELS[2], folder / "qwen3", folder / "buffers"], []
    for number, model in enumerate(own):
        others.append(tmp_path / f"other-{number}")
        others[-1].mkdir()
        shutil.copy(model / "config.json", others[-1])
    tensors = load_file(folder / "qwen3" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, others[1] / "model.safetensors")
    (others[2] / "model.safetensors").write_bytes(b"half a file")
    with patch.object(model_source, "BUCKET_BYTES", 1000):
        for found in on_ranks(3, load_elsewhere, tmp_path / "ranks", own, others):
            for one, model in zip(found, own, strict=True):
                require_equal(one, load_reference(model))


@contextmanager
def other_tables() -> Any:
    """Lets phi3 have its gate and up-projection apart in its files, and llama have them in one matrix."""
    apart, fused = ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up_proj.weight"
    get_checkpoint_conversion_mapping("llama")  # fills the cache
    tables = {
        "phi3": [WeightConverter(apart, fused, [Concatenate(dim=0)])],
        "llama": [WeightConverter(fused, apart, [Chunk(dim=0)])],
    }
    with patch.dict(conversion_mapping._checkpoint_conversion_mapping_cache, tables):
        yield


def load_converted(world: World, models: list[Path]) -> list[Named]:
    with other_tables():
        return [collect_all(FsdpEngine(model)._model) for model in models]


def test_what_transformers_makes_of_several_tensors_or_several_of_one_is_cut_into_shards(
    folder: Path, tmp_path: Path
) -> None:
    models = [made("phi3", tmp_path / "phi3"), tmp_path / "llama"]
    shutil.copytree(save_model("llama", folder), models[1])
    with other_tables():
        for model in models:  # writes files by the tables
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
        expected = [load_reference(model) for model in models]
    assert "model.layers.0.mlp.gate_proj.weight" in load_file(models[0] / "model.safetensors")
    assert "model.layers.0.mlp.gate_up_proj.weight" in load_file(models[1] / "model.safetensors")
    for found in on_ranks(3, load_converted, tmp_path / "ranks", models):
        for one, reference in zip(found, expected, strict=True):
            require_equal(one, reference)


# ---- what a rank reads, and holds


@contextmanager
def counted_reads(reads: list[int]) -> Any:
    """Appends the number of elements of each read."""
    read = ModelFiles.read_slice

    def count(files: ModelFiles, name: str, *places: slice) -> Tensor:
        tensor = read(files, name, *places)
        reads.append(tensor.numel())
        return tensor

    # A fingerprint looks at a few elements more.
    with (
        patch.object(ModelFiles, "read_slice", count),
        patch.object(ModelFiles, "take_fingerprint", lambda _: "the same"),
    ):
        yield


def count_reads(world: World, make: Callable[..., Any], model: Path, options: dict[str, Any]) -> int:
    reads: list[int] = []
    with counted_reads(reads):
        make(model, **options)
    return sum(reads)


@pytest.mark.parametrize("name", MODELS[:3])
def test_the_ranks_read_every_element_once_and_each_an_even_part(
    name: str, folder: Path, tmp_path: Path
) -> None:
    files = ModelFiles(folder / name)
    whole = sum(files.read_slice(one).numel() for one in files.entries)
    for number in (1, 2):
        found = on_ranks(number, count_reads, tmp_path / str(number), FsdpEngine, folder / name, {})
        assert sum(found) == whole
        assert max(found) - min(found) < 0.05 * whole


@pytest.mark.parametrize(
    ("model", "options", "share"),
    [
        ("qwen3", {"tensor_parallel": 2}, 1 / 2),
        ("qwen3", {"pipeline_parallel": 2}, 1 / 2),
        ("experts, in files of bfloat16", {"tensor_parallel": 2, "expert_parallel": 2}, 1 / 2),
    ],
)
def test_a_rank_of_megatron_reads_its_own_parts_alone(
    model: str, options: dict[str, Any], share: float, folder: Path, tmp_path: Path
) -> None:
    """Norms and routers, which every rank has, are few. On four ranks experts are dealt out to two, and the
    rest is cut in two."""
    number = 4 if "expert_parallel" in options else 2
    files = ModelFiles(folder / model)
    whole = sum(files.read_slice(one).numel() for one in files.entries)
    for found in on_ranks(number, count_reads, tmp_path, MegatronEngine, folder / model, options):
        assert 0.9 * share * whole < found < 1.1 * share * whole


def read_anonymous_bytes() -> int:
    """Returns the memory of this process that is no page of a file."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def measure_peak(world: World, model: Path) -> int:
    """Returns by how many bytes a frozen model needs more at most, from before it is loaded."""
    before, ended = read_anonymous_bytes(), threading.Event()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, read_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = FsdpEngine(model, kind=ModelKind.frozen, on_progress=lambda: time.sleep(0.001))
    ended.set()
    watcher.join()
    peak = max(peak, read_anonymous_bytes())
    del engine
    return peak - before


def test_no_rank_holds_much_more_than_its_shard_while_it_loads(tmp_path: Path) -> None:
    """A model of 160 MB in float32: pages of its files, which the ranks of a host share, do not count."""
    sizes = SIZES | dict(vocab_size=16_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    config = Qwen3Config(**sizes, head_dim=128, tie_word_embeddings=False)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    weights = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in model.named_parameters()}
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    whole = 4 * sum(one.numel() for one in weights.values())
    del weights
    assert whole > 150e6
    for number, bound in ((1, 1.25), (2, 0.75)):
        for peak in on_ranks(number, measure_peak, tmp_path / str(number), tmp_path):
            assert 0.9 / number < peak / whole < bound


# ---- files that do not fit


def spoil_tensors(change: Callable[[Named], Any]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")

    return spoil


def replace_by_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def replace_by_index(model: Path) -> None:
    (model / "model.safetensors").unlink()
    where = {"weight_map": {"lm_head.weight": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(where))


def cut_file(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def quantize(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


NORM, UP, EXPERT = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.2."
WRONG: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing": (
        "qwen3", spoil_tensors(lambda held: held.pop(NORM)),
        f"hold all tensors of Qwen3ForCausalLM, got none called {NORM}",
    ),
    "unknown": (
        "qwen3", spoil_tensors(lambda held: held.update({"model.more.weight": torch.ones(2)})),
        "hold no tensors but those of Qwen3ForCausalLM, got model.more.weight in model.safetensors",
    ),
    "shape": (
        "qwen3", spoil_tensors(lambda held: held.update({UP: torch.ones(49, 32)})),
        f"have the shape [48, 32] by its config.json, got [49, 32] from {UP} in model.safetensors",
    ),
    "dtype": (
        "qwen3", spoil_tensors(lambda held: held.update({UP: torch.ones(48, 32).to(torch.float8_e5m2)})),
        f"got {UP} of F8_E5M2 in ",
    ),
    "expert": (
        "qwen3_moe", spoil_tensors(lambda held: held.pop(f"{EXPERT}down_proj.weight")),
        "have the shape [4, 32, 24] by its config.json, got [3, 32, 24] from "
        "model.layers.1.mlp.experts.0.down_proj.weight and 2 others in model.safetensors",
    ),
    "half an expert": (
        "qwen3_moe", spoil_tensors(lambda held: held.pop(f"{EXPERT}up_proj.weight")),
        "model.layers.1.mlp.experts.gate_up_proj of model.path must be what transformers makes of",
    ),
    "pickle": ("qwen3", replace_by_pickle, ").save_pretrained(FOLDER) writes safetensors"),
    "index": ("qwen3", replace_by_index, "model-1.safetensors must be a whole safetensors file, got: "),
    "cut": ("qwen3", cut_file, "model.safetensors must be a whole safetensors file, got: "),
    "quantized": ("qwen3", quantize, "hold weights that are not quantized"),
}  # fmt: skip


def load_each(world: World, models: list[Path]) -> list[str]:
    return [raised_by(lambda model=model: FsdpEngine(model)) for model in models]  # type: ignore[misc]


def test_files_that_do_not_fit_are_named_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    models = []
    for name, (model, spoil, _) in WRONG.items():
        models.append(tmp_path / name)
        shutil.copytree(folder / model, models[-1])
        spoil(models[-1])
    for told in on_ranks(2, load_each, tmp_path / "ranks", models):
        for text, (_, _, expected) in zip(told, WRONG.values(), strict=True):
            assert text.startswith("ValueError: ") and expected in text, text


def load_spoiled(world: World, own: Path, other: Path, kind: str, failing: int) -> list[str]:
    """Returns what is raised where a file cannot be read on one rank: by FSDP, by Megatron where all ranks
    have the files, and then by FSDP where it can be read again."""
    error = ValueError("no such rows") if kind == "ValueError" else OSError("the disk is gone")
    read = ModelFiles.read_slice

    def fail(files: ModelFiles, name: str, *places: slice) -> Tensor:
        if name == "model.layers.1.self_attn.o_proj.weight" and world.rank == failing:
            raise error
        return read(files, name, *places)

    model, told = own if world.rank == 0 else other, []
    with patch.object(ModelFiles, "read_slice", fail), patch.object(ModelFiles, "take_fingerprint", len_of):
        told.append(raised_by(lambda: FsdpEngine(model)))
        if own == other:
            told.append(raised_by(lambda: MegatronEngine(model, tensor_parallel=2)))
    return [*told, raised_by(lambda: FsdpEngine(model))]


def len_of(files: ModelFiles) -> str:
    return str(len(files.entries))


@pytest.mark.parametrize(
    ("kind", "failing", "is_sent"), [("OSError", 1, False), ("ValueError", 1, False), ("OSError", 0, True)]
)
def test_a_rank_that_cannot_read_tells_the_others(
    kind: str, failing: int, is_sent: bool, folder: Path, tmp_path: Path
) -> None:
    other = folder / "qwen3"
    if is_sent:
        other = tmp_path / "without"
        other.mkdir()
        shutil.copy(folder / "qwen3" / "config.json", other)
    ranks = on_ranks(2, load_spoiled, tmp_path / "ranks", folder / "qwen3", other, kind, failing)
    text = "no such rows" if kind == "ValueError" else "the disk is gone"
    for rank, (*failed, then) in enumerate(ranks):
        assert then == "" and len(failed) == (1 if is_sent else 2)
        for told in failed:
            if rank == failing:
                assert told == f"{kind}: {text}"
            else:
                assert told.startswith("ValueError: " if kind == "ValueError" else "RuntimeError: ")
                assert told.endswith(f"could not load the model: {kind}: {text}")
                assert f"rank {failing} on " in told


def load_unlike(world: World, own: Path, other: Path) -> list[str]:
    """Returns what Megatron raises where the second host holds another model, and where one stage's file is
    wrong."""
    options: dict[str, Any] = {"pipeline_parallel": 2}
    return [
        raised_by(lambda: MegatronEngine(own if world.rank == 0 else other, **options)),
        raised_by(lambda: MegatronEngine(other, **options)),
    ]


def test_megatron_names_a_host_with_another_model_and_a_stage_with_a_wrong_shape(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "qwen3", tmp_path / "other")
    spoil_tensors(lambda held: held.update({UP: torch.ones(49, 32)}))(tmp_path / "other")
    first, second = on_ranks(2, load_unlike, tmp_path / "ranks", folder / "qwen3", tmp_path / "other")
    rule = "ValueError: model.path must be the same model on every host of the learner's ranks, got "
    assert first[0].startswith(rule) and second[0].startswith(rule)
    shape = "must have the shape [96, 32] by the config.json of model.path, got [97, 32] from "
    assert second[1].startswith("ValueError: ") and shape in second[1] and f"{UP} [49, 32] in" in second[1]
    assert first[1].startswith("ValueError: rank 1 on ") and shape in first[1]


LACKING = {
    "lm_head.weight": "got none called lm_head.weight",
    "model.layers.1.self_attn.q_norm.": "got none for decoder.layers.1.self_attention.q_layernorm.weight",
    "model.layers.1.": "got none for decoder.layers.1.",
}
"""By the beginning of the names that a folder of qwen3 lacks, what Megatron says. The second of two stages
has them all."""


def load_lacking(world: World, models: list[Path]) -> list[str]:
    return [raised_by(partial(MegatronEngine, model, pipeline_parallel=2)) for model in models]


def test_megatron_names_what_the_files_of_one_stage_lack_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    models = []
    for number, lacking in enumerate(LACKING):
        models.append(tmp_path / str(number))
        shutil.copytree(folder / "qwen3", models[-1])
        path = models[-1] / "model.safetensors"
        held = {name: one for name, one in load_file(path).items() if not name.startswith(lacking)}
        save_file(held, path)
    for told in on_ranks(2, load_lacking, tmp_path / "ranks", models):
        for text, expected in zip(told, LACKING.values(), strict=True):
            assert text.startswith("ValueError: ") and expected in text, text


# ---- time


def load_slowly(world: World, model: Path) -> tuple[float, int]:
    """Returns the seconds until the engine is there, where the second rank reads for longer than a collective
    may take, and how often the rank has told that it gets on."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    read, began, told = ModelFiles.read_slice, time.monotonic(), []

    def read_slowly(files: ModelFiles, name: str, *places: slice) -> Tensor:
        time.sleep(5 if world.rank == 1 and name == "model.norm.weight" and len(told) > 5 else 0)
        return read(files, name, *places)

    with patch.object(ModelFiles, "read_slice", read_slowly):
        FsdpEngine(model, on_progress=lambda: told.append(0))
    return time.monotonic() - began, len(told)


def test_a_rank_that_reads_for_longer_than_a_collective_may_take_is_waited_for(
    folder: Path, tmp_path: Path
) -> None:
    first, second = on_ranks(2, load_slowly, tmp_path, folder / "qwen3")
    assert min(first[0], second[0]) >= 5
    assert first[1] > second[1] > 5, "the first rank tells that it waits"
