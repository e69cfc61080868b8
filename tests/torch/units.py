"""Small units whose values and gradients are known by heart, and what fully_shard made of their parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from raggedshard.platform.torch.fully_shard.module import state_of
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2
from raggedshard.platform.torch.fully_shard.param_group import HSDPParamGroup
from raggedshard.torch import fully_shard
from training import mesh_of

F64 = torch.float64


class Unit(nn.Module):
    """Parameters of given shapes; counts 1, 2, 3, ... through each of them."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            values = torch.arange(1, math.prod(shape) + 1, dtype=F64).view(shape)
            self.register_parameter(f"p{index}", nn.Parameter(values))

    def forward(self) -> torch.Tensor:
        """A sum in which element i of parameter p has gradient i + 1."""
        return torch.stack([(p * torch.arange(1, p.numel() + 1).view(p.shape)).sum() for p in self.parameters()]).sum()


def group_of(model: Any) -> HSDPParamGroup:
    state = state_of(model)
    assert state is not None and state.group is not None
    return state.group


def sharded_unit(world_size: int, *shapes: tuple[int, ...], replicas: int = 1) -> tuple[Any, list[HSDPParamV2]]:
    model = fully_shard(Unit(*shapes), mesh=mesh_of(world_size, replicas))
    return model, group_of(model).params


def local_of(p: HSDPParamV2) -> torch.Tensor:
    """This rank's part of the parameter that the optimizer holds."""
    param: Any = p.sharded_param
    return param.to_local().detach()


def placements_of(p: HSDPParamV2) -> tuple[Any, ...]:
    param: Any = p.sharded_param
    return param.placements


def padding(p: HSDPParamV2) -> torch.Tensor:
    """The tail of the communication storage that is not this rank's."""
    return p._sharded_param_data[p.sharded_size.numel() :]


def all_params(model: nn.Module) -> list[HSDPParamV2]:
    states = [state for state in map(state_of, model.modules()) if state is not None]
    return [p for state in states if state.group is not None for p in state.group.params]
