"""Operations that make a tensor of the same layout: copies, aliases and ``zeros_like`` and its kin."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.placement_types import Replicate

from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_like, wrap_local, wrap_replicated
from raggedshard.platform.torch.private import DTensorSpec
from raggedshard.platform.torch.shards import local_of, shape_on

__all__ = ["RULES", "alias"]


def alias(tensor: ShardedDTensor) -> ShardedDTensor:
    """Another tensor around the same local tensor."""
    result = wrap_local(local_of(tensor), tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    result._gathered = tensor._gathered
    return result


def _alias(func: Any, args: tuple, kwargs: dict) -> ShardedDTensor:
    return alias(args[0])


def _same(func: Any, args: tuple, kwargs: dict) -> ShardedDTensor:
    return args[0]


def _copy(func: Any, args: tuple, kwargs: dict) -> ShardedDTensor:
    """``clone``, ``_to_copy``: the values stay, terms of a Partial too."""
    tensor: ShardedDTensor = args[0]
    return _wrap(func(local_of(tensor), *args[1:], **_local_format(tensor, kwargs)), tensor._spec, kwargs)


def _like(func: Any, args: tuple, kwargs: dict) -> ShardedDTensor:
    """``zeros_like`` and its kin; values that are all alike are no terms, so Partial becomes Replicate."""
    tensor: ShardedDTensor = args[0]
    return _wrap(
        func(local_of(tensor), *args[1:], **_local_format(tensor, kwargs)), _without_partial(tensor._spec), kwargs
    )


def _new(func: Any, args: tuple, kwargs: dict) -> Any:
    """``new_zeros`` and its kin: of the global shape they keep the layout, of any other they are replicated."""
    tensor, size = args[0], tuple(args[1])
    mesh = tensor.device_mesh
    if size != tuple(tensor.shape):
        return wrap_replicated(func(local_of(tensor), *args[1:], **kwargs), mesh)
    placements = _without_partial(tensor._spec).placements
    local = func(local_of(tensor), shape_on(mesh, size, placements), *args[2:], **kwargs)
    return wrap_local(local, mesh, placements, size, torch.empty(size, device="meta").stride())


def _new_strided(func: Any, args: tuple, kwargs: dict) -> Any:
    """``new_empty_strided`` of the global shape keeps the layout and states the stride; the local one is dense."""
    tensor, size, stride = args[0], tuple(args[1]), tuple(args[2])
    if size != tuple(tensor.shape):
        return wrap_replicated(func(local_of(tensor), size, stride, **kwargs), tensor.device_mesh)
    placements = _without_partial(tensor._spec).placements
    shape = shape_on(tensor.device_mesh, size, placements)
    local = torch.ops.aten.new_empty.default(local_of(tensor), shape, **kwargs)
    return wrap_local(local, tensor.device_mesh, placements, size, stride)


def _is_same_size(func: Any, args: tuple, kwargs: dict) -> bool:
    return args[0].shape == args[1].shape


def _on_local(func: Any, args: tuple, kwargs: dict) -> Any:
    """A question about memory, or an instruction for it."""
    return func(local_of(args[0]), *args[1:], **kwargs)


def _wrap(local: torch.Tensor, spec: DTensorSpec, kwargs: dict) -> ShardedDTensor:
    memory_format = kwargs.get("memory_format")
    if memory_format in (None, torch.preserve_format):
        return wrap_like(local, spec)
    assert spec.tensor_meta is not None
    shape = spec.tensor_meta.shape
    stride = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    return wrap_local(local, spec.mesh, spec.placements, shape, stride)


def _local_format(tensor: ShardedDTensor, kwargs: dict) -> dict:
    """A channels-last format means something for the global dims only; a local tensor of fewer dims is contiguous."""
    if kwargs.get("memory_format") is not None and local_of(tensor).ndim != tensor.ndim:
        return {**kwargs, "memory_format": torch.contiguous_format}
    return kwargs


def _without_partial(spec: DTensorSpec) -> DTensorSpec:
    if not any(placement.is_partial() for placement in spec.placements):
        return spec
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in spec.placements)
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


RULES = {
    **dict.fromkeys(("detach", "alias", "lift_fresh"), _alias),
    "detach_": _same,
    **dict.fromkeys(("clone", "_to_copy", "_pin_memory"), _copy),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), _like),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _new),
    "new_empty_strided": _new_strided,
    "is_same_size": _is_same_size,
    **dict.fromkeys(("is_pinned", "record_stream"), _on_local),
}
"""Rules by the operation's name, for all its overloads."""
