"""The tensor class of sharded parameters: global shape outside, this rank's shard inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common.initializer import initializer

from raggedshard.placements import Replicate, check_placements, shape_of
from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.dispatch import run_on_locals
from raggedshard.platform.mindspore.private import Function, alias, copy_of, is_recording, no_grad, subclass
from raggedshard.platform.mindspore.redistribute import part_of, redistribute_local, to_host, to_tensor

__all__ = ["DTensor", "DTensorSpec", "local_of", "wrap_local"]


class DTensorSpec(NamedTuple):
    """How a tensor lies on a mesh.

    Args:
        placements: one per mesh dim.
        shape: the global shape.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]


class DTensor(Tensor):
    """A tensor of which each rank of a mesh holds a part. Made by `DTensor.from_local` or `distribute_tensor`.

    ``shape`` is the global shape; ``to_local()`` the rows that this rank holds, of which there may be none. Every
    parameter of a cell that ``fully_shard`` was applied to is one, and so is its gradient.

    - Element-wise operations run on the local tensors of operands that lie alike, and on scalars; the result lies as
      they do. Optimizers work likewise, with states that are DTensors too.
    - Any other operation raises a ``RuntimeError`` that says so; ``full_tensor()`` gives it the whole tensor.
    - ``asnumpy()`` raises: use ``to_local().asnumpy()`` or ``full_tensor().asnumpy()``.
    """

    _spec: DTensorSpec | None = None
    is_unit_shard = False  # of a unit of fully_shard
    _draw: Callable[[], np.ndarray] | None = None

    def __new__(cls, local: Tensor, spec: DTensorSpec | None = None) -> Any:
        # Parameter(dtensor) calls this with the DTensor alone.
        tensor = subclass(cls, local)
        tensor._spec = spec if spec is not None else getattr(local, "_spec", None)
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Tensor's would make the tensor anew
        pass

    # ---- what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """One per mesh dim."""
        return self._layout.placements

    @property
    def _layout(self) -> DTensorSpec:
        assert self._spec is not None, "a DTensor without a layout"
        return self._spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._layout.shape if self._spec is not None else self._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the global tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    def numel(self) -> int:
        return self.size

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if isinstance(self, Parameter) else ""
        return f"DTensor({name}shape={self.shape}, dtype={self.dtype}, placements={self.placements})"

    __str__ = __repr__

    def asnumpy(self) -> np.ndarray:
        raise TypeError(
            f"{self!r} is spread over ranks; use to_local().asnumpy() for this rank's part or "
            "full_tensor().asnumpy(), on all ranks, for the whole"
        )

    numpy = asnumpy

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"{self!r} is spread over ranks and cannot be indexed; index to_local() or full_tensor()")

    def __iter__(self) -> Any:
        return self[0]

    # ---- layout changes

    @staticmethod
    def from_local(
        local: Tensor, device_mesh: DeviceMesh, placements: Sequence[Any], *, shape: Sequence[int] | None = None
    ) -> DTensor:
        """A DTensor of which ``local`` is this rank's part, on the same storage unless it is a view. No communication.

        Args:
            shape: the global shape; may be left out when no placement cuts the tensor.

        Raises:
            ValueError: the placements do not fit the shape, or give this rank another shape than ``local`` has.
        """
        if shape is None:
            shape = tuple(local.shape)
            if any(not (p.is_replicate() or p.is_partial()) for p in placements):
                raise ValueError("DTensor.from_local: placements that cut a tensor need its global shape")
        check_placements(shape, device_mesh.shape, placements)
        coordinate = device_mesh.get_coordinate()
        assert coordinate is not None, f"this rank is no part of {device_mesh}"
        expected = shape_of(shape, device_mesh.shape, placements, coordinate)
        if tuple(local.shape) != expected:
            raise ValueError(
                f"DTensor.from_local: the local tensor has shape {tuple(local.shape)}, but placements "
                f"{tuple(placements)} of {tuple(shape)} give {expected} at mesh coordinate {coordinate}"
            )
        spec = DTensorSpec(device_mesh, tuple(placements), tuple(shape))
        if is_recording() and local._requires_grad:
            return _FromLocal.apply(local, spec)
        return _wrap_any(local, spec)

    def to_local(self) -> Tensor:
        """This rank's part, on the same storage. Differentiable."""
        self._require_values()
        if is_recording() and self._requires_grad:
            return _ToLocal.apply(self)
        return local_of(self)

    def full_tensor(self) -> Tensor:
        """The global tensor on every rank. Differentiable; collective."""
        return self.redistribute([Replicate()] * self.device_mesh.ndim).to_local()

    def redistribute(self, placements: Sequence[Any]) -> DTensor:
        """This tensor with other placements on the same mesh. Differentiable; collective.

        Raises:
            ValueError: they do not fit.
        """
        self._require_values()
        check_placements(self.shape, self.device_mesh.shape, placements)
        spec = self._layout._replace(placements=tuple(placements))
        if is_recording() and self._requires_grad:
            return _Redistribute.apply(self, spec)
        return _redistributed(self, spec)

    # ---- values in and out

    @property
    def data(self) -> DTensor:
        return self

    @no_grad()
    def set_data(self, data: Any, slice_shape: bool = False) -> DTensor:
        """Overwrite the values, in the same memory.

        Args:
            data: a tensor of the global shape, whose part is taken; or a DTensor, redistributed if it lies otherwise.

        Raises:
            ValueError: it has another shape.
        """
        if tuple(data.shape) != tuple(self.shape):
            raise ValueError(f"{self!r} cannot take values of shape {tuple(data.shape)}")
        if isinstance(data, DTensor):
            values = redistribute_local(local_of(data), data.shape, data.device_mesh, data.placements, self.placements)
        else:
            if data.has_init:
                data = data.init_data()
            values = to_tensor(part_of(to_host(data), self.device_mesh, self.placements), data.dtype)
        self._write(values)
        return self

    def _write(self, local: Tensor) -> None:
        self._draw = None
        if local.size:
            local_of(self).copy_(local.astype(self.dtype))

    copy_ = set_data
    assign_value = set_data  # type: ignore[assignment]  # another name for the value

    def __setitem__(self, index: Any, value: Any) -> None:
        if index != slice(None) or not isinstance(value, Tensor):
            raise TypeError(f"{self!r} takes whole values only: p[:] = tensor or p.set_data(tensor)")
        self.set_data(value)

    def zero_(self) -> DTensor:
        return self.set_data(self * 0)

    def fill_(self, value: float) -> DTensor:
        """Overwrite every element."""
        return self.set_data(self * 0 + value)

    def defer(self, draw: Callable[[], np.ndarray]) -> None:
        """Leave the values open until `init_data`; ``draw`` gives this rank's part of them."""
        self._draw = draw

    @no_grad()
    def init_data(self, *args: Any, **kwargs: Any) -> DTensor:
        """Draw values whose initialisation was deferred; those that are there already stay."""
        if self._draw is not None:
            self._write(to_tensor(np.ascontiguousarray(self._draw()), self.dtype))
        return self

    @property
    def is_deferred(self) -> bool:
        """Whether it has no values yet."""
        return self._draw is not None

    def _require_values(self) -> None:
        if self.is_deferred:
            raise RuntimeError(
                f"the initialisation of {self!r} is deferred and it has no values yet: run a forward, load values, or "
                "call init_parameters_data() of the outermost cell"
            )

    def clone(self, init: Any = "same") -> DTensor:
        """Another that lies as this one does, a Parameter if this is one: optimizers make their states so.

        Args:
            init: ``"same"`` for this one's values, or what ``mindspore.common.initializer`` takes.
        """
        if init == "same":
            self._require_values()
        local = local_of(self)
        if init == "same" or local.size == 0:  # the initializer refuses empty shapes
            values = copy_of(local)
        else:
            values = initializer(init, tuple(local.shape), self.dtype).init_data()
        return _like(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        self._require_values()
        if id(self) not in memo:
            memo[id(self)] = _like(self, copy_of(local_of(self)))
        return memo[id(self)]

    def __copy__(self) -> DTensor:
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._require_values()
        as_parameter = (self.name, self.requires_grad) if isinstance(self, Parameter) else None
        return _rebuild, (to_host(local_of(self)), self.dtype, self._layout, as_parameter)

    # ---- operations

    @classmethod
    def __ms_dispatch__(cls, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_locals(func, args, kwargs or {}, DTensor, wrap_local)


def _refused(name: str) -> Any:
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} on {self!r}: in-place arithmetic leaves a tensor unchanged on a CPU. Use p.set_data(p + x), and "
            "for the optimizers of mindspore.mint.optim, which are made of it, mindspore.experimental.optim or nn"
        )

    return method


for _name in ("add_", "sub_", "mul_", "div_", "exp_", "__iadd__", "__isub__", "__imul__", "__itruediv__"):
    setattr(DTensor, _name, _refused(_name))


def wrap_local(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around this rank's part, on its storage; without communication, autograd or checks.

    Args:
        local: no view, or operators would give plain tensors.
    """
    return DTensor(local, spec)


@no_grad()
def _wrap_any(local: Tensor, spec: DTensorSpec) -> DTensor:
    """`wrap_local`, of a copy if ``local`` is a view."""
    wrapped = wrap_local(local, spec)
    is_view = not isinstance(wrapped * 1, DTensor)  # nothing else tells
    return wrap_local(copy_of(local), spec) if is_view else wrapped


def local_of(tensor: DTensor) -> Tensor:
    """This rank's part as a plain tensor on the same storage, without autograd."""
    return alias(tensor)


def _like(tensor: DTensor, local: Tensor) -> DTensor:
    result = wrap_local(local, tensor._layout)
    if isinstance(tensor, Parameter):
        return Parameter(result, name=tensor.name, requires_grad=tensor.requires_grad)
    return result


def _rebuild(array: np.ndarray, dtype: Any, spec: DTensorSpec, as_parameter: tuple[str, bool] | None) -> DTensor:
    result = wrap_local(to_tensor(array, dtype), spec)
    if as_parameter is None:
        return result
    name, requires_grad = as_parameter
    return Parameter(result, name=name, requires_grad=requires_grad)


def _redistributed(tensor: DTensor, spec: DTensorSpec) -> DTensor:
    local = redistribute_local(local_of(tensor), tensor.shape, spec.mesh, tensor.placements, spec.placements)
    return wrap_local(local, spec)


def _without_partials(spec: DTensorSpec) -> DTensorSpec:
    """How a gradient lies: that of a sum over ranks is the same on all of them."""
    return spec._replace(placements=tuple(Replicate() if p.is_partial() else p for p in spec.placements))


class _FromLocal(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = _without_partials(spec)
        return _wrap_any(alias(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return local_of(_redistributed(grad, ctx.spec)) if isinstance(grad, DTensor) else grad, None


class _ToLocal(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec = _without_partials(tensor._layout)
        return local_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return _wrap_any(grad, ctx.spec)


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: DTensorSpec) -> DTensor:
        ctx.source, ctx.target = _without_partials(tensor._layout), _without_partials(spec)
        return _redistributed(tensor, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if not isinstance(grad, DTensor):
            grad = _wrap_any(grad, ctx.target)
        return _redistributed(grad, ctx.source), None
