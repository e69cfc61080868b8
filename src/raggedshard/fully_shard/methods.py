"""The methods that a sharded module has on top of its own, in both backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raggedshard.fully_shard.state import HSDPState

__all__ = ["FSDPMethods", "UnshardHandle"]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: HSDPState) -> None:
        self._state: HSDPState | None = state

    def wait(self) -> None:
        """Finish the all-gather: the module's parameters are the unsharded ones afterwards."""
        if self._state is not None and self._state.group is not None:
            self._state.group.wait_for_unshard()
        self._state = None


class FSDPMethods:
    """Mixed into a module in front of its own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A container that makes another of its own class (a slice of a sequence) makes an unsharded one.
        original: Any = cls.__mro__[cls.__mro__.index(FSDPMethods) + 1]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def _fsdp_state(self) -> Any:
        raise NotImplementedError

    def _fsdp_states(self, recurse: bool = True) -> Iterator[Any]:
        raise NotImplementedError

    def _fsdp_begin(self) -> None:
        """Lazy initialisation, for methods that may be called before the first forward."""
        raise NotImplementedError

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units inside it).

        Returns:
            With ``async_op`` a handle whose ``wait()`` finishes the gather, else ``None``.
        """
        self._fsdp_begin()
        state = self._fsdp_state()
        state.unshard(async_op=async_op)
        return UnshardHandle(state) if async_op else None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and put the sharded ones back."""
        self._fsdp_state().reshard()

    def set_forward_prefetch_modules(self, modules: list[Any]) -> None:
        """Units to start gathering while this one's forward runs, in that order."""
        self._fsdp_state().forward_prefetch = [_require_unit(m)._fsdp_state() for m in modules]

    def set_backward_prefetch_modules(self, modules: list[Any]) -> None:
        """Units to start gathering while this one's backward runs, instead of the one that ran before it."""
        self._fsdp_state().backward_prefetch = [_require_unit(m)._fsdp_state() for m in modules]

    set_modules_to_forward_prefetch = set_forward_prefetch_modules
    set_modules_to_backward_prefetch = set_backward_prefetch_modules

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False`` keeps gradients unreduced on each rank, for accumulation without communication."""
        for state in self._fsdp_states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: ``False`` reduces over the shard dim only and keeps the rest for a later backward."""
        for state in self._fsdp_states(recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """``False`` tells that another backward of the same forward follows."""
        self._fsdp_begin()
        for state in self._fsdp_states():
            assert state.context is not None
            state.context.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `fully_shard`'s argument of that name."""
        for state in self._fsdp_states(recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """``False`` keeps parameters unsharded after backward, e.g. between the steps of an accumulation."""
        for state in self._fsdp_states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this unit by ``factor`` instead of the number of data-parallel ranks."""
        group = self._fsdp_state().group
        if group is not None:
            group.gradient_divide_factor = factor


def _require_unit(module: Any) -> FSDPMethods:
    if not isinstance(module, FSDPMethods):
        raise ValueError(f"prefetch takes modules that fully_shard was applied to, got {type(module).__name__}")
    return module
