"""Weights leave a sharded model a bucket at a time, in order, whole, and without a whole tensor in any rank's
memory."""

from pathlib import Path

import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from learners.world import World
from sync.stream import collect_tensors, stream_tensor, whole_parts

BUCKET = 1 << 12
LARGE = (1 << 14, 1 << 10)  # 64 MB in float32


def make_tensors() -> dict[str, torch.Tensor]:
    """Returns tensors whose rows the ranks divide evenly, unevenly, or so that some ranks get none."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (64, 33), "uneven": (37, 50), "few": (2, 700), "vector": (129,), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def stream_all(ranks: World) -> None:
    rank, world = ranks.rank, ranks.size
    flat = init_device_mesh("cpu", (world,))
    hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    cases: list[tuple[str, object, list[object]]] = [
        ("sharded", flat, [Shard(0)]),
        ("replicated", flat, [Replicate()]),
        ("hybrid", hybrid, [Replicate(), Shard(0)]),
        ("columns", flat, [Shard(1)]),
    ]
    for case, mesh, placements in cases:
        for name, whole in make_tensors().items():
            if case == "columns" and whole.dim() < 2:
                continue
            sharded = distribute_tensor(whole, mesh, placements)  # type: ignore[arg-type]
            for dtype in (torch.float32, torch.bfloat16):
                got = []
                for part in stream_tensor(name, sharded, dtype, BUCKET):
                    assert part.elements.nbytes <= BUCKET and part.elements.dtype == dtype
                    got.append(part._replace(elements=part.elements.clone()))
                assert bool(got) == (rank == 0), (case, name)
                if rank == 0:
                    assert torch.equal(collect_tensors(got)[name], whole.to(dtype)), (case, name, dtype)
    large = DTensor.from_local(torch.full((LARGE[0] // world, LARGE[1]), float(rank)), flat, [Shard(0)])
    # The first pass takes the memory that sockets and allocators need once.
    for _ in stream_tensor("large", large, torch.bfloat16, 1 << 20):
        pass
    before, most = resident_bytes(), 0
    for _ in stream_tensor("large", large, torch.bfloat16, 1 << 20):
        most = max(most, resident_bytes() - before)
    assert most < 8 << 20, f"rank {rank} took {most} bytes more; the tensor has {large.numel() * 2}"


def test_every_way_of_sharding_comes_out_whole_and_a_bucket_at_a_time(tmp_path: Path) -> None:
    on_ranks(4, stream_all, tmp_path / "ranks")


def test_a_tensor_that_is_not_sharded_is_not_copied() -> None:
    whole = torch.randn(100, 100)
    got = list(stream_tensor("a", whole, torch.float32, BUCKET))
    assert all(
        part.elements.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in got
    )
    assert len(got) == 10 and torch.equal(collect_tensors(got)["a"], whole)
    assert torch.equal(collect_tensors(whole_parts({"a": whole}))["a"], whole)
