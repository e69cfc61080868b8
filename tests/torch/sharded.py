"""Small helpers for tests of the tensor class; they run on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from raggedshard.geometry import chunk_lengths
from raggedshard.platform.torch.distribute import distribute_tensor
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.placements import RaggedShard
from raggedshard.platform.torch.shards import part_of

ROWS = (0, 1, 2, 5, 7, 10, 13)


def line(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def grid(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def by_rows(rows: int, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Replicas on all mesh dims but the last, ragged rows on the last."""
    parts = mesh.size(mesh.ndim - 1)
    units = chunk_lengths(rows, parts) if rows else (1,) * parts
    return (*(Replicate() for _ in range(mesh.ndim - 1)), RaggedShard((0,), units))


def shard(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> ShardedDTensor:
    """This rank's part of a tensor that all ranks hold, by rows unless placements are given."""
    placements = placements or by_rows(full.shape[0], mesh)
    local = part_of(full.detach(), mesh, placements)
    return wrap_local(local, mesh, placements, full.shape, full.stride())


def even(full: torch.Tensor, mesh: DeviceMesh) -> ShardedDTensor:
    """As `shard`, by torch's own ``Shard(0)`` on the last mesh dim."""
    return shard(full, mesh, (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)))


def replicate(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(full.detach().clone(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


LAYOUTS = [
    *(pytest.param(ranks, shard, id=f"ragged-{ranks}") for ranks in (1, 2, 3, 4)),
    pytest.param(3, even, id="torch-3"),
]
"""Number of ranks and how a tensor is made: ragged rows on 1 to 4 ranks, torch's uneven ``Shard(0)`` on 3."""


def full(tensor: Any) -> torch.Tensor:
    """The plain global tensor of whatever an operation returned."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(tensor: Any, expected: torch.Tensor, what: Any = "", exact: bool = True) -> None:
    """Values, shape and dtype of a DTensor or plain tensor are those of a plain one."""
    assert tensor.shape == expected.shape, (what, tensor.shape, expected.shape)
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(
        full(tensor).detach(), expected.detach(), equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance
    )


def parameter(tensor: torch.Tensor, requires_grad: bool = True) -> Any:
    """``torch.nn.Parameter``, whose declared type hides the class of what it is made from."""
    return torch.nn.Parameter(tensor, requires_grad)


def assert_layout(tensor: Any, like: ShardedDTensor, what: Any = "") -> None:
    assert type(tensor) is ShardedDTensor, (what, type(tensor))
    assert tensor.placements == like.placements, (what, tensor.placements)
    assert tensor.device_mesh == like.device_mesh, what
