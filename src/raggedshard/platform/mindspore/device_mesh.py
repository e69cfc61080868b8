"""A mesh of processes with a communication group along every dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from raggedshard.platform.mindspore import private
from raggedshard.platform.mindspore.collectives import Group, get_rank, get_world_size, group_of, init_process_group

__all__ = ["DeviceMesh", "init_device_mesh"]


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh over all processes in row-major order; joins them first if that was not done.

    Args:
        device_type: ``"cpu"`` or ``"npu"``; must be what MindSpore runs on.
        mesh_shape: ranks per dim; their product is the number of processes.
        mesh_dim_names: one unique name per dim.

    Raises:
        ValueError: any of these does not hold.
    """
    init_process_group()
    if device_type != private.device_type():
        raise ValueError(
            f"init_device_mesh: device_type {device_type!r}, but MindSpore runs on {private.device_type()!r}"
        )
    if int(np.prod(mesh_shape)) != get_world_size():
        raise ValueError(f"init_device_mesh: shape {tuple(mesh_shape)} does not hold {get_world_size()} processes")
    ranks = np.arange(get_world_size()).reshape(tuple(mesh_shape))
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)


class DeviceMesh:
    """Processes in an n-dimensional grid.

    Args:
        device_type: ``"cpu"`` or ``"npu"``.
        mesh: an integer array of global ranks, each at most once, ascending along every dim.
        mesh_dim_names: one unique name per dim, or ``None``.

    Every rank of a line along a dim must make the mesh: that makes the line's group.

    Raises:
        ValueError: a rank stands twice or out of order, or the names do not match the dims.
    """

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        self.device_type = device_type
        self.mesh = np.array(mesh, dtype=np.int64)
        self.mesh_dim_names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
        if np.unique(self.mesh).size != self.mesh.size:
            raise ValueError(f"DeviceMesh: a rank stands twice in {self.mesh.tolist()}")
        if any((np.diff(self.mesh, axis=dim) < 0).any() for dim in range(self.ndim)):
            raise ValueError(
                f"DeviceMesh: ranks must ascend along every dim, as those of a group do: {self.mesh.tolist()}"
            )
        names = self.mesh_dim_names
        if names is not None and (len(names) != self.ndim or len(set(names)) != len(names)):
            raise ValueError(f"DeviceMesh: mesh_dim_names {names} for a mesh of shape {self.shape}")
        self._parent: tuple[DeviceMesh, tuple[int, ...]] | None = None
        if self.get_coordinate() is not None:
            for dim in range(self.ndim):
                self.get_group(dim)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mesh.shape

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Ranks along a dim, or of the whole mesh."""
        return self.mesh.size if mesh_dim is None else self.shape[self._dim(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate; ``None`` when it is no part of the mesh."""
        found = np.argwhere(self.mesh == get_rank())
        return tuple(found[0].tolist()) if len(found) else None

    def get_local_rank(self, mesh_dim: int | str = 0) -> int:
        """This rank's index along a dim.

        Raises:
            RuntimeError: it is no part of the mesh.
        """
        return self._coordinate()[self._dim(mesh_dim)]

    def get_group(self, mesh_dim: int | str = 0) -> Group:
        """The group of the line along a dim through this rank. Its order is that of the coordinates.

        Raises:
            RuntimeError: this rank is no part of the mesh.
        """
        dim = self._dim(mesh_dim)
        line: list[Any] = list(self._coordinate())
        line[dim] = slice(None)
        return group_of(tuple(self.mesh[tuple(line)].tolist()))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh of some named dims through this rank, e.g. ``mesh["tp"]`` or ``mesh["replicate", "shard"]``.

        Raises:
            KeyError: the mesh has no such dim.
        """
        dims = tuple(self._dim(name) for name in ((names,) if isinstance(names, str) else names))
        if dims == tuple(range(self.ndim)):
            return self
        line: list[Any] = list(self._coordinate())
        for dim in dims:
            line[dim] = slice(None)
        ranks = self.mesh[tuple(line)].transpose(np.argsort(np.argsort(dims)))
        assert self.mesh_dim_names is not None
        part = DeviceMesh(self.device_type, ranks, mesh_dim_names=[self.mesh_dim_names[dim] for dim in dims])
        root, root_dims = self._parent or (self, tuple(range(self.ndim)))
        part._parent = root, tuple(root_dims[dim] for dim in dims)
        return part

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh of all dims of slices of one mesh, in the order given.

        Raises:
            ValueError: they are not slices of one mesh, or share a dim.
        """
        roots = [mesh._parent or (mesh, tuple(range(mesh.ndim))) for mesh in meshes]
        root = roots[0][0]
        dims = list(itertools.chain.from_iterable(dims for _, dims in roots))
        if any(other is not root for other, _ in roots) or len(set(dims)) != len(dims):
            raise ValueError("they are not slices of one mesh with different dims")
        if root.mesh_dim_names is None:
            raise ValueError("the mesh has no dim names")
        return root[tuple(root.mesh_dim_names[dim] for dim in dims)]

    def _dim(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, int):
            return mesh_dim
        if self.mesh_dim_names is None or mesh_dim not in self.mesh_dim_names:
            raise KeyError(f"{self} has no dim {mesh_dim!r}")
        return self.mesh_dim_names.index(mesh_dim)

    def _coordinate(self) -> tuple[int, ...]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {get_rank()} is no part of {self}")
        return coordinate

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DeviceMesh)
            and self.device_type == other.device_type
            and self.mesh_dim_names == other.mesh_dim_names
            and np.array_equal(self.mesh, other.mesh)
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.mesh_dim_names, self.shape, self.mesh.tobytes()))

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"
