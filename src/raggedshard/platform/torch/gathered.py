"""Operations without a rule for sharded operands: right, not fast.

Every DTensor operand is gathered, the operation runs on the full tensors on every rank, and

    a new result        is replicated
    a written operand   takes its rank's part of what was written
    a view              remembers the tensor it was gathered from, and writes to the view go through to it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local, wrap_replicated
from raggedshard.platform.torch.elementwise import common_mesh, mixed_error, written_tensors
from raggedshard.platform.torch.factories import alias
from raggedshard.platform.torch.private import DTensorSpec, TensorMeta, no_dispatch
from raggedshard.platform.torch.redistribute import full_local
from raggedshard.platform.torch.shards import dense_stride, local_of, part_of, sharding_dims

__all__ = ["RULES", "Gathered", "is_view", "run_gathered", "run_inplace_view", "run_random", "run_view"]


@dataclass
class Gathered:
    """Where a gathered view came from: ``full`` holds the values of ``base`` as of ``version``."""

    base: ShardedDTensor
    full: torch.Tensor
    version: int

    def check(self) -> None:
        """Raises RuntimeError if the base was written since: the view's values are no longer the base's."""
        if self.version != _version(self.base):
            raise RuntimeError(
                f"a view of a sharded tensor of shape {tuple(self.base.shape)} is used after the tensor was changed; "
                "take the view again after the change"
            )

    def write_through(self) -> None:
        """Bring what was written to ``full`` to the base."""
        _write_part(self.full, self.base)
        increment_version([] if self.base._local_tensor.is_inference() else [self.base._local_tensor])
        self.version = _version(self.base)


def _version(tensor: ShardedDTensor) -> int:
    local = local_of(tensor)
    return -1 if local.is_inference() else local._version  # `dispatch` counts writes; inference tensors count none


@cache
def is_view(func: Any) -> bool:
    """Whether an overload returns a view of its first argument."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def run_gathered(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation of no special kind.

    torch's own placements too: its rules refuse to write what would change its placement, add up terms that were each
    rounded to half precision (Muon's products), and leave terms of a norm that nothing else can take (Adafactor).
    """
    return _run_full(func, args, kwargs, full_local, wrap_replicated)


def run_random(func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw for the whole tensor on every rank: the generator ends as it does for an unsharded tensor.

    The ranks' generators must start alike, as they do after ``torch.manual_seed`` with one seed.
    """
    name = func._schema.name.removeprefix("aten::")
    blank = args[0] if name in _FILLS or name.endswith("_like") else None
    like = next(a for a in tree_flatten((args, kwargs))[0] if isinstance(a, DTensor))

    def wrap(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        if full.shape != like.shape or not sharding_dims(like.placements):
            return wrap_replicated(full, mesh)
        local = part_of(full, mesh, like.placements)
        return wrap_local(local, mesh, like.placements, full.shape, full.stride())

    return _run_full(func, args, kwargs, lambda t: _blank(t) if t is blank else full_local(t), wrap)


def run_view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view; one that changes nothing is an alias."""
    tensor = args[0]
    name = func._schema.name.removeprefix("aten::")
    if not isinstance(tensor, ShardedDTensor):
        return run_gathered(func, args, kwargs)
    if name in _IDENTITY_AT_SAME_SHAPE and _changes_nothing(func, args, kwargs):
        return alias(tensor)
    full = full_local(tensor)
    source = tensor._gathered
    if source is None and full is not local_of(tensor):
        source = Gathered(tensor, full, _version(tensor))
    out = func(full, *args[1:], **kwargs)
    return tree_map(lambda t: _wrap_view(t, tensor.device_mesh, source) if isinstance(t, torch.Tensor) else t, out)


def run_inplace_view(func: Any, args: tuple, kwargs: dict) -> Any:
    """``t_`` and its kin: the tensor itself becomes a gathered view of what it was."""
    tensor = args[0]
    if func._schema.name.removeprefix("aten::") not in _INPLACE_TRANSPOSES:
        raise NotImplementedError(f"{func}: a sharded tensor cannot change its storage or number of elements in place")
    view = run_view(torch.ops.aten.alias.default, (alias(tensor),), {})
    func(view._local_tensor, *args[1:], **kwargs)
    with no_dispatch():
        func(tensor, *args[1:], **kwargs)  # the wrapper's own sizes
    tensor._local_tensor, tensor._gathered = view._local_tensor, view._gathered
    meta = TensorMeta(view._local_tensor.shape, view._local_tensor.stride(), tensor.dtype)
    tensor._spec = DTensorSpec(tensor.device_mesh, view.placements, tensor_meta=meta)
    return tensor


def _run_full(func: Any, args: tuple, kwargs: dict, full_of: Any, wrap: Any) -> Any:
    """Run on full tensors, write back, and wrap what is new by ``wrap(full, mesh)``."""
    flat, structure = tree_flatten((args, kwargs))
    mesh = common_mesh(func, [value for value in flat if isinstance(value, DTensor)])
    full = [_full_operand(func, value, full_of) for value in flat]
    full_args, full_kwargs = tree_unflatten(full, structure)
    out = func(*full_args, **full_kwargs)
    written = written_tensors(func, args, kwargs)
    for value, operand in zip(flat, full, strict=True):
        if isinstance(value, DTensor) and any(value is tensor for tensor in written):
            _write_part(operand, value)
    return _rewrap(out, flat, full, lambda t: wrap(t, mesh))


def _rewrap(out: Any, given: list[Any], used: list[Any], wrap: Any) -> Any:
    """Give back the given operand for one that the operation returned, and ``wrap`` every other tensor."""
    originals = {id(u): g for g, u in zip(given, used, strict=True) if isinstance(u, torch.Tensor)}

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return originals[id(value)] if id(value) in originals else wrap(value)

    return tree_map(one, out)


def _full_operand(func: Any, value: Any, full_of: Any) -> Any:
    if isinstance(value, DTensor):
        return full_of(value)
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.ndim > 1):
        raise mixed_error(func, value)
    return value


def _blank(tensor: DTensor) -> torch.Tensor:
    """A full tensor without values, laid out in memory as an unsharded one: random numbers follow memory order."""
    stride = dense_stride(tuple(tensor.shape), tuple(tensor.stride()))
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=local_of(tensor).device)


def _write_part(full: torch.Tensor, tensor: DTensor) -> None:
    local = local_of(tensor)
    if full is not local:
        local.copy_(part_of(full, tensor.device_mesh, tensor.placements))


def _wrap_view(full: torch.Tensor, mesh: DeviceMesh, source: Gathered | None) -> ShardedDTensor:
    view = wrap_replicated(full, mesh)
    view._gathered = source
    return view


def _changes_nothing(func: Any, args: tuple, kwargs: dict) -> bool:
    tensor = args[0]
    before = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    after = func(before, *args[1:], **kwargs)
    return isinstance(after, torch.Tensor) and after.shape == before.shape and after.dtype == before.dtype


_FILLS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_"}
)
"""Random operations whose result does not depend on the values before."""

_IDENTITY_AT_SAME_SHAPE = frozenset({"view", "_unsafe_view", "_reshape_alias", "expand", "squeeze", "slice"})

_INPLACE_TRANSPOSES = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"})

RULES: dict[str, Any] = {"_unsafe_view": run_view}
"""Rules by the operation's name, for all its overloads."""
