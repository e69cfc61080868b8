"""Ties the neutral `HSDPState` to cells and to MindSpore's autograd.

    pre-forward    gathers, and puts a node `_Unshard` into the graph:  sharded parameters -> unsharded parameters
    post-forward   frees the unsharded parameters, and watches the output
    backward       the output's gradient comes: gathers again; `_Unshard` gets the gradients of the unsharded
                   parameters, reduces them and returns those of the sharded ones

So gradients reach the sharded parameters by autograd alone, in ``value_and_grad`` and in ``loss.backward()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

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


class _CellHooks:
    """The forward hooks of a unit, which spans one cell or several."""

    def __init__(
        self, cells: Sequence[nn.Cell], state: HSDPState, mp_policy: Any, prepare: Callable[[nn.Cell], None]
    ) -> None:
        self._cells = tuple(cells)
        self._state = state
        self._policy = mp_policy
        self._prepare = prepare
        self._to_run: set[nn.Cell] = set()
        self._uses: list[Use] = []

    def pre_forward(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._uses.append(Use())
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            args, kwargs = map_tensors((args, kwargs), _cast_to(self._policy.param_dtype))
        self._prepare(cell)
        # A cell that is not awaited starts another forward of the unit. A recomputation in backward may stop early.
        if self._state.in_backward or cell not in self._to_run:
            self._state.pre_forward()
            self._to_run = set() if self._state.in_backward else set(self._cells)
        self._attach_use()
        return args, kwargs

    def _attach_use(self) -> None:
        """Connect the unsharded parameters of this forward with the sharded ones."""
        group = self._state.group
        if not isinstance(group, HSDPParamGroup):
            return
        group.is_ahead = False
        params = group.trainable
        if not params or not is_recording():
            return
        whole = [p.new_unsharded_alias() for p in params]
        connected = _Unshard.apply(self._state, self._uses[-1], params, whole, *(p.sharded_param for p in params))
        for p, tensor in zip(params, connected, strict=True):
            p.to_unsharded(tensor)

    def post_forward(self, cell: nn.Cell, args: Any, output: Any) -> Any:
        """Runs after a forward that raised too, with an output of ``None``: its parameters go back to shards."""
        use = self._uses.pop()
        if self._state.context is None:
            return output
        if self._policy.output_dtype is not None:
            output = map_tensors(output, _cast_to(self._policy.output_dtype))
        if is_recording():
            map_tensors(output, partial(self._watch_output, use))
        if not self._state.in_backward:
            self._to_run.discard(cell)
            if not self._to_run:
                self._state.post_forward()
        return output

    def _watch_output(self, use: Use, tensor: Tensor) -> Tensor:
        if tensor._requires_grad:
            tensor.register_hook(partial(self._pre_backward, use))
        return tensor

    def _pre_backward(self, use: Use, grad: Tensor) -> Tensor:
        self._state.pre_backward(use)
        return grad


def attach_hooks(
    cells: Sequence[nn.Cell], state: HSDPState, mp_policy: Any, prepare: Callable[[nn.Cell], None]
) -> None:
    """Register a unit's forward hooks.

    Args:
        cells: the unit's cells; parameters are unsharded before the first one runs and resharded after the last.
        state: the unit.
        mp_policy: its input and output dtypes.
        prepare: called with the cell before each of the unit's forwards, for lazy initialisation.
    """
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


def _cast_to(dtype: Any) -> Callable[[Tensor], Tensor]:
    floats = ms.common.dtype.float_type
    return lambda tensor: tensor.astype(dtype) if tensor.dtype in floats and tensor.dtype != dtype else tensor
