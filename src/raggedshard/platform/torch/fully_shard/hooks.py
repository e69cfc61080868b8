"""Ties the neutral `HSDPState` to modules and to torch's autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raggedshard.fully_shard.hooks import ForwardHooks
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


class _ModuleHooks(ForwardHooks):
    """`ForwardHooks` of torch modules."""

    def map_tensors(self, value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return map_tensors(value, fn)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def attach(self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not self.state.wants_post_backward():
            return args, kwargs
        inputs: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                inputs.append(tensor)
            return tensor

        map_tensors((args, kwargs), collect)
        if not inputs:
            return args, kwargs
        marked = iter(_PostBackward.apply(self.state, use, *inputs))  # type: ignore[arg-type]
        self.state.note_post_backward(use)
        return map_tensors((args, kwargs), lambda tensor: next(marked) if tensor.requires_grad else tensor)

    def watch(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if tensor.requires_grad:
            tensor.register_hook(hook)


def attach_hooks(
    modules: Sequence[nn.Module], state: HSDPState, mp_policy: Any, prepare: Callable[[nn.Module], None]
) -> None:
    """Register a unit's forward hooks; arguments as `ForwardHooks`."""
    hooks = _ModuleHooks(modules, state, mp_policy, prepare)
    for module in modules:
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)
