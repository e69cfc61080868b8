"""Training as in torch: ``loss.backward()``, ``p.grad``, ``zero_grad()``. A patch of MindSpore that can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.experimental.optim.optimizer import Optimizer as ExperimentalOptimizer

from raggedshard.platform.mindspore.dtensor import DTensor
from raggedshard.platform.mindspore.private import executor, grad_of, run_backward, set_grad

__all__ = ["BackwardCompact", "enable_mindspore_backward_compact"]


class BackwardCompact:
    """What `enable_mindspore_backward_compact` returns: ``disable()`` undoes it, leaving a ``with`` block too."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._was_recording = executor.grad_flag()

    def disable(self) -> None:
        """Restore MindSpore as it was. Does nothing the second time."""
        global _enabled
        for undo in reversed(self._undo):
            undo()
        if self._undo:
            executor.set_grad_flag(self._was_recording)
        self._undo.clear()
        if _enabled is self:
            _enabled = None

    def __enter__(self) -> BackwardCompact:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        before = own.get(name)
        had = name in own
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))


_enabled: BackwardCompact | None = None


def enable_mindspore_backward_compact() -> BackwardCompact:
    """Give MindSpore torch's way to train, in PyNative mode.

    - ``loss.backward(gradient=None, retain_graph=False, create_graph=False)`` adds gradients up in the leaves.
    - ``p.grad`` reads, sets and (with ``None``) clears them. Of a sharded parameter it is a DTensor with the
      parameter's placements.
    - ``cell.zero_grad()`` and ``optimizer.zero_grad()`` clear them; ``optimizer.step()`` is
      ``optimizer(tuple(p.grad for p in optimizer.parameters))``, where a parameter without a gradient gets zeros.
    - ``tensor.detach()``.
    - Operations are recorded as in torch: always, except under ``mindspore.ops.stop_gradient`` or ``_no_grad``.

    Calling it again returns the same object. ``value_and_grad`` goes on working.

    Returns:
        An object whose ``disable()`` restores MindSpore; usable in a ``with`` statement.
    """
    global _enabled
    if _enabled is not None:
        return _enabled
    compact = BackwardCompact()
    compact._replace(Tensor, "backward", _backward)
    compact._replace(Tensor, "grad", property(grad_of, _set_grad))
    compact._replace(Tensor, "detach", lambda tensor: ops.stop_gradient(tensor))
    compact._replace(nn.Cell, "zero_grad", lambda cell: _clear(cell.trainable_params()))
    for optimizer in (nn.Optimizer, ExperimentalOptimizer):
        compact._replace(optimizer, "zero_grad", lambda opt: _clear(opt.parameters))
        compact._replace(optimizer, "step", _step)
    # value_and_grad ends by switching recording off.
    compact._replace(executor, "set_grad_flag", lambda flag: type(executor).set_grad_flag(executor, True))
    compact._replace(executor, "grad", _recording_afterwards(executor.grad))
    executor.set_grad_flag(True)
    _enabled = compact
    return compact


def _backward(
    tensor: Tensor, gradient: Tensor | None = None, retain_graph: bool = False, create_graph: bool = False
) -> None:
    """Add the gradients of ``tensor`` up in the leaves that it was computed from.

    Args:
        gradient: of ``tensor``'s shape; may be left out when it has one element.
    """
    if gradient is None and tensor.size != 1:
        raise RuntimeError(f"backward of a tensor of shape {tuple(tensor.shape)} needs a gradient of that shape")
    run_backward(tensor, gradient, retain_graph, create_graph)


def _set_grad(tensor: Tensor, grad: Any) -> None:
    if grad is not None and tuple(grad.shape) != tuple(tensor.shape):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot have a gradient of shape {tuple(grad.shape)}")
    if isinstance(tensor, DTensor) and grad is not None and getattr(grad, "_spec", None) != tensor._spec:
        raise ValueError(f"the gradient of {tensor!r} is a DTensor that lies as it does; this one is {grad!r}")
    set_grad(tensor, grad)


def _clear(params: Any) -> None:
    for p in params:
        set_grad(p, None)


def _step(optimizer: Any) -> Any:
    return optimizer(tuple(_grads_or_zeros(optimizer.parameters)))


def _grads_or_zeros(params: Any) -> Iterator[Tensor]:
    for p in params:
        grad = grad_of(p)
        yield p * 0 if grad is None else grad


def _recording_afterwards(call: Callable[..., Any]) -> Callable[..., Any]:
    def grad(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            executor.set_grad_flag(True)

    return grad
