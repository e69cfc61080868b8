"""Ties the neutral `HSDPState` to modules and to torch's autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raggedshard.fully_shard.state import HSDPState, Use

__all__ = ["TorchEngine", "attach_hooks"]


class TorchEngine:
    """The `Engine` of torch."""

    def is_grad_enabled(self) -> bool:
        return torch.is_grad_enabled()

    def in_backward(self) -> bool:
        # Private: the only way to know from a hook that a backward is running (checkpoint recomputes in it).
        return torch._C._current_graph_task_id() != -1

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        # Semi-private, what torch's own DDP and FSDP use: runs when the backward under way is over.
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs whose backward runs when the gradients of all of them are there."""

    @staticmethod
    def forward(ctx: Any, state: HSDPState, use: Use, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state, ctx.use = state, use
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.state.post_backward(ctx.use)
        return (None, None, *grads)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``fn`` to the tensors of nested containers; dataclasses that pytree does not know are looked into too."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {f.name: map_tensors(getattr(leaf, f.name), fn) for f in dataclasses.fields(leaf) if f.init}
            changed = any(fields[name] is not getattr(leaf, name) for name in fields)
            return dataclasses.replace(leaf, **fields) if changed else leaf
        return leaf

    leaves, spec = pytree.tree_flatten(value)
    visited = [visit(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(visited, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(visited, spec)


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


class _ModuleHooks:
    """The forward hooks of a unit, which spans one module or several."""

    def __init__(
        self, modules: Sequence[nn.Module], state: HSDPState, mp_policy: Any, prepare: Callable[[], None]
    ) -> None:
        self._modules = tuple(modules)
        self._state = state
        self._policy = mp_policy
        self._prepare = prepare
        self._to_run: set[nn.Module] = set()
        self._uses: list[Use] = []

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._uses.append(Use())
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            args, kwargs = map_tensors((args, kwargs), _cast_to(self._policy.param_dtype))
        self._prepare()
        self._state.pre_forward()
        # A recomputation in backward may stop early, without a post-forward: only forwards are followed to their end.
        if not self._state.in_backward and module not in self._to_run:
            self._to_run = set(self._modules)
        if self._state.wants_post_backward():
            args, kwargs = self._mark_inputs(args, kwargs)
        return args, kwargs

    def _mark_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        inputs: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                inputs.append(tensor)
            return tensor

        map_tensors((args, kwargs), collect)
        if not inputs:
            return args, kwargs
        marked = iter(_PostBackward.apply(self._state, self._uses[-1], *inputs))  # type: ignore[arg-type]
        self._state.note_post_backward(self._uses[-1])
        return map_tensors((args, kwargs), lambda tensor: next(marked) if tensor.requires_grad else tensor)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs after a forward that raised too, with an output of ``None``: its parameters go back to shards."""
        use = self._uses.pop()
        if self._state.context is None:
            return output
        if self._policy.output_dtype is not None:
            output = map_tensors(output, _cast_to(self._policy.output_dtype))
        if torch.is_grad_enabled():
            map_tensors(output, partial(self._watch_output, use))
        if not self._state.in_backward:
            self._to_run.discard(module)
            if not self._to_run and not self._uses:  # a module may call itself
                self._state.post_forward()
        return output

    def _watch_output(self, use: Use, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(partial(self._pre_backward, use))
        return tensor

    def _pre_backward(self, use: Use, grad: torch.Tensor) -> torch.Tensor:
        self._state.pre_backward(use)
        return grad


def attach_hooks(modules: Sequence[nn.Module], state: HSDPState, mp_policy: Any, prepare: Callable[[], None]) -> None:
    """Register a unit's forward hooks.

    Args:
        modules: the unit's modules; parameters are unsharded before the first one runs and resharded after the last.
        state: the unit.
        mp_policy: its input and output dtypes.
        prepare: called before each of the unit's forwards, for lazy initialisation.
    """
    hooks = _ModuleHooks(modules, state, mp_policy, prepare)
    for module in modules:
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)
