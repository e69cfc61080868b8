"""Ties the neutral `HSDPState` to cells and to MindSpore's autograd.

    pre-forward    gathers, and puts a node `_Unshard` into the graph:  sharded parameters -> unsharded parameters
    post-forward   frees the unsharded parameters, and watches the output
    backward       the output's gradient comes: gathers again; `_Unshard` gets the gradients of the unsharded
                   parameters, reduces them and returns those of the sharded ones

So gradients reach the sharded parameters by autograd alone, in ``value_and_grad`` and in ``loss.backward()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from raggedshard.fully_shard.hooks import ForwardHooks
from raggedshard.fully_shard.state import HSDPState, Use
from raggedshard.platform.mindspore.fully_shard.param import HSDPParamV2
from raggedshard.platform.mindspore.fully_shard.param_group import HSDPParamGroup
from raggedshard.platform.mindspore.private import (
    Function,
    accumulates_in_leaves,
    grad_of,
    in_backward,
    is_recording,
    queue_final_callback,
    set_grad,
)

__all__ = ["MindSporeEngine", "attach_hooks"]


class MindSporeEngine:
    """The `Engine` of MindSpore.

    Attributes:
        states: the units that run under it.
    """

    def __init__(self) -> None:
        self.states: Sequence[HSDPState] = ()

    def is_grad_enabled(self) -> bool:
        return is_recording()

    def in_backward(self) -> bool:
        return in_backward()

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        def finish() -> None:
            callback()
            deliver_leftovers(self.states)

        queue_final_callback(finish)


def deliver_leftovers(states: Sequence[HSDPState]) -> None:
    """Give out gradients that were complete only after autograd had passed the unit.

    Raises:
        RuntimeError: there are some and ``value_and_grad`` has its results already.
    """
    groups = [state.group for state in states if isinstance(state.group, HSDPParamGroup)]
    left = [(p, grad) for group in groups for p in group.params if (grad := p.take_sharded_grad()) is not None]
    if left and not accumulates_in_leaves():
        raise RuntimeError(
            f"this rank's loss does not depend on {[p.name for p, _ in left]}, or only through some of several uses, "
            "but the gradient of other ranks or uses does. value_and_grad cannot return it: let every rank's loss "
            "depend on all units, or use enable_mindspore_backward_compact() and loss.backward()"
        )
    for p, grad in left:
        earlier = grad_of(p.sharded_param)
        set_grad(p.sharded_param, grad if earlier is None else earlier + grad)


class _Unshard(Function):
    """From the sharded parameters of one use to the unsharded ones."""

    @staticmethod
    def forward(
        ctx: Any, state: HSDPState, use: Use, params: Sequence[HSDPParamV2], whole: Sequence[Any], *sharded: Any
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.state, ctx.use, ctx.params = state, use, params
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        state: HSDPState = ctx.state
        group = state.group
        assert isinstance(group, HSDPParamGroup) and state.context is not None
        group.receive(ctx.params, grads)
        state.post_backward(ctx.use)
        state.context.finish_reduce()
        reduced = [p.take_sharded_grad() for p in ctx.params]
        if not accumulates_in_leaves():  # value_and_grad makes plain zeros where it gets nothing
            reduced = [
                p.no_grad_at_all() if grad is None else grad for p, grad in zip(ctx.params, reduced, strict=True)
            ]
        return (None, None, None, None, *reduced)


class _CellHooks(ForwardHooks):
    """`ForwardHooks` of cells."""

    def __init__(
        self, cells: Sequence[nn.Cell], state: HSDPState, mp_policy: Any, prepare: Callable[[nn.Cell], None]
    ) -> None:
        super().__init__(cells, state, mp_policy, prepare)
        self._connected: dict[Use, list[tuple[HSDPParamV2, Tensor]]] = {}

    def map_tensors(self, value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        return map_tensors(value, fn)

    def cast(self, tensor: Tensor, dtype: Any) -> Tensor:
        is_float = tensor.dtype in ms.common.dtype.float_type
        return tensor.astype(dtype) if is_float and tensor.dtype != dtype else tensor

    def attach(self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._connected[use] = self._connect(use)
        return args, kwargs

    def _connect(self, use: Use) -> list[tuple[HSDPParamV2, Tensor]]:
        """Connect the unsharded parameters of this forward with the sharded ones."""
        group = self.state.group
        if not isinstance(group, HSDPParamGroup):
            return []
        group.is_ahead = False
        params = group.trainable
        if not params or not is_recording():
            return []
        whole = [p.new_unsharded_alias() for p in params]
        connected = _Unshard.apply(self.state, use, params, whole, *(p.sharded_param for p in params))
        pairs = list(zip(params, connected, strict=True))
        _compute_with(pairs)
        return pairs

    def post_forward(self, module: nn.Cell, args: Any, output: Any) -> Any:
        self._connected.pop(self._uses[-1], None)
        output = super().post_forward(module, args, output)
        if self._uses:  # a cell that called itself goes on
            _compute_with(self._connected[self._uses[-1]])
        return output

    def watch(self, tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
        if tensor._requires_grad:
            tensor.register_hook(hook)


def _compute_with(connected: list[tuple[HSDPParamV2, Tensor]]) -> None:
    for p, tensor in connected:
        p.to_unsharded(tensor)


def attach_hooks(
    cells: Sequence[nn.Cell], state: HSDPState, mp_policy: Any, prepare: Callable[[nn.Cell], None]
) -> None:
    """Register a unit's forward hooks; arguments as `ForwardHooks`."""
    hooks = _CellHooks(cells, state, mp_policy, prepare)
    for cell in cells:
        cell.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        cell.register_forward_hook(hooks.post_forward, always_call=True)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``fn`` to the tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, fn) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, fn) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, fn) for item in value)
    return value
