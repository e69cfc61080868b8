"""The data-parallel mesh in torch: its roles are the neutral ones, its device and groups torch's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raggedshard.fully_shard.data_parallel import DataParallelRoles

__all__ = ["DataParallelMesh", "concatenate_meshes", "default_mesh", "subgroup"]


def default_mesh() -> DeviceMesh:
    """All ranks in one shard dim."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if dist.get_backend() == "gloo":
        device_type = torch.device("cpu")
    return init_device_mesh(device_type.type, (dist.get_world_size(),))


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh whose dims are those of ``meshes``, slices of one mesh."""
    # Private, there since torch 2.11: the only way to join two slices of a mesh without new process groups.
    return DeviceMesh._concatenate(list(meshes))


@dataclass(frozen=True)
class DataParallelMesh(DataParallelRoles):
    """`DataParallelRoles` on torch.

    Raises:
        ValueError: the mesh has another number of dims, or its ranks are not in the order of their process group.
    """

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        super().__post_init__()
        if dist.get_process_group_ranks(self.shard_group)[self.shard_rank] != dist.get_rank():
            raise ValueError(
                f"the ranks of mesh dim {self.shard_dim_name} of {self.mesh} are not in ascending order, but a process "
                "group's always are; make the mesh with init_device_mesh"
            )

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())


_SUBGROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def subgroup(dp_mesh: DataParallelMesh, size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` neighbours along the shard dim, made once per mesh."""
    groups = _SUBGROUPS.setdefault(dp_mesh.shard_group, {})
    if size not in groups:
        ranks = dist.get_process_group_ranks(dp_mesh.shard_group)
        # Only members take part: other slices of the mesh (replicas, tensor-parallel ranks) make groups of their own.
        group = dist.new_group(ranks[dp_mesh.neighbours(size)], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        groups[size] = group
    return groups[size]
