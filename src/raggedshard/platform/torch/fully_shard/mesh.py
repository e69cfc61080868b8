"""The roles of a mesh's dims: which one shards, which one replicates, and the mesh of a parameter that TP has cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DataParallelMesh", "default_mesh"]


def default_mesh() -> DeviceMesh:
    """All ranks in one shard dim."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if dist.get_backend() == "gloo":
        device_type = torch.device("cpu")
    return init_device_mesh(device_type.type, (dist.get_world_size(),))


@dataclass(frozen=True)
class DataParallelMesh:
    """A 1-D mesh (FSDP) or a 2-D mesh ``(replicate, shard)`` (HSDP)."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        if self.mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard needs a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {self.mesh.ndim} dims "
                f"{self.mesh.mesh_dim_names} of shape {tuple(self.mesh.shape)}. Slice it by name, e.g. "
                "mesh['replicate', 'shard'], and leave the tensor-parallel dims out"
            )
        if dist.get_process_group_ranks(self.shard_group)[self.shard_rank] != dist.get_rank():
            raise ValueError(
                f"the ranks of mesh dim {self.shard_dim_name} of {self.mesh} are not in ascending order, but a process "
                "group's always are; make the mesh with init_device_mesh"
            )

    @property
    def shard_dim(self) -> int:
        """The mesh dim that shards: the last one."""
        return self.mesh.ndim - 1

    @property
    def shard_dim_name(self) -> str:
        names = self.mesh.mesh_dim_names
        return f"'{names[self.shard_dim]}'" if names else f"dim {self.shard_dim}"

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.shard_dim)

    @property
    def shard_world_size(self) -> int:
        return self.mesh.size(self.shard_dim)

    @property
    def shard_rank(self) -> int:
        return self.mesh.get_local_rank(self.shard_dim)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def replicate_world_size(self) -> int:
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def with_tensor_parallel(self, name: str, tp_mesh: DeviceMesh) -> DeviceMesh:
        """The mesh of a parameter that is cut by both: data-parallel dims first.

        Raises:
            ValueError: a mesh has no dim names, or the meshes are not slices of one mesh.
        """
        if not self.mesh.mesh_dim_names or not tp_mesh.mesh_dim_names:
            raise ValueError(
                f"parameter {name} is a DTensor on {tp_mesh}, and fully_shard's mesh is {self.mesh}: to combine them, "
                "both need dim names. Pass mesh_dim_names to init_device_mesh and slice both from that one mesh"
            )
        try:
            # Private, there since torch 2.11: the only way to join two slices of a mesh without new process groups.
            return DeviceMesh._concatenate([self.mesh, tp_mesh])
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"parameter {name} is a DTensor on {tp_mesh}, which cannot be joined with fully_shard's mesh "
                f"{self.mesh}: slice both from one init_device_mesh({error})"
            ) from error
