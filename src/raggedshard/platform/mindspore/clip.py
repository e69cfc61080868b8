"""Clipping gradients by their norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from raggedshard.placements import cut_of
from raggedshard.platform.mindspore.collectives import all_reduce
from raggedshard.platform.mindspore.dtensor import DTensor, local_of
from raggedshard.platform.mindspore.private import grad_of, no_grad, set_grad

__all__ = ["clip_grad_norm_"]


@no_grad()
def clip_grad_norm_(parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most ``max_norm``. Collective.

    Args:
        parameters: those whose gradients ``loss.backward()`` left; ones without are passed over.
        norm_type: 2 or any other power, or ``inf`` for the largest element.

    Returns:
        The norm before clipping: float32, of no dims, equal on all ranks.
    """
    params = [p for p in parameters if grad_of(p) is not None]
    parts = [_power_sum(grad_of(p), norm_type) for p in params]
    if not parts:
        return mint.zeros((), dtype=ms.float32)
    stacked = ops.stack(parts)
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    factor = float(max_norm) / (norm + 1e-6)
    if float(factor) < 1.0:
        for p in params:
            grad = grad_of(p)
            set_grad(p, grad * factor.astype(grad.dtype))
    return norm


def _power_sum(grad: Any, norm_type: float) -> Tensor:
    """``sum(abs(grad) ** norm_type)`` of the global gradient, or its largest absolute value; float32, no dims."""
    local = (local_of(grad) if isinstance(grad, DTensor) else grad).astype(ms.float32)
    if local.size == 0:  # MindSpore's sum of nothing is garbage
        total = mint.zeros((), dtype=ms.float32)
    elif math.isinf(norm_type):
        total = local.abs().max()
    else:
        total = (local.abs() ** norm_type).sum()
    if not isinstance(grad, DTensor):
        return total
    op = "max" if math.isinf(norm_type) else "sum"
    for mesh_dim, placement in enumerate(grad.placements):
        if cut_of(placement) is not None:
            total = all_reduce(total.reshape((1,)), grad.device_mesh.get_group(mesh_dim), op).reshape(())
    return total
