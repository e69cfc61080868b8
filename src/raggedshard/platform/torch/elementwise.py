"""Element-wise operations: every operand is brought to one layout, then the local tensors are enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from raggedshard.platform.torch.dtensor import wrap_like
from raggedshard.platform.torch.private import DTensorSpec
from raggedshard.platform.torch.redistribute import full_local, redistribute_local
from raggedshard.platform.torch.shards import has_partial, local_of, part_of, sharding_dims

__all__ = [
    "common_mesh",
    "is_elementwise",
    "is_elementwise_name",
    "mixed_error",
    "run_elementwise",
    "run_foreach",
    "written_arguments",
    "written_tensors",
]

aten = torch.ops.aten

_UNTAGGED = frozenset({"copy", "fill", "zero", "lerp", "addcmul", "addcdiv", "masked_fill", "where"})
"""Element-wise operations of which torch tags some overloads or none as ``pointwise``."""

_NOT = frozenset({"equal", "max", "min"})
"""Names that have a pointwise overload beside those that reduce."""

_LINEAR = frozenset({"clone", "zero", "neg"})
"""Right on the terms of a Partial too, with no other operand."""


@cache
def is_elementwise_name(name: str) -> bool:
    """Whether the operation ``name`` (without a trailing underscore) is element-wise in every overload."""
    if name in _UNTAGGED:
        return True
    packet = getattr(aten, name, None)
    if packet is None or name in _NOT:
        return name in ("maximum", "minimum")
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def is_elementwise(func: Any) -> bool:
    """Whether an overload is element-wise."""
    name = func._schema.name.removeprefix("aten::")
    if name in _NOT:
        return torch.Tag.pointwise in func.tags and name != "equal"
    return func.namespace == "aten" and is_elementwise_name(name.removesuffix("_"))


@cache
def written_arguments(func: Any) -> tuple[int | str, ...]:
    """The arguments that an overload writes: positions, names for keyword-only ones."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        a.name if a.kwarg_only else i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


def written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call writes, those in lists too."""
    written: list[torch.Tensor] = []
    for key in written_arguments(func):
        value = kwargs.get(key) if isinstance(key, str) else args[key]
        written += [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, torch.Tensor)]
    return written


def run_elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """An element-wise operation on single tensors; ``NotImplemented`` when there is no layout to run it in."""
    written = written_tensors(func, args, kwargs)
    operands = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    spec = _common_layout(func, operands, written[0] if written else None)
    if spec is None:
        return NotImplemented

    def local(value: Any) -> Any:
        return _operand(func, value, spec) if isinstance(value, torch.Tensor) else value

    out = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map(lambda t: wrap_like(t, spec) if isinstance(t, torch.Tensor) else t, out)


def run_foreach(func: Any, args: tuple, kwargs: dict) -> Any:
    """An element-wise operation on lists of tensors: one layout for each index of the lists.

    ``NotImplemented`` when an index has no layout to run it in.
    """
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and _holds_tensors(a)]
    count = max(map(len, lists))
    written = bool(written_arguments(func))
    specs = [
        _layout_at(func, operands, written) for operands in zip(*(a for a in lists if len(a) == count), strict=True)
    ]
    if any(spec is NotImplemented for spec in specs):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and _holds_tensors(value):
            return [_operand(func, t, s) for t, s in zip(value, specs, strict=True)]
        return _shared_operand(func, value)

    out = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if written or out is None:
        return out
    return [wrap_like(t, s) if s is not None else t for t, s in zip(out, specs, strict=True)]


def common_mesh(func: Any, tensors: Sequence[DTensor]) -> DeviceMesh:
    """The mesh of all tensors.

    Raises:
        RuntimeError: they lie on two.
    """
    mesh = tensors[0]._spec.mesh
    for tensor in tensors[1:]:
        if tensor._spec.mesh is not mesh and tensor._spec.mesh != mesh:
            raise RuntimeError(f"{func}: tensors on two meshes, {mesh} and {tensor._spec.mesh}; bring them to one")
    return mesh


def mixed_error(func: Any, tensor: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"{func}: got mixed torch.Tensor and DTensor (a plain tensor of shape {tuple(tensor.shape)}); convert "
        "the plain tensor with distribute_tensor, or take to_local() or full_tensor() of the others"
    )


def _holds_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def _layout_at(func: Any, operands: Sequence[Any], written: bool) -> Any:
    """The layout of one index of a foreach operation; ``None`` when all tensors there are plain."""
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    if not any(isinstance(t, DTensor) for t in tensors):
        return None
    spec = _common_layout(func, tensors, tensors[0] if written else None)
    return NotImplemented if spec is None else spec


def _common_layout(func: Any, operands: list[torch.Tensor], written: torch.Tensor | None) -> DTensorSpec | None:
    """The layout to compute in: that of the written tensor, else that of the first sharded operand of full shape.

    ``None`` when there is none, or when it is Partial and the operation is not linear.
    """
    if written is not None and not isinstance(written, DTensor):
        raise mixed_error(func, written)
    tensors = [t for t in operands if isinstance(t, DTensor)]
    common_mesh(func, tensors)
    first = tensors[0]._spec
    alike = all(_same_layout(t._spec, first) for t in tensors)
    if alike or written is not None:
        candidates = [first if written is None else written._spec]
    else:
        shape = torch.broadcast_shapes(*(t.shape for t in operands))
        candidates = [t._spec for t in tensors if t.shape == shape]
        candidates.sort(key=lambda spec: not sharding_dims(spec.placements))
    for spec in candidates:
        if not has_partial(spec.placements) or (alike and _keeps_terms(func, operands)):
            return spec
    return None


def _same_layout(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one is other or (one.placements == other.placements and one.shape == other.shape)


def _keeps_terms(func: Any, operands: list[torch.Tensor]) -> bool:
    """Whether an operation on operands of one layout may run on each rank's terms of a Partial."""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
    if name == "copy":
        return all(isinstance(operand, DTensor) for operand in operands)
    return name in _LINEAR and len(operands) == 1


def _operand(func: Any, tensor: Any, spec: DTensorSpec | None) -> Any:
    """The local tensor of an operand under ``spec``."""
    if spec is None or tensor is None:
        return tensor
    if not isinstance(tensor, DTensor):
        return _scalar(func, tensor, spec.ndim)
    if _same_layout(tensor._spec, spec):
        return local_of(tensor)
    if tensor.shape == spec.shape:
        return redistribute_local(local_of(tensor), tensor.shape, spec.mesh, tensor.placements, spec.placements)
    full = full_local(tensor)
    return full if full.ndim == 0 else part_of(full.expand(spec.shape), spec.mesh, spec.placements)


def _shared_operand(func: Any, value: Any) -> Any:
    """An operand that all indices of a foreach operation share."""
    if isinstance(value, DTensor):
        if value.numel() != 1:
            raise NotImplementedError(f"{func}: a shared operand of shape {tuple(value.shape)}, expected one element")
        return full_local(value)
    return _scalar(func, value, 0) if isinstance(value, torch.Tensor) else value


def _scalar(func: Any, tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """A plain operand of one element, which must not add dims to the result."""
    if tensor.numel() != 1 or tensor.ndim > min(ndim, 1):
        raise mixed_error(func, tensor)
    return tensor
