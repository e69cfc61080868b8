"""From whole tensors to sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint

from raggedshard.placements import check_placements, shape_of
from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.dtensor import DTensor, DTensorSpec, wrap_local
from raggedshard.platform.mindspore.redistribute import part_of, to_host, to_tensor

__all__ = ["deferred_draw", "distribute_tensor"]


def distribute_tensor(tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor of which each rank takes its part of a tensor that all ranks hold alike. Without communication.

    A Parameter gives a Parameter. One whose initialisation was deferred stays without values until ``init_data()`` of
    the new one, which ``init_parameters_data()`` of a cell calls.

    Raises:
        ValueError: the placements do not fit the shape; a parameter is on the meta device and has no initializer.
    """
    check_placements(tensor.shape, device_mesh.shape, placements)
    if any(placement.is_partial() for placement in placements):
        raise ValueError("distribute_tensor: a whole tensor cannot be made Partial")
    spec = DTensorSpec(device_mesh, tuple(placements), tuple(tensor.shape))
    draw = deferred_draw(tensor) if isinstance(tensor, Parameter) else None
    if draw is None:
        local = to_tensor(part_of(to_host(tensor), device_mesh, placements), tensor.dtype)
    else:
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None, f"this rank is no part of {device_mesh}"
        local = mint.zeros(shape_of(tensor.shape, device_mesh.shape, placements, coordinate), dtype=tensor.dtype)
    if not isinstance(tensor, Parameter):
        return wrap_local(local, spec)
    result: Any = Parameter(wrap_local(local, spec), name=tensor.name, requires_grad=tensor.requires_grad)
    if draw is not None:
        result.defer(lambda: part_of(draw(), device_mesh, placements))
    return result


def deferred_draw(param: Parameter) -> Callable[[], np.ndarray] | None:
    """What draws the values of a parameter whose initialisation was deferred, those of this rank's part of a DTensor.

    Raises:
        ValueError: it is on the meta device and has no initializer.
    """
    if isinstance(param, DTensor):
        return param._draw
    if param.has_init:
        recipe = Tensor(shape=param.shape, dtype=param.dtype, init=param.init)
        return lambda: to_host(recipe.init_data())
    if param.is_meta:
        raise ValueError(
            f"parameter '{param.name}' of shape {tuple(param.shape)} is on the meta device and has no initializer; "
            "give it one, e.g. Parameter(initializer('normal', shape))"
        )
    return None
