"""The forward hooks of a unit, which spans one module or several: their order, in both frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raggedshard.fully_shard.state import HSDPState, Use

__all__ = ["ForwardHooks"]


class ForwardHooks(ABC):
    """What a backend registers before and after the forward of each of a unit's modules.

    Args:
        modules: parameters are unsharded before the first one runs and resharded after the last.
        state: the unit.
        mp_policy: its input and output dtypes.
        prepare: called with the module before each forward, for lazy initialisation.
    """

    def __init__(
        self, modules: Sequence[Any], state: HSDPState, mp_policy: Any, prepare: Callable[[Any], None]
    ) -> None:
        self._modules = tuple(modules)
        self.state = state
        self._policy = mp_policy
        self._prepare = prepare
        self._to_run: set[Any] = set()
        self._uses: list[Use] = []

    @abstractmethod
    def map_tensors(self, value: Any, fn: Callable[[Any], Any]) -> Any:
        """Apply ``fn`` to the tensors in nested containers."""

    @abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """``tensor`` in ``dtype`` if it holds floating-point numbers."""

    @abstractmethod
    def attach(self, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Put into the graph what will tell that the backward of this use is over; the inputs to go on with."""

    @abstractmethod
    def watch(self, tensor: Any, hook: Callable[[Any], Any]) -> None:
        """Call ``hook`` with the gradient of ``tensor``, if it gets one."""

    def pre_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        use = Use()
        self._uses.append(use)
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            args, kwargs = self._cast_all((args, kwargs), self._policy.param_dtype)
        self._prepare(module)
        self._begin(module)
        return self.attach(use, args, kwargs)

    def _begin(self, module: Any) -> None:
        """A module that is not awaited starts another forward of the unit.

        A recomputation in backward may stop early, without a post-forward: only forwards are followed to their end.
        """
        if self.state.in_backward:
            self.state.pre_forward()
        elif module not in self._to_run:
            self.state.pre_forward()
            self._to_run = set(self._modules)
        else:
            self.state.resume_forward()

    def post_forward(self, module: Any, args: Any, output: Any) -> Any:
        """Runs after a forward that raised too, with an output of ``None``: its parameters go back to shards."""
        use = self._uses.pop()
        if self.state.context is None:
            return output
        if self._policy.output_dtype is not None:
            output = self._cast_all(output, self._policy.output_dtype)
        if self.state.is_grad_enabled:
            self.map_tensors(output, partial(self._watch_output, use))
        if not self.state.in_backward:
            self._to_run.discard(module)
            if not self._to_run and not self._uses:  # a module may call itself
                self.state.post_forward()
        return output

    def _cast_all(self, value: Any, dtype: Any) -> Any:
        return self.map_tensors(value, lambda tensor: self.cast(tensor, dtype))

    def _watch_output(self, use: Use, tensor: Any) -> Any:
        self.watch(tensor, partial(self._pre_backward, use))
        return tensor

    def _pre_backward(self, use: Use, grad: Any) -> Any:
        self.state.pre_backward(use)
        return grad
