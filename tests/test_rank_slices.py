"""The parts that ranks hold of a tensor, and the ranks' answers, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from generators.tensor_parallel import check_heads
from generators.worker_names import SHARED_MEMORY, WorkerNames
from sync.digest import tensor_digest
from sync.engine_layout import EngineLayout, ModelStructure
from sync.manifest import DigestMismatch, EngineMismatch, Manifest, TensorEntry
from sync.publisher import Publisher
from sync.rank_answers import answer_call, read_answers
from sync.rank_slices import CHUNK_BYTES, RankSlice, copy_pieces, digest_pieces, join_slices
from sync.snapshot import Snapshot
from sync.stream import whole_parts


@given(dim=st.sampled_from([0, 1]), ranks=st.sampled_from([1, 2, 3]), size=st.integers(1, 5))
def test_the_parts_of_all_ranks_are_the_whole_tensor_each_element_once(
    dim: int, ranks: int, size: int
) -> None:
    shape = [7, 7]
    shape[dim] = ranks * size
    tensor = torch.arange(shape[0] * shape[1]).view(shape)
    slices = [RankSlice(dim, ranks * size, ((rank * size, size),)) for rank in range(ranks)]
    parts = [one.cut_tensor(tensor)[0] for one in slices]
    assert torch.equal(torch.cat(parts, dim), tensor)
    assert all(one.cut_shape(shape) == part.shape for one, part in zip(slices, parts, strict=True))
    assert not slices[0].fits_shape([*shape[:dim], shape[dim] + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copied_pieces_have_the_digest_of_their_place_whatever_its_strides_and_size(
    dtype: torch.dtype,
) -> None:
    tensor = torch.randint(0, 255, (3000, 130)).to(dtype)  # more than a chunk of every dtype but the last
    assert tensor[0].numel() * tensor.itemsize < CHUNK_BYTES
    for pieces in ([tensor[5:900], tensor[2000:2001]], [tensor[:, 7:99]], [tensor[:0]], [tensor[0, 0]]):
        place = torch.zeros_like(torch.cat(pieces) if pieces[0].dim() else pieces[0])
        published, held = copy_pieces(pieces, place)
        assert published == held == digest_pieces(pieces) == tensor_digest(place)
        assert torch.equal(place, torch.cat(pieces) if pieces[0].dim() else pieces[0])


class FusedModel(nn.Module):
    """Rank 1 of 2: two rows of each half of `up`, whose halves are published in one tensor or in two."""

    packed_modules_mapping = {"up": ["gate", "rise"]}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4, bias=False)


@pytest.mark.parametrize("names", [["up.weight"], ["gate.weight", "rise.weight"]])
def test_a_merged_layer_takes_its_rows_of_each_part_however_the_parts_were_published(
    names: list[str], tmp_path: Path
) -> None:
    model = FusedModel()
    slices = (RankSlice(0, 4, ((2, 2),), 0), RankSlice(0, 4, ((2, 2),), 2))
    assert join_slices(slices) == RankSlice(0, 8, ((2, 2), (6, 2)), 0)
    whole = torch.arange(24.0).view(8, 3)
    publisher = Publisher(tmp_path / "weights", "x")
    weights = dict(zip(names, whole.chunk(len(names)), strict=True))
    snapshot = Snapshot(publisher.publish_version(0, whole_parts(weights)))
    structure = ModelStructure({}, {}, [], {"up.weight": slices})
    layout = EngineLayout(model, structure, snapshot.manifest)
    with torch.no_grad():
        published, held = layout.copy_parts(snapshot)
    assert torch.equal(model.up.weight, whole[[2, 3, 6, 7]])
    assert published == held == layout.held_digests() == layout.part_digests(snapshot)
    publisher.close()

    def refuse(*shapes: tuple[str, tuple[int, ...]]) -> str:
        entries = tuple(TensorEntry(name, "float32", shape, "0" * 32) for name, shape in shapes)
        with pytest.raises(DigestMismatch) as caught:
            EngineLayout(model, structure, Manifest(0, "x", "", 0, entries, ""))
        return str(caught.value)

    assert "lacks ['gate.weight']" in refuse(("rise.weight", (4, 3)))
    assert "does not fill parameters" in refuse(("gate.weight", (4, 3)))
    assert "up.weight was published as (6, 3), the engine divides 8" in refuse(("up.weight", (6, 3)))


def test_answers_keep_the_kind_of_an_error_and_the_gravest_of_all_ranks_is_raised() -> None:
    def raising(error: Exception) -> Any:
        def call() -> None:
            raise error

        return answer_call(call)

    fine, gone = answer_call(lambda: 7), raising(FileNotFoundError("gone"))
    damaged, mixed = raising(DigestMismatch("damaged")), raising(EngineMismatch("mixed"))
    assert read_answers([fine, fine]) == [7, 7]
    for answers, kind, says in (
        ([gone, fine, gone], FileNotFoundError, "^rank 0 and 2: gone$"),
        ([gone, damaged], DigestMismatch, "^rank 1: damaged$"),
        ([damaged, mixed], EngineMismatch, "^rank 1: mixed$"),
        ([mixed, raising(KeyError("bug"))], RuntimeError, "rank 1: KeyError.'bug'.\nTraceback"),
    ):
        with pytest.raises(kind, match=says) as caught:
            read_answers(answers)
        assert type(caught.value) is kind


def test_names_of_a_killed_start_are_swept_away_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    living = WorkerNames(tmp_path)
    (living.folder / "vllm_dist_test-living").touch()
    dead = tmp_path / "slipstream-engine-dead"
    dead.mkdir()
    (dead / "vllm_dist_test-dead").touch()
    shared = [SHARED_MEMORY / f"vllm_dist_test-{name}-tp:0" for name in ("living", "dead")]
    for path in shared:
        path.touch()
    another = WorkerNames(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.folder, another.folder])
    assert [path.exists() for path in shared] == [True, False]
    for names in (living, another, another):
        names.remove()
    assert not list(tmp_path.iterdir()) and not shared[0].exists()


@pytest.mark.parametrize(
    ("config", "ranks", "says"),
    [
        ({"num_attention_heads": 4}, 3, "divide the number of attention heads, got 3 and 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "key-value heads, .* got 2 and 3"),
        ({"num_attention_heads": 4, "moe_intermediate_size": 6}, 4, "size of an expert, got 4 and 6"),
        (
            {"text_config": {"num_attention_heads": 4, "intermediate_size": 9}},
            2,
            "intermediate size, got 2 and",
        ),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 12}, 4, None),
        ({"num_attention_heads": 5}, 1, None),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_its_configuration(
    config: dict[str, Any], ranks: int, says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if says is None:
        check_heads(tmp_path, ranks)
        return
    with pytest.raises(ValueError, match=f"generators.tensor_parallel must .*{says}"):
        check_heads(tmp_path, ranks)
