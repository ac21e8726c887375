"""Tensors that are sharded over ranks by their rows."""

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sync.stream import choose_rows


def sharded_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Returns this rank's part `local` as a tensor that is sharded as `tensor` is; the part stays on its own
    device.

    `DTensor.from_local` would move it to the device of the mesh, and fill a GPU with what is kept in the
    host's memory. FSDP2 makes its own shards in this way too.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    return DTensor(local, replace(tensor._spec, tensor_meta=meta), requires_grad=False)


def find_own_rows(tensor: DTensor) -> tuple[int, Tensor]:
    """Returns the rows [n, ...] that this rank publishes, and the number of the first.

    They are those of its shard, or, where other ranks hold the same rows (HSDP's replicas), its share of
    them. It may have none.
    """
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    index, count = 0, 1
    for dim, place in enumerate(tensor.placements):
        if isinstance(place, Replicate):
            index, count = index * mesh.size(dim) + mesh.get_local_rank(dim), count * mesh.size(dim)
        elif not place.is_shard(0):
            raise ValueError(f"a tensor must be sharded by its rows to be published, got {place}")
    row_bytes = local[:1].numel() * local.element_size()
    begin, end = choose_rows(len(local), row_bytes, index, count)
    return offset[0] + begin, local[begin:end]
