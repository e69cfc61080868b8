"""The roles of a mesh's dims: which one shards, which one replicates, and how tensor parallelism cut a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raggedshard.fully_shard.sharding import ParamPlan, PlacementTypes, plan_parameter
from raggedshard.placements import check_placements, shape_of

__all__ = ["DataParallelRoles", "ShardedPlan", "check_post_forward_ranks", "plan_on_mesh"]


@dataclass(frozen=True)
class DataParallelRoles:
    """A 1-D mesh (FSDP) or a 2-D mesh ``(replicate, shard)`` (HSDP), of either framework.

    Raises:
        ValueError: the mesh has another number of dims.
    """

    mesh: Any

    def __post_init__(self) -> None:
        if self.mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard needs a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {self.mesh.ndim} dims "
                f"{self.mesh.mesh_dim_names} of shape {tuple(self.mesh.shape)}. Slice it by name, e.g. "
                "mesh['replicate', 'shard'], and leave the tensor-parallel dims out"
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
    def shard_group(self) -> Any:
        return self.mesh.get_group(self.shard_dim)

    @property
    def shard_world_size(self) -> int:
        return self.mesh.size(self.shard_dim)

    @property
    def shard_rank(self) -> int:
        return self.mesh.get_local_rank(self.shard_dim)

    def neighbours(self, size: int) -> slice:
        """The places in the shard group of this rank's ``size`` neighbours, itself among them."""
        first = self.shard_rank // size * size
        return slice(first, first + size)

    @property
    def replicate_group(self) -> Any:
        """``None`` for FSDP."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def replicate_world_size(self) -> int:
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def replicate_rank(self) -> int:
        return self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0

    def joined_with(self, name: str, tp_mesh: Any, concatenate: Callable[[Sequence[Any]], Any]) -> Any:
        """The mesh of a parameter that tensor parallelism has cut too: data-parallel dims first.

        Args:
            name: the parameter's.
            concatenate: the framework's way to join slices of one mesh.

        Raises:
            ValueError: a mesh has no dim names, or the meshes are not slices of one mesh.
        """
        if not self.mesh.mesh_dim_names or not tp_mesh.mesh_dim_names:
            raise ValueError(
                f"parameter {name} is a DTensor on {tp_mesh}, and fully_shard's mesh is {self.mesh}: to combine them, "
                "both need dim names. Pass mesh_dim_names to init_device_mesh and slice both from that one mesh"
            )
        try:
            return concatenate([self.mesh, tp_mesh])
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"parameter {name} is a DTensor on {tp_mesh}, which cannot be joined with fully_shard's mesh "
                f"{self.mesh}: slice both from one init_device_mesh({error})"
            ) from error


@dataclass(frozen=True)
class ShardedPlan:
    """Where a parameter's shards are: the mesh of all its cuts, its placements there, and this rank's layout."""

    mesh: Any
    placements: tuple[Any, ...]
    plan: ParamPlan


def plan_on_mesh(
    name: str,
    shape: Sequence[int],
    roles: DataParallelRoles,
    requested: Any,
    types: PlacementTypes,
    replicate: Any,
    tp_mesh: Any = None,
    tp_placements: Sequence[Any] = (),
    concatenate: Callable[[Sequence[Any]], Any] | None = None,
) -> ShardedPlan:
    """Decide how a parameter is sharded over the data-parallel ranks, on top of what tensor parallelism did.

    Args:
        name: the parameter's, for errors.
        shape: the global shape.
        requested: what ``shard_placement_fn`` returned.
        types, replicate: the backend's placement classes and its ``Replicate()``.
        tp_mesh, tp_placements, concatenate: of a parameter that is a DTensor already.

    Raises:
        NotImplementedError, ValueError: as `raggedshard.fully_shard.sharding.plan_parameter` and `joined_with`.
    """
    ranks = roles.shard_world_size
    describe = f"parameter '{name}' of shape {tuple(shape)} on mesh dim {roles.shard_dim_name} ({ranks} ranks)"
    if tp_mesh is None:
        mesh, plan = roles.mesh, plan_parameter(describe, shape, ranks, requested, types)
    else:
        assert concatenate is not None
        mesh = roles.joined_with(name, tp_mesh, concatenate)
        on_rows = [d for d, placement in enumerate(tp_placements) if placement.is_shard(0)]
        coordinate = tp_mesh.get_coordinate()
        assert coordinate is not None, f"rank is not part of {tp_mesh}"
        block = 0
        for mesh_dim in on_rows:
            block = block * tp_mesh.size(mesh_dim) + coordinate[mesh_dim]
        plan = plan_parameter(
            describe,
            shape,
            ranks,
            requested,
            types,
            tp_parts=[tp_mesh.size(mesh_dim) for mesh_dim in on_rows],
            tp_block=block,
            tp_shape=shape_of(shape, tp_mesh.shape, tp_placements, coordinate),
        )
    front = (replicate,) if roles.mesh.ndim == 2 else ()
    placements = (*front, plan.placement, *tp_placements)
    check_placements(shape, mesh.shape, placements)
    return ShardedPlan(mesh, placements, plan)


def check_post_forward_ranks(value: bool | int | None, roles: DataParallelRoles) -> int | None:
    """The ranks of the smaller groups that gather before backward, when ``reshard_after_forward`` is such an int.

    Raises:
        ValueError: it does not divide the shard ranks.
    """
    if value is None or isinstance(value, bool):
        return None
    world_size = roles.shard_world_size
    if not 1 <= value <= world_size or world_size % value:
        raise ValueError(
            f"reshard_after_forward={value} must divide the {world_size} ranks of mesh dim {roles.shard_dim_name}; "
            "give a divisor, True or False"
        )
    return None if value == world_size else value
