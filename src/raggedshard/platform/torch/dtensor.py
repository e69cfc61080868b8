"""The tensor class of sharded parameters: a subclass of torch's DTensor that knows ragged placements.

torch's own sharding rules never see a ragged placement: `ShardedDTensor` runs every operation through
`raggedshard.platform.torch.dispatch`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from raggedshard.platform.torch import dtensor_checkpoint
from raggedshard.platform.torch.placements import RaggedShard, RaggedStridedShard
from raggedshard.platform.torch.private import DTensorSpec, TensorMeta, support_foreach
from raggedshard.platform.torch.redistribute import redistribute_local
from raggedshard.platform.torch.shards import dense_stride, local_of

__all__ = ["ShardedDTensor", "wrap_like", "wrap_local", "wrap_replicated"]


class ShardedDTensor(DTensor):
    """A DTensor on any mesh whose placements may be ragged; the class of every parameter that ``fully_shard`` makes.

    Made by `wrap_local` or, with checks, by the functions of `raggedshard.platform.torch.distribute`. ``shape`` is
    the global shape; ``to_local()`` the rows that this rank holds, of which there may be none.

    - Element-wise operations run on the local tensors. Operands of other placements are brought to the layout of the
      first sharded one (of the tensor that is written, if there is one); the result has that layout.
    - Reductions over all elements communicate one value per rank. Without grad mode they return plain tensors, so
      that values of several meshes can be combined; in grad mode replicated tensors of this class.
    - Random operations draw the numbers of the whole tensor and keep the rank's own: with equal seeds the values are
      those of an unsharded tensor, on any number of ranks.
    - Other operations run on the gathered tensors, and their results are replicated; writes to a view, ``w[0]``, reach
      the tensor.
    - The gradient of a leaf has the leaf's placements.
    - What comes out of an operation is of this class, so that the same holds for it.
    """

    _gathered: Any = None  # a `gathered.Gathered`, on views whose elements live on other ranks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from raggedshard.platform.torch.dispatch import dispatch  # the rules make tensors of this class

        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(local_tensor={self._local_tensor}, shape={tuple(self.shape)}, "
            f"device_mesh={self.device_mesh}, placements={self.placements})"
        )

    # --- layout changes

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part. Differentiable.

        Args:
            grad_placements: the placements of the gradient that will arrive; those of this tensor by default, with
                Replicate for Partial.
        """
        if not torch.is_grad_enabled():
            return local_of(self)
        from raggedshard.platform.torch.autograd import ToLocal

        return ToLocal.apply(self, grad_placements)  # type: ignore[return-value]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The global tensor on every rank. Differentiable; collective."""
        from raggedshard.platform.torch.autograd import ToLocal

        replicated = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return ToLocal.apply(replicated, grad_placements)  # type: ignore[return-value]

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> ShardedDTensor:
        """This tensor with other placements, of the same class whatever they are. Differentiable; collective.

        Args:
            async_op: accepted for torch's sake; the result is complete in any case.
            forward_dtype: dtype to communicate in and to return.
            backward_dtype: dtype to communicate the gradient in; this tensor's by default.

        Raises:
            ValueError: another mesh, or placements that do not fit.
        """
        from raggedshard.platform.torch.autograd import redistribute_sharded

        return redistribute_sharded(self, device_mesh, placements, forward_dtype, backward_dtype)

    # --- autograd

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedDTensor:
        super().requires_grad_(requires_grad)
        if requires_grad:
            self._keep_gradient_layout()
        return self

    def _keep_gradient_layout(self) -> None:
        """Formulas of torch may return a leaf's gradient as Replicate or Partial: bring it to the leaf's placements."""
        if self.is_leaf and "_layout_hook" not in self.__dict__:
            self._layout_hook = self.register_hook(partial(_to_layout, self.device_mesh, self.placements))

    # --- copies and files

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedDTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors (made by the user) can be deep-copied; use detach() first")
        local = copy.deepcopy(self._local_tensor, memo)  # keeps storage that tensors share shared
        result = _wrap(local, self._spec, self.requires_grad)
        memo[id(self)] = result
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        vars(result).update(copy.deepcopy(self._user_attributes(), memo))
        return result

    def __reduce_ex__(self, proto: Any) -> Any:
        local = self._local_tensor.detach()
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()  # else the bytes around a view, such as padding, are written too
        meta = (self.device_mesh, self.placements, tuple(self.shape), self.stride())
        return (_rebuild, (local, *meta, self.requires_grad, self._user_attributes()))

    def _user_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_ATTRIBUTES}

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        placements, meta, _, requires_grad = flatten_spec
        spec = DTensorSpec(
            inner_tensors["device_mesh"], placements, tensor_meta=TensorMeta(outer_size, outer_stride, meta.dtype)
        )
        return ShardedDTensor(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)

    # --- torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return dtensor_checkpoint.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return dtensor_checkpoint.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return dtensor_checkpoint.shard_at(self, index)


_requires_grad: Any = torch.Tensor.requires_grad
_OWN_ATTRIBUTES = frozenset({"_local_tensor", "_spec", "_layout_hook", "_gathered"})


def wrap_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool = False,
) -> ShardedDTensor:
    """A tensor around this rank's part, without communication, autograd or checks.

    Args:
        local: becomes ``_local_tensor`` itself, so writes to it are writes to the tensor. Must not require grad.
        shape: the global shape.
        stride: the global stride.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return _wrap(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad)


def wrap_like(local: torch.Tensor, spec: DTensorSpec) -> ShardedDTensor:
    """A tensor of the layout ``spec`` around a new local tensor, whose dtype may be another."""
    meta = spec.tensor_meta
    assert meta is not None
    stride = dense_stride(meta.shape, meta.stride)
    if local.dtype == meta.dtype and stride == meta.stride:
        return _wrap(local, spec)
    return wrap_local(local, spec.mesh, spec.placements, meta.shape, stride)


def wrap_replicated(full: torch.Tensor, mesh: DeviceMesh) -> ShardedDTensor:
    """A tensor that every rank of the mesh holds as a whole."""
    return wrap_local(full, mesh, (Replicate(),) * mesh.ndim, full.shape, full.stride())


def _wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> ShardedDTensor:
    tensor = cast(ShardedDTensor, ShardedDTensor(local, spec, requires_grad=requires_grad))
    if requires_grad:
        tensor._keep_gradient_layout()
    return tensor


def _to_layout(mesh: DeviceMesh, placements: tuple[Placement, ...], grad: torch.Tensor) -> torch.Tensor | None:
    """The tensor hook of a leaf; ``None`` leaves the gradient as it is."""
    if isinstance(grad, ShardedDTensor) and grad.placements == placements:
        return None
    assert isinstance(grad, DTensor), f"a sharded tensor got a gradient of type {type(grad).__name__}"
    local = redistribute_local(local_of(grad), grad.shape, mesh, grad.placements, placements)
    return wrap_local(local, mesh, placements, grad.shape, dense_stride(tuple(grad.shape), tuple(grad.stride())))


def _rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> ShardedDTensor:
    tensor = wrap_local(local, mesh, placements, shape, stride, requires_grad)
    vars(tensor).update(attributes)
    return tensor


support_foreach(ShardedDTensor)
# For torch.load(weights_only=True).
torch.serialization.add_safe_globals([ShardedDTensor, RaggedShard, RaggedStridedShard, _rebuild])
