"""Weights leave a sharded model a bucket at a time, each rank's own rows, without a copy."""

from pathlib import Path

import pytest
import torch
from ranks import gather_weights, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from learners.shards import find_own_rows
from learners.world import World
from sync import stream
from sync.stream import collect_tensors, stream_rows, stream_tensor, whole_parts

BUCKET = 1 << 12


def make_tensors() -> dict[str, torch.Tensor]:
    """Returns tensors whose rows the ranks divide evenly, unevenly, or so that some ranks get none."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (64, 33), "uneven": (37, 50), "few": (2, 700), "vector": (129,), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stream_all(ranks: World) -> None:
    stream.SHARED_BYTES = 0  # also few rows are divided among those who hold them
    rank, world = ranks.rank, ranks.size
    flat = init_device_mesh("cpu", (world,))
    hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    cases: list[tuple[str, object, list[object]]] = [
        ("sharded", flat, [Shard(0)]),
        ("replicated", flat, [Replicate()]),
        ("hybrid", hybrid, [Replicate(), Shard(0)]),
    ]
    for case, mesh, placements in cases:
        for name, whole in make_tensors().items():
            sharded = distribute_tensor(whole, mesh, placements)  # type: ignore[arg-type]
            for dtype in (torch.float32, torch.bfloat16):
                first, rows = find_own_rows(sharded)
                got = list(stream_rows(name, tuple(whole.shape), first, rows, dtype, BUCKET))
                for part in got:
                    assert part.cast_elements().nbytes <= BUCKET and part.cast_elements().dtype == dtype
                    held = part.elements.untyped_storage().data_ptr()
                    assert held == sharded.to_local().untyped_storage().data_ptr(), "nothing is copied"
                if name == "even":
                    assert sum(len(part.elements) for part in got) == whole.numel() // world, "even shares"
                found = gather_weights(got)
                if rank == 0:
                    assert torch.equal(found[name], whole.to(dtype)), (case, name, dtype)
    with pytest.raises(ValueError, match="sharded by its rows"):
        find_own_rows(distribute_tensor(torch.zeros(8, 8), flat, [Shard(1)]))


def test_ranks_yield_their_own_rows_which_are_all_rows_once_a_bucket_at_a_time(tmp_path: Path) -> None:
    on_ranks(4, stream_all, tmp_path / "ranks")


def test_a_tensor_that_is_not_sharded_is_not_copied() -> None:
    whole = torch.randn(100, 100)
    got = list(stream_tensor("a", whole, torch.float32, BUCKET))
    assert all(
        part.elements.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in got
    )
    assert len(got) == 10 and torch.equal(collect_tensors(got)["a"], whole)
    assert torch.equal(collect_tensors(whole_parts({"a": whole}))["a"], whole)
