"""What this backend uses of MindSpore's private API, in one place. Checked with MindSpore 2.10.0.

MindSpore has an autograd engine, tensor subclasses and storages, but documents few of their names. Each use below
can go once a public name does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore._c_expression import _DisableMsDispatchMode as DisableDispatch
from mindspore._c_expression import run_backward as _run_backward
from mindspore.common.recompute import _RecomputeCell
from mindspore.communication.management import _init_with_store as init_with_store
from mindspore.graph.api import _no_grad as no_grad
from mindspore.graph.api import _pynative_executor as executor

__all__ = [
    "DisableDispatch",
    "Function",
    "accumulates_in_leaves",
    "alias",
    "copy_of",
    "device_type",
    "executor",
    "front_alias",
    "grad_of",
    "in_backward",
    "init_with_store",
    "is_recording",
    "itemsize",
    "no_elements",
    "no_grad",
    "queue_final_callback",
    "recomputes_reentrantly",
    "resize_storage",
    "run_backward",
    "set_grad",
    "subclass",
    "swap_memory",
]

Function = ms._Function
"""A custom autograd function. One that returns an input returns a view of it (see `alias`)."""


def is_recording() -> bool:
    """Whether operations go into an autograd graph now."""
    return bool(executor.requires_grad())


def in_backward() -> bool:
    """Whether a backward runs; recomputation runs forwards inside it."""
    return executor.get_current_autodiff_engine_id() != -1


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward under way is over. What it raises comes out of the backward call."""
    executor.queue_backward_final_callback(callback)


_leaf_backwards = 0


def run_backward(tensor: Tensor, gradient: Tensor | None, retain_graph: bool, create_graph: bool) -> None:
    """Accumulate gradients into the leaves that ``tensor`` was computed from."""
    global _leaf_backwards
    _leaf_backwards += 1
    try:
        _run_backward((tensor,), None if gradient is None else (gradient,), retain_graph, create_graph, ())
    finally:
        _leaf_backwards -= 1


def accumulates_in_leaves() -> bool:
    """Whether the backward under way is `run_backward`; ``value_and_grad`` returns its gradients instead."""
    return _leaf_backwards > 0


def grad_of(leaf: Any) -> Any:
    """What backwards accumulated in a leaf, on top of what `set_grad` put there."""
    accumulated, held = leaf._grad, getattr(leaf, "_held_grad", None)
    if accumulated is None or held is None:
        return held if accumulated is None else accumulated
    set_grad(leaf, held + accumulated)
    return leaf._held_grad


def set_grad(leaf: Any, grad: Tensor | None) -> None:
    """Replace what backwards accumulated; ``None`` clears it."""
    leaf._grad = None
    # Held here: a leaf keeps the value of a tensor that is put into it, and not the object; reading a tensor of a
    # subclass back fails. One that a backward put there has its object.
    leaf._held_grad = grad


def subclass(cls: type, local: Tensor) -> Any:
    """A tensor of class ``cls`` that shares its storage and version counter with ``local``.

    If ``local`` is a view, operators do not reach the class's ``__ms_dispatch__``.
    """
    return Tensor._make_subclass(cls, local)


def copy_of(tensor: Tensor) -> Tensor:
    """A new tensor of the same values that is no view. ``Tensor.copy`` of no elements gives the tensor itself."""
    return tensor.copy() if tensor.size else no_elements(tensor.shape, tensor.dtype)


def no_elements(shape: Sequence[int], dtype: Any) -> Tensor:
    """A tensor without elements, in front of a zero.

    The CPU kernel of ``nn.AdamWeightDecay`` takes no elements for one. With zeros it changes no memory.
    """
    return front_alias(np.zeros(1, ms.dtype_to_nptype(dtype)), shape)


def alias(tensor: Tensor) -> Tensor:
    """A new leaf on the same storage, with a version counter of its own, that is no view.

    An operation copies an operand that is a view, and autograd saves the copy, so that freeing the storage between
    forward and backward would free nothing. An alias is saved as it is.
    """
    other = mint.empty((0,), dtype=tensor.dtype)
    other.data = tensor
    return other


def front_alias(padded: np.ndarray, shape: Sequence[int]) -> Tensor:
    """A tensor of ``shape`` on the front of a 1-D host buffer; operators and optimizers can write to it.

    They cannot through a view: on a CPU, MindSpore's in-place kernels check the size of the whole storage, or do
    nothing.
    """
    numel = int(np.prod(shape, dtype=np.int64))
    return Tensor.from_numpy(padded[:numel].reshape(tuple(shape)))


def itemsize(dtype: Any) -> int:
    """Bytes of one element of a MindSpore dtype."""
    return mint.empty((0,), dtype=dtype).itemsize


def resize_storage(tensor: Tensor, numel: int) -> None:
    """Free (``numel`` 0) or allocate the memory behind a tensor. Its contents are undefined afterwards."""
    tensor.untyped_storage().resize_(numel * tensor.itemsize)


def recomputes_reentrantly(cell: nn.Cell) -> bool:
    """Whether ``cell.recompute()`` was called with its default ``use_reentrant=True``."""
    return isinstance(cell._recompute_cell, _RecomputeCell)


def device_type() -> str:
    """``"cpu"`` or ``"npu"``, what MindSpore runs on."""
    return {"CPU": "cpu", "Ascend": "npu"}[ms.get_context("device_target")]


def swap_memory(tensor: Tensor, source: Tensor) -> None:
    """Let ``tensor`` be the memory, shape and dtype of ``source``."""
    Tensor.data.__set__(tensor, source)
