"""The styles of tensor and sequence parallelism, with torch's names and meaning: how a cell computes with its parts.

A style cuts a cell's parameters over a 1-D mesh, by the chunk rule whatever their sizes, and lets the cell compute with
this rank's parts. It reads them anew in each forward: a unit of ``fully_shard`` has just gathered them then.

                        input becomes    computes, on rank r     output, turned into output_layouts
    ColwiseParallel     Replicate()      y_r = x W_r^T + b_r     Shard(-1)
    RowwiseParallel     Shard(-1)        y = sum x_r W_r^T + b   a sum over the ranks
    SequenceParallel    Shard(1)         y_r = cell(x_r)         Shard(1)

W_r are rows of a Dense's weight, columns for RowwiseParallel; of an Embedding's table it is columns, rows for
RowwiseParallel, which takes Replicate() ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from mindspore import Tensor, mint, nn, ops

from raggedshard.placements import Partial, Replicate, Shard
from raggedshard.platform.mindspore.activation import Activation, chunk_layout, read
from raggedshard.platform.mindspore.device_mesh import DeviceMesh

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "Placed",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
]


class Placed(NamedTuple):
    """A parameter of a cell and the placement that a style gives it."""

    cell: nn.Cell
    param: str
    placement: Any


class ParallelStyle(ABC):
    """How `parallelize_module` treats a cell."""

    @abstractmethod
    def plan(self, name: str, cell: nn.Cell) -> list[Placed]:
        """Which parameters lie how. Changes nothing.

        Raises:
            ValueError: the style cannot be applied to the cell.
        """

    @abstractmethod
    def attach(self, name: str, cell: nn.Cell, mesh: DeviceMesh) -> None:
        """Let the cell compute with its local parameters."""


class _OfWeights(ParallelStyle):
    """`ColwiseParallel` and `RowwiseParallel`: of a Dense or an Embedding, which have one input and one output.

    Attributes:
        cuts: the placement of each parameter, by the kind of cell.
    """

    cuts: ClassVar[Mapping[type[nn.Cell], Mapping[str, Any]]]

    def __init__(self, input_layouts: Any, output_layouts: Any, use_local_output: bool) -> None:
        self.input_layouts = _checked_layout(type(self).__name__, "input_layouts", input_layouts)
        self.output_layouts = _checked_layout(type(self).__name__, "output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def plan(self, name: str, cell: nn.Cell) -> list[Placed]:
        where = f"{type(self).__name__} of cell '{name}'"
        kind = next((kind for kind in self.cuts if type(cell).construct is kind.construct), None)
        if kind is None:
            raise ValueError(
                f"{where}: it is a {type(cell).__name__}, and only nn.Dense and nn.Embedding, with the construct "
                "that they have, can be cut; give the style to those inside it, each once"
            )
        if getattr(cell, "activation_flag", False):
            raise ValueError(
                f"{where}: an activation inside nn.Dense would run before the parts are joined; make the Dense "
                "without it and apply it afterwards"
            )
        return [
            Placed(cell, param, cut) for param, cut in self.cuts[kind].items() if cell._params.get(param) is not None
        ]

    def attach(self, name: str, cell: nn.Cell, mesh: DeviceMesh) -> None:
        where = f"{type(self).__name__} of cell '{name}'"
        compute = self._dense if isinstance(cell, nn.Dense) else self._embedding

        def construct(cell: Any, original: Any, x: Any) -> Tensor:
            output = compute(where, cell, read(where, x, mesh, self.input_layouts), mesh)
            return output.given(where, mesh, self.output_layouts, self.use_local_output)

        _override_construct(cell, type(self).__name__, construct)

    @abstractmethod
    def _dense(self, where: str, cell: Any, x: Activation, mesh: DeviceMesh) -> Activation: ...

    @abstractmethod
    def _embedding(self, where: str, cell: Any, ids: Activation, mesh: DeviceMesh) -> Activation: ...


class ColwiseParallel(_OfWeights):
    """Cut the outputs of an ``nn.Dense`` or ``nn.Embedding`` over the ranks: rows of the one's weight, columns of the
    other's table.

    Args:
        input_layouts: how a plain input lies, ``Replicate()`` (the default) or ``Shard(dim)``, which is gathered. A
            DTensor says it itself.
        output_layouts: how the output shall lie; ``Shard(-1)`` by default, which costs no communication.
        use_local_output: return this rank's part as a plain tensor; otherwise a DTensor, which element-wise
            operations can use.

    Raises:
        ValueError: a layout is neither ``Replicate()`` nor a ``Shard``.
    """

    cuts: ClassVar = {nn.Dense: {"weight": Shard(0), "bias": Shard(0)}, nn.Embedding: {"embedding_table": Shard(1)}}

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)

    def _dense(self, where: str, cell: Any, x: Activation, mesh: DeviceMesh) -> Activation:
        _check_width(where, cell, x)
        # Each rank's part of the output gives a term of the input's gradient.
        whole = x.moved(mesh, Replicate(), Partial()).local
        weight = cell.weight.to_local()
        y = _product(cell, whole, weight)
        if cell.has_bias:
            y = y + cell.bias.to_local()
        return Activation(y, (*x.shape[:-1], cell.weight.shape[0]), Shard(len(x.shape) - 1))

    def _embedding(self, where: str, cell: Any, ids: Activation, mesh: DeviceMesh) -> Activation:
        table = cell.embedding_table.to_local()
        found = ops.gather(_not_empty(table, 1), ids.moved(mesh, Replicate()).local, 0)
        y = _without_filling(found, table.shape[1])
        return Activation(y, (*ids.shape, cell.embedding_table.shape[1]), Shard(len(ids.shape)))


class RowwiseParallel(_OfWeights):
    """Cut the inputs of an ``nn.Dense`` or ``nn.Embedding`` over the ranks: columns of the one's weight, rows (words)
    of the other's table. The ranks' terms are summed; a bias is added once.

    Args:
        input_layouts: how a plain input lies; ``Shard(-1)`` (the default) is what `ColwiseParallel` gives. The ids
            of an Embedding mostly are ``Replicate()``.
        output_layouts: how the output shall lie; ``Replicate()`` (the default) sums by an all-reduce, ``Shard(dim)``
            by a reduce-scatter.
        use_local_output: as in `ColwiseParallel`.

    Raises:
        ValueError: a layout is neither ``Replicate()`` nor a ``Shard``.
    """

    cuts: ClassVar = {nn.Dense: {"weight": Shard(1), "bias": Replicate()}, nn.Embedding: {"embedding_table": Shard(0)}}

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)

    def _dense(self, where: str, cell: Any, x: Activation, mesh: DeviceMesh) -> Activation:
        _check_width(where, cell, x)
        last = len(x.shape) - 1
        part = x.moved(mesh, Shard(last)).local
        term = _product(cell, _not_empty(part, last), _not_empty(cell.weight.to_local(), 1))
        shape = (*x.shape[:-1], cell.weight.shape[0])
        target = chunk_layout(where, self.output_layouts, shape, mesh)
        y = Activation(term, shape, Partial()).moved(mesh, target)
        return y._replace(local=y.local + self._bias(cell, mesh, target, last)) if cell.has_bias else y

    def _bias(self, cell: Any, mesh: DeviceMesh, target: Any, last: int) -> Tensor:
        """What this rank adds: all of the bias, or the part that belongs to its part of the output's last dim."""
        bias = Activation(cell.bias.to_local(), tuple(cell.bias.shape), Replicate())
        if target == Shard(last):
            return bias.moved(mesh, Shard(0)).local
        # Where ranks hold different tokens, each gives a term of the gradient.
        return bias.moved(mesh, Replicate(), Partial() if target.is_shard() else Replicate()).local

    def _embedding(self, where: str, cell: Any, ids: Activation, mesh: DeviceMesh) -> Activation:
        table = cell.embedding_table.to_local()
        words, width = cell.embedding_table.shape
        start = -(-words // mesh.size()) * mesh.get_local_rank()
        wanted = ids.moved(mesh, Replicate()).local
        own = (wanted >= start).logical_and(wanted < start + table.shape[0])
        others = (wanted >= 0).logical_and(wanted < words).logical_not()  # no word at all: gather refuses it
        rows = ops.where(own, wanted - start, ops.where(others, wanted, ops.zeros_like(wanted)))
        found = ops.gather(_not_empty(table, 0), rows, 0)
        term = ops.where(own.expand_dims(-1), found, ops.zeros_like(found))
        return Activation(term, (*ids.shape, width), Partial())


class SequenceParallel(ParallelStyle):
    """Let a cell such as ``nn.LayerNorm`` or ``nn.Dropout`` compute on each rank's part of the sequence.

    Its parameters are replicated, and their gradients summed over the ranks. The cell has one input to cut and one
    output, cut along the same dim.

    Args:
        sequence_dim: along which a plain input is cut already, and a DTensor is cut if it is not.
        use_local_output: return this rank's part as a plain tensor; by default a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def plan(self, name: str, cell: nn.Cell) -> list[Placed]:
        return [
            Placed(inner, param, Replicate())
            for _, inner in cell.cells_and_names()
            for param, value in inner._params.items()
            if value is not None
        ]

    def attach(self, name: str, cell: nn.Cell, mesh: DeviceMesh) -> None:
        where = f"SequenceParallel of cell '{name}'"
        for _, inner in cell.cells_and_names():
            if any(value is not None for value in inner._params.values()):
                _override_construct(inner, "Replicated", _with_local_parameters)

        def construct(cell: Any, original: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
            given = read(where, x, mesh, Shard(self.sequence_dim))
            layout = chunk_layout(where, Shard(self.sequence_dim), given.shape, mesh)
            _check_norm(where, cell, layout.dim, len(given.shape))
            part = given.moved(mesh, layout)
            output = original(part.local, *args, **kwargs)
            shape = _shape_like(where, output, part)
            return Activation(output, shape, layout).given(where, mesh, layout, self.use_local_output)

        _override_construct(cell, "SequenceParallel", construct)


class PrepareModuleInput(ParallelStyle):
    """Change the layouts of a cell's inputs.

    Args:
        input_layouts: how the positional inputs lie, one layout or one per input; ``None`` for an input to leave alone.
            A DTensor says itself how it lies.
        desired_input_layouts: how the cell shall get them; as many.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for inputs given by name.
        use_local_output: give the cell this rank's part as a plain tensor; by default a DTensor.

    Raises:
        ValueError: there are not as many desired layouts as layouts, or one is neither ``Replicate()`` nor a ``Shard``.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        desired_input_layouts: Any = None,
        input_kwarg_layouts: Mapping[str, Any] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        before, after = _as_tuple(input_layouts), _as_tuple(desired_input_layouts)
        named, named_after = dict(input_kwarg_layouts or {}), dict(desired_input_kwarg_layouts or {})
        if len(before) != len(after) or named.keys() != named_after.keys():
            raise ValueError(
                f"PrepareModuleInput: give as many desired layouts as layouts; got {before} and {after}, {named} and "
                f"{named_after}"
            )
        for layout in (*before, *after, *named.values(), *named_after.values()):
            if layout is not None:
                _checked_layout("PrepareModuleInput", "a layout", layout)
        self.layouts: Sequence[tuple[Any, Any]] = tuple(zip(before, after, strict=True))
        self.kwarg_layouts = {key: (layout, named_after[key]) for key, layout in named.items()}
        self.use_local_output = use_local_output

    def plan(self, name: str, cell: nn.Cell) -> list[Placed]:
        return []

    def attach(self, name: str, cell: nn.Cell, mesh: DeviceMesh) -> None:
        where = f"PrepareModuleInput of cell '{name}'"

        def prepare(cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if self.layouts and len(args) != len(self.layouts):
                raise ValueError(
                    f"{where}: it got {len(args)} positional inputs, but has {len(self.layouts)} input_layouts; give "
                    "one per input, None for those to leave alone"
                )
            if self.layouts:
                args = tuple(self._one(where, x, mesh, *pair) for x, pair in zip(args, self.layouts, strict=True))
            changed = {
                key: self._one(where, kwargs[key], mesh, *pair)
                for key, pair in self.kwarg_layouts.items()
                if key in kwargs
            }
            return args, {**kwargs, **changed}

        cell.register_forward_pre_hook(prepare, with_kwargs=True)

    def _one(self, where: str, value: Any, mesh: DeviceMesh, layout: Any, desired: Any) -> Any:
        if layout is None:
            return value
        x = read(where, value, mesh, layout)
        return x.given(where, mesh, layout if desired is None else desired, self.use_local_output)


def _override_construct(cell: nn.Cell, prefix: str, construct: Callable[..., Any]) -> None:
    """Let ``construct(cell, original, *args, **kwargs)`` run for this cell; ``original`` is its construct so far."""
    cls = type(cell)

    def overriding(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        return construct(self, cls.construct.__get__(self), *args, **kwargs)

    cell.__class__ = type(f"{prefix}{cls.__name__}", (cls,), {"construct": overriding, "__module__": cls.__module__})


def _with_local_parameters(cell: nn.Cell, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a construct that knows nothing of DTensors, on part of the tokens: gradients are terms of a sum."""
    attributes = cell.__dict__
    # What a unit of fully_shard put there for this forward stands there again afterwards.
    before = {name: attributes[name] for name in cell._params if name in attributes}
    try:
        for name, param in cell._params.items():
            value: Any = getattr(cell, name)
            if param is not None:
                whole = Activation(value.to_local(), tuple(value.shape), Replicate())
                attributes[name] = whole.moved(value.device_mesh, Replicate(), Partial()).local
        return original(*args, **kwargs)
    finally:
        for name in cell._params:
            attributes.pop(name, None)
        attributes.update(before)


def _product(cell: Any, x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, of shape ``(*x.shape[:-1], rows)``; also of a weight without rows."""
    y = cell.matmul(x.reshape((-1, x.shape[-1])), _not_empty(weight, 0))
    return _without_filling(y.reshape((*x.shape[:-1], y.shape[-1])), weight.shape[0])


def _not_empty(tensor: Tensor, dim: int) -> Tensor:
    """With a row of zeros in the place of none: what MindSpore computes by summing over no elements is garbage."""
    if tensor.shape[dim]:
        return tensor
    zeros = mint.zeros((*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]), dtype=tensor.dtype)
    return ops.cat([tensor, zeros], axis=dim)


def _without_filling(tensor: Tensor, columns: int) -> Tensor:
    """The true columns of what was computed with `_not_empty`."""
    if tensor.shape[-1] == columns:
        return tensor
    # The gradient of a slice of no elements is an error.
    return mint.split(tensor, (columns, tensor.shape[-1] - columns), -1)[0]


def _check_width(where: str, cell: Any, x: Activation) -> None:
    if x.shape[-1] != cell.weight.shape[1]:
        raise ValueError(
            f"{where}: its weight takes {cell.weight.shape[1]} columns, but the input of {x.layout} has {x.shape[-1]} "
            "over all ranks; state in input_layouts how it lies"
        )


def _check_norm(where: str, cell: nn.Cell, dim: int, ndim: int) -> None:
    first = cell.begin_norm_axis % ndim if isinstance(cell, nn.LayerNorm) else ndim
    if dim >= first:
        raise ValueError(
            f"{where}: it normalises from dim {first} on, and sequence_dim={dim} cuts the values that it needs "
            "together; choose a dim before those"
        )


def _shape_like(where: str, output: Any, x: Activation) -> tuple[int, ...]:
    """The global shape of an output that is cut as the input is."""
    dim = x.layout.dim
    if not isinstance(output, Tensor) or output.ndim <= dim or output.shape[dim] != x.local.shape[dim]:
        raise ValueError(
            f"{where}: its output must be one tensor that is cut as the input of shape {x.shape} is, along dim {dim}; "
            "give the style to the cells inside it"
        )
    return (*output.shape[:dim], x.shape[dim], *output.shape[dim + 1 :])


def _checked_layout(style: str, argument: str, layout: Any) -> Any:
    if type(layout) not in (Replicate, Shard):
        raise ValueError(f"{style}: {argument} is {layout!r}; give Replicate() or Shard(dim)")
    return layout


def _as_tuple(layouts: Any) -> tuple[Any, ...]:
    if layouts is None:
        return ()
    return tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)
