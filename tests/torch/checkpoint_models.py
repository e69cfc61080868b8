"""Models of every row count over FSDP, HSDP and TP, with values that a test can work out by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raggedshard.torch import fully_shard, init_device_mesh

ROWS = (1, 2, 3, 5, 6, 7, 9, 13, 50257)
COLUMNS = 6


class Layer(nn.Module):
    """``column`` and ``row`` are cut by TP, along dim 0 and dim 1; ``own`` is not."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.column = nn.Linear(COLUMNS, rows)
        self.row = nn.Linear(COLUMNS, rows)
        self.own = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.column(x)


class Layers(nn.Module):
    def __init__(self, rows: Sequence[int] = ROWS) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): Layer(n) for n in rows})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only stored and loaded")


def build(mesh_shape: tuple[int, ...], rows: Sequence[int] = ROWS, shard: Any = fully_shard) -> nn.Module:
    """Sharded over a 1-D mesh, over (dp, tp), or not at all when there is no mesh shape.

    shard: the ``fully_shard`` to use.
    """
    model = Layers(rows)
    if not mesh_shape:
        return model
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    for layer in model.layers.values():
        if len(mesh_shape) == 2:
            parallelize_module(layer, mesh["tp"], {"column": ColwiseParallel(), "row": RowwiseParallel()})
        shard(layer, mesh=mesh["dp"])
    shard(model, mesh=mesh["dp"])
    return model


def expected(name: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor's values by its name: no two elements of a tensor are alike, and tensors differ."""
    offset = sum(name.encode()) / 1000
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(*shape).add(offset).to(torch.float32)


def fill(model: nn.Module) -> None:
    """Give every parameter its expected values, through its full tensor's own layout."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values_like(param, expected(name, param.shape)))


def values_like(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return full
    from raggedshard.platform.torch.distribute import distribute_tensor

    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def clear(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)


def assert_expected(model: nn.Module, what: str) -> None:
    """Every full tensor is exact."""
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(full.detach(), expected(name, param.shape)), (what, name)
