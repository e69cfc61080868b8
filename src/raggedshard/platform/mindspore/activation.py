"""What flows between tensor-parallel cells: layout changes on a 1-D mesh whose gradients lie as they should.

    value         its gradient
    Replicate()   Replicate(): whole and equal on all ranks
    Shard(dim)    Shard(dim)
    Partial()     Replicate(): each rank's term of a sum gets the gradient of the sum

Only in front of a computation that cells share out, the gradient of a Replicate() value is Partial().
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from mindspore import Tensor, mint, ops

from raggedshard.geometry import chunk_lengths
from raggedshard.placements import Partial, Replicate, Shard
from raggedshard.platform.mindspore.collectives import Group, agree, all_gather, all_reduce, reduce_scatter
from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.dtensor import DTensor
from raggedshard.platform.mindspore.private import Function, alias, copy_of, is_recording

__all__ = ["Activation", "chunk_layout", "read"]


class Activation(NamedTuple):
    """A tensor on a 1-D mesh.

    Args:
        local: this rank's part, a plain tensor.
        shape: the global shape.
        layout: Replicate, Partial or a Shard of a dim that counts from the front.
    """

    local: Tensor
    shape: tuple[int, ...]
    layout: Any

    def moved(self, mesh: DeviceMesh, layout: Any, gradient: Any = None) -> Activation:
        """This tensor with another layout. Differentiable; collective.

        Args:
            gradient: how the gradient of the result lies; by default as the table above says.
        """
        before, after = _gradient_layout(self.layout), gradient or _gradient_layout(layout)
        if self.layout == layout and before == after:
            return self
        if is_recording() and self.local._requires_grad:
            local = _Move.apply(self.local, self.shape, mesh, (self.layout, layout), (after, before))
        else:
            local = _move(self.local, self.shape, mesh, self.layout, layout)
        return Activation(local, self.shape, layout)

    def given(self, where: str, mesh: DeviceMesh, layout: Any, as_local: bool) -> Tensor:
        """What a cell returns: this tensor laid out so, as a plain tensor or a DTensor."""
        moved = self.moved(mesh, chunk_layout(where, layout, self.shape, mesh))
        return moved.local if as_local else moved.as_dtensor(mesh)

    def as_dtensor(self, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(self.local, mesh, (self.layout,), shape=self.shape)


def read(where: str, value: Any, mesh: DeviceMesh, layout: Any) -> Activation:
    """An input of a cell.

    Args:
        value: a DTensor on the mesh, which says itself how it lies; or this rank's plain tensor.
        layout: how a plain tensor lies. The global length of a dim that it cuts is asked from the other ranks.

    Raises:
        ValueError: it is no tensor; it lies on another mesh; the layout does not fit it, or the lengths of the ranks'
            parts are not those of chunks.
    """
    if isinstance(value, DTensor):
        if value.device_mesh != mesh:
            raise ValueError(
                f"{where}: the input {value!r} lies on {value.device_mesh}, and the cell's weights on {mesh}"
            )
        layout = value.placements[0]
        if type(layout) not in (Replicate, Shard) and layout != Partial():
            raise ValueError(f"{where}: the input lies as {layout}; redistribute it to Replicate() or Shard(dim)")
        return Activation(value.to_local(), tuple(value.shape), layout)
    if not isinstance(value, Tensor):
        raise ValueError(f"{where}: the input must be a Tensor or a DTensor, got {type(value).__name__}")
    shape = list(value.shape)
    layout = _counted(where, layout, len(shape))
    if isinstance(layout, Shard):
        shape[layout.dim] = _whole_length(where, value, layout, mesh.get_group())
    return Activation(value, tuple(shape), layout)


def chunk_layout(where: str, layout: Any, shape: tuple[int, ...], mesh: DeviceMesh) -> Any:
    """``layout`` with a dim that counts from the front.

    Raises:
        ValueError: there is no such dim, or it would leave a rank without elements, of which MindSpore's sums are
            garbage.
    """
    layout = _counted(where, layout, len(shape))
    if isinstance(layout, Shard) and layout.dim < len(shape) - 1:
        lengths = chunk_lengths(shape[layout.dim], mesh.size())
        if not all(lengths):
            raise ValueError(
                f"{where}: {layout} of shape {shape} gives {mesh.size()} ranks lengths {lengths}: pad dim "
                f"{layout.dim}, so that no rank is left with nothing, or use fewer ranks"
            )
    return layout


def _counted(where: str, layout: Any, ndim: int) -> Any:
    if not isinstance(layout, Shard):
        return layout
    if not -ndim <= layout.dim < ndim:
        raise ValueError(f"{where}: {layout} of a tensor of {ndim} dims: give a dim that it has")
    return Shard(layout.dim % ndim)


def _whole_length(where: str, value: Tensor, layout: Shard, group: Group) -> int:
    lengths = tuple(length for (length,) in agree((value.shape[layout.dim],), group))
    whole = sum(lengths)
    if lengths != chunk_lengths(whole, group.size):
        raise ValueError(
            f"{where}: the ranks' inputs have lengths {lengths} along dim {layout.dim}, but {layout} of {whole} gives "
            f"{chunk_lengths(whole, group.size)}; cut the input so, or state its real layout in input_layouts"
        )
    return whole


def _gradient_layout(layout: Any) -> Any:
    return Replicate() if layout.is_partial() else layout


class _Move(Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, layouts: Any, gradient_layouts: Any
    ) -> Tensor:
        ctx.back = shape, mesh, *gradient_layouts
        return _move(local, shape, mesh, *layouts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _move(grad, *ctx.back), None, None, None, None


def _move(local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, source: Any, target: Any) -> Tensor:
    group = mesh.get_group()
    if source == target or group.size == 1:
        return alias(local)  # a custom function that returns its input would return a view
    if not source.is_replicate():
        _check_same(local, shape, group, source, target)
    if source.is_partial():
        return _sum_of_part(local, group, target.dim) if target.is_shard() else all_reduce(local, group)
    whole = _gathered(local, shape, group, source.dim) if source.is_shard() else local
    return _own_part(whole, group, target.dim) if target.is_shard() else whole


def _gathered(local: Tensor, shape: tuple[int, ...], group: Group, dim: int) -> Tensor:
    """The whole tensor; chunks travel padded to the longest."""
    lengths = chunk_lengths(shape[dim], group.size)
    parts = all_gather(_padded(local, dim, lengths[0]), group)
    held = [mint.narrow(part, dim, 0, length) for part, length in zip(parts, lengths, strict=True) if length]
    return ops.cat(held, axis=dim)


def _sum_of_part(local: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's chunk of the sum of the ranks' terms."""
    lengths = chunk_lengths(local.shape[dim], group.size)
    chunks = [_padded(chunk, dim, lengths[0]) for chunk in mint.split(local, lengths, dim)]
    own = reduce_scatter(ops.cat([chunk.reshape((-1,)) for chunk in chunks]), group).reshape(chunks[0].shape)
    return _front(own, dim, lengths[group.rank])


def _own_part(whole: Tensor, group: Group, dim: int) -> Tensor:
    lengths = chunk_lengths(whole.shape[dim], group.size)
    return copy_of(mint.split(whole, lengths, dim)[group.rank])


def _padded(local: Tensor, dim: int, length: int) -> Tensor:
    missing = length - local.shape[dim]
    if not missing:
        return local.copy()  # a collective needs a tensor of its own that is contiguous
    zeros = mint.zeros((*local.shape[:dim], missing, *local.shape[dim + 1 :]), dtype=local.dtype)
    return ops.cat([local, zeros], axis=dim)


def _front(tensor: Tensor, dim: int, length: int) -> Tensor:
    if tensor.shape[dim] == length:
        return tensor
    return copy_of(mint.split(tensor, (length, tensor.shape[dim] - length), dim)[0])


def _check_same(local: Tensor, shape: tuple[int, ...], group: Group, source: Any, target: Any) -> None:
    """Make sure that all ranks are about to do the same; MCCL would mix up what they send.

    Raises:
        RuntimeError: they are not.
    """
    own = f"{local.dtype} of shape {shape} from {source} to {target}"
    digests = [digest for (digest,) in agree((zlib.crc32(own.encode()),), group)]
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"the tensor-parallel ranks {group.ranks} are not doing the same: this one moves {own}, others do not. "
            "They must run the same cells on the same batch: give all of them the data of one data-parallel rank"
        )
