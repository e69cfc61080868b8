"""Reductions over all elements: each rank reduces what it holds, one value per rank is communicated.

    local      7 8 | 9 | (nothing)      max of (3,) on 3 ranks
    partial      8 | 9 | -inf           a rank that holds nothing contributes the identity; none raises alone
    gathered     8   9   -inf           over the mesh dims that shard, and only those
    result       9                      on every rank, in the same order of operations on every rank

The values are gathered and reduced by torch itself, where a backend's own maximum may drop a NaN. Half precision is
accumulated in float32 and rounded once, at the end, as for an unsharded tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from raggedshard.platform.torch.collectives import gather
from raggedshard.platform.torch.dtensor import wrap_replicated
from raggedshard.platform.torch.elementwise import common_mesh, mixed_error
from raggedshard.platform.torch.gathered import run_gathered
from raggedshard.platform.torch.private import current_graph_task_id
from raggedshard.platform.torch.redistribute import full_local, redistribute_local
from raggedshard.platform.torch.shards import has_partial, local_of, sharding_dims

__all__ = ["RULES"]

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor of shape (n, *rest) to (*rest)."""


def _over_ranks(value: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], reduce: Reduce) -> torch.Tensor:
    """``value`` reduced over mesh dims, one after the other."""
    for mesh_dim in mesh_dims:
        value = reduce(gather(value, mesh, (mesh_dim,)))
    return value


def _result(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Plain without grad mode, so that values of several meshes mix; replicated where gradient formulas run."""
    if torch.is_grad_enabled() or current_graph_task_id() != -1:
        return wrap_replicated(value, mesh)
    return value


def _terms(tensor: DTensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The local tensor, with Partial dims reduced, and the mesh dims that shard."""
    placements = tensor.placements
    local = local_of(tensor)
    if has_partial(placements):
        reduced = tuple(Replicate() if p.is_partial() else p for p in placements)
        local = redistribute_local(local, tensor.shape, tensor.device_mesh, placements, reduced)
    return local, sharding_dims(placements)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _reduce_all(
    func: Any, args: tuple, kwargs: dict, local_value: Callable[[torch.Tensor], torch.Tensor], reduce: Reduce
) -> torch.Tensor:
    """Reduce ``args[0]`` over all its elements: ``local_value(local)`` is 0-d, ``reduce`` joins the ranks' values."""
    tensor: DTensor = args[0]
    # The operation on a tensor without data gives shape and dtype, and torch's own errors on all ranks alike.
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    outcome = func(meta, *args[1:], **kwargs)
    local, mesh_dims = _terms(tensor)
    value = _over_ranks(local_value(local), tensor.device_mesh, mesh_dims, reduce)
    return _result(value.to(outcome.dtype).reshape(outcome.shape), tensor.device_mesh)


def _covers(tensor: torch.Tensor, dim: Any, *, empty_means_all: bool = True) -> bool:
    """Whether a ``dim`` argument names every dim."""
    if dim is None:
        return True
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return empty_means_all or tensor.ndim == 0
    return {d % tensor.ndim for d in dims} == set(range(tensor.ndim)) if tensor.ndim else True


def _argument(func: Any, args: tuple, kwargs: dict, name: str, default: Any = None) -> Any:
    """The value of an argument of an overload, wherever it was passed."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if not argument.kwarg_only and position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def _summing(func: Any, args: tuple, kwargs: dict) -> Any:
    """``sum``, ``mean``."""
    tensor: DTensor = args[0]
    if not _covers(tensor, _argument(func, args, kwargs, "dim")):
        return run_gathered(func, args, kwargs)
    dtype = _argument(func, args, kwargs, "dtype")
    wide = _wide(dtype if dtype is not None else tensor.dtype)
    count = tensor.numel() if func._schema.name == "aten::mean" else 1

    def add(values: torch.Tensor) -> torch.Tensor:
        return values.sum(0)

    def local_value(local: torch.Tensor) -> torch.Tensor:
        total = local.sum(dtype=wide if wide.is_floating_point or wide.is_complex or dtype is not None else None)
        return total / count if func._schema.name == "aten::mean" else total

    return _reduce_all(func, args, kwargs, local_value, add)


def _product(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor: DTensor = args[0]
    dtype = _argument(func, args, kwargs, "dtype") or tensor.dtype
    wide = _wide(dtype) if dtype.is_floating_point or dtype.is_complex else torch.int64
    return _reduce_all(func, args, kwargs, lambda local: local.prod(dtype=wide), lambda values: values.prod(0))


def _extremum(func: Any, args: tuple, kwargs: dict) -> Any:
    """``max``, ``min`` without dim; ``amax``, ``amin`` over all dims."""
    tensor: DTensor = args[0]
    if not _covers(tensor, _argument(func, args, kwargs, "dim")):
        return run_gathered(func, args, kwargs)
    if tensor.numel() == 0:
        return run_gathered(func, args, kwargs)  # torch's own error, on all ranks
    largest = func._schema.name in ("aten::max", "aten::amax")
    reduce = torch.amax if largest else torch.amin
    identity = (_lowest if largest else _highest)(tensor.dtype)

    def local_value(local: torch.Tensor) -> torch.Tensor:
        return reduce(local) if local.numel() else local.new_full((), identity)

    return _reduce_all(func, args, kwargs, local_value, lambda values: reduce(values, 0))


def _truth(func: Any, args: tuple, kwargs: dict) -> Any:
    """``any``, ``all``."""
    if not _covers(args[0], _argument(func, args, kwargs, "dim"), empty_means_all=False):
        return run_gathered(func, args, kwargs)
    reduce = torch.any if func._schema.name == "aten::any" else torch.all
    return _reduce_all(func, args, kwargs, lambda local: reduce(local), lambda values: reduce(values, 0))


def _count_nonzero(func: Any, args: tuple, kwargs: dict) -> Any:
    if not _covers(args[0], _argument(func, args, kwargs, "dim")):
        return run_gathered(func, args, kwargs)
    return _reduce_all(func, args, kwargs, torch.count_nonzero, lambda values: values.sum(0))


def _norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """``linalg_vector_norm`` and ``norm``."""
    tensor: DTensor = args[0]
    if not _covers(tensor, _argument(func, args, kwargs, "dim")):
        return run_gathered(func, args, kwargs)
    name = "ord" if func._schema.name == "aten::linalg_vector_norm" else "p"
    order = _argument(func, args, kwargs, name, 2)
    order = 2.0 if order is None else float(order)
    dtype = _argument(func, args, kwargs, "dtype")

    def local_value(local: torch.Tensor) -> torch.Tensor:
        return _local_norms([local], order, dtype)[0]

    return _reduce_all(func, args, kwargs, local_value, lambda values: _join_norms(values, order))


def _local_norms(locals_: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norm of each tensor in its wide real dtype; the identity for one that has no elements."""
    norms = []
    for local in locals_:
        wide = _wide(dtype or local.dtype)
        if local.numel():
            norms.append(torch.linalg.vector_norm(local, order, dtype=wide))
        else:
            identity = math.inf if order < 0 else 0.0
            norms.append(torch.full((), identity, dtype=_real(wide), device=local.device))
    return norms


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _join_norms(norms: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of what (n, *rest) norms are norms of."""
    return norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)


def _foreach_norm(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """A norm for each tensor; one gather for all tensors that are sharded over the same dims of the same mesh."""
    tensors = args[0]
    order = float(_argument(func, args, kwargs, "ord", 2))
    dtype = _argument(func, args, kwargs, "dtype")
    terms = [_terms(t) if isinstance(t, DTensor) else (t, ()) for t in tensors]
    if any(t.numel() == 0 and order in (math.inf, -math.inf) for t in tensors):
        raise RuntimeError(f"{func}: a tensor without elements has no norm of order {order}")
    norms = _local_norms([local for local, _ in terms], order, dtype)
    batches: dict[Any, list[int]] = {}
    for index, (tensor, (_, mesh_dims)) in enumerate(zip(tensors, terms, strict=True)):
        if mesh_dims:
            batches.setdefault((tensor.device_mesh, mesh_dims), []).append(index)
    for (mesh, mesh_dims), indices in batches.items():
        wide = torch.float64 if any(norms[i].dtype == torch.float64 for i in indices) else torch.float32
        local = torch.stack([norms[i].to(wide) for i in indices])
        joined = _over_ranks(local, mesh, mesh_dims, lambda values: _join_norms(values, order))
        for index, norm in zip(indices, joined.unbind(), strict=True):
            norms[index] = norm
    norms = [norm.to(_real(dtype or t.dtype)) for norm, t in zip(norms, tensors, strict=True)]
    return [_result(n, t.device_mesh) if isinstance(t, DTensor) else n for n, t in zip(norms, tensors, strict=True)]


def _equal(func: Any, args: tuple, kwargs: dict) -> bool:
    """Shapes and all values; the second tensor is brought to the layout of the first."""
    first, second = args
    for tensor in args:
        if not isinstance(tensor, DTensor):
            raise mixed_error(func, tensor)
    if first.shape != second.shape:
        return False
    common_mesh(func, args)
    if has_partial(first.placements):
        return func(full_local(first), full_local(second))
    mesh, placements = first.device_mesh, first.placements
    other = redistribute_local(local_of(second), second.shape, mesh, second.placements, placements)
    same = torch.tensor(torch.equal(local_of(first), other), device=other.device)
    return bool(_over_ranks(same, mesh, sharding_dims(placements), lambda values: values.all(0)))


def _unscale(func: Any, args: tuple, kwargs: dict) -> None:
    """GradScaler's unscale: every rank learns of an inf that one of them holds."""
    grads, found_inf, inv_scale = args
    locals_ = [local_of(g) if isinstance(g, DTensor) else g for g in grads]
    func(locals_, found_inf, inv_scale, **kwargs)
    groups = {(g.device_mesh, d) for g in grads if isinstance(g, DTensor) for d in _unequal_dims(g)}
    for mesh, mesh_dim in sorted(groups, key=lambda group: [g.device_mesh for g in grads].index(group[0])):
        found_inf.copy_(_over_ranks(found_inf, mesh, (mesh_dim,), lambda values: values.amax(0)))


def _unequal_dims(tensor: DTensor) -> list[int]:
    return [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def _overloads(name: str, *overloads: str) -> list[tuple[str, str]]:
    return [(name, overload) for overload in overloads]


RULES: dict[tuple[str, str], Callable[[Any, tuple, dict], Any]] = {
    **dict.fromkeys(_overloads("sum", "", "default", "dim_IntList"), _summing),
    **dict.fromkeys(_overloads("mean", "", "default", "dim"), _summing),
    **dict.fromkeys(_overloads("prod", "", "default"), _product),
    **dict.fromkeys(
        [(n, o) for n in ("max", "min", "amax", "amin") for o in ("", "default")],
        _extremum,
    ),
    **dict.fromkeys([(n, o) for n in ("any", "all") for o in ("", "default", "dims")], _truth),
    **dict.fromkeys(_overloads("count_nonzero", "", "default", "dim_IntList"), _count_nonzero),
    **dict.fromkeys(_overloads("linalg_vector_norm", "", "default"), _norm),
    **dict.fromkeys(_overloads("norm", "Scalar", "ScalarOpt_dtype", "ScalarOpt_dim", "ScalarOpt_dim_dtype"), _norm),
    ("_foreach_norm", "Scalar"): _foreach_norm,
    **dict.fromkeys(_overloads("equal", "", "default"), _equal),
    **dict.fromkeys(_overloads("_amp_foreach_non_finite_check_and_unscale_", "", "default"), _unscale),
}
"""Rules by the operation's name and overload."""
