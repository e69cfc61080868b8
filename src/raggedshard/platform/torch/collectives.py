"""Gathers over dims of a device mesh, in the order of mesh coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed it and warns about the old name, the only one of 2.12.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["all_gather_single", "all_reduce", "broadcast", "coordinate_of", "gather"]


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's coordinate.

    Raises:
        RuntimeError: this rank is no part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {dist.get_rank()} holds no part of a tensor on {mesh}: it is no part of the mesh")
    return tuple(coordinate)


def gather(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> torch.Tensor:
    """Every rank's ``tensor`` along some mesh dims.

    Args:
        tensor: of the same shape and dtype on all ranks; any dtype.

    Returns:
        A new tensor of shape ``(*sizes of mesh_dims, *tensor.shape)``, indexed by mesh coordinates.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)  # bytes: a backend may lack the dtype
    for mesh_dim in reversed(mesh_dims):
        size = mesh.size(mesh_dim)
        output = data.new_empty((size, *data.shape))
        if size == 1:
            output.copy_(data)
        elif data.numel():
            all_gather_single(output.view(-1), data.view(-1), group=mesh.get_group(mesh_dim))
        order = _group_order(mesh, mesh_dim)
        data = output if order is None else output[order]
    sizes = [mesh.size(d) for d in mesh_dims]
    return data.reshape(-1).view(tensor.dtype).view(*sizes, *tensor.shape)


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
    """A new tensor: ``tensor`` reduced over a mesh dim."""
    reduced = tensor.clone(memory_format=torch.contiguous_format)
    if mesh.size(mesh_dim) > 1:
        dist.all_reduce(reduced, op, group=mesh.get_group(mesh_dim))
    return reduced


def broadcast(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, source: int) -> None:
    """Overwrite a contiguous ``tensor`` by that of the rank whose coordinate along ``mesh_dim`` is ``source``."""
    if mesh.size(mesh_dim) > 1 and tensor.numel():
        order = _group_order(mesh, mesh_dim)
        group_rank = source if order is None else order[source]
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=mesh.get_group(mesh_dim), group_src=group_rank)


@lru_cache(maxsize=256)
def _group_order(mesh: DeviceMesh, mesh_dim: int) -> list[int] | None:
    """The group's rank at each coordinate; ``None`` when they are equal.

    A process group sorts its ranks, so on a mesh like ``[1, 0]`` group ranks are no coordinates.
    """
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    line = list(coordinate_of(mesh))
    index = tuple(slice(None) if d == mesh_dim else line[d] for d in range(mesh.ndim))
    along = mesh.mesh[index].tolist()
    return None if along == ranks else [ranks.index(rank) for rank in along]
