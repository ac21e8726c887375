"""Tensors that are sharded over ranks."""

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta


def sharded_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Returns this rank's part `local` as a tensor that is sharded as `tensor` is; the part stays on its own
    device.

    `DTensor.from_local` would move it to the device of the mesh, and fill a GPU with what is kept in the
    host's memory. FSDP2 makes its own shards in this way too.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    return DTensor(local, replace(tensor._spec, tensor_meta=meta), requires_grad=False)
