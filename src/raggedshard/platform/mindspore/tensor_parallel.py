"""Tensor parallelism on cells: torch's `parallelize_module`.

It comes before ``fully_shard``, whose units then shard each rank's parts:

    rows of (7, 8)     0 1 | 2 3 || 4 5 | 6       blocks of 4 and 3 rows (TP), each cut in two (FSDP)
    (fsdp, tp)         0,0   1,0    0,1   1,1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mindspore import Parameter, nn

from raggedshard.platform.mindspore.device_mesh import DeviceMesh
from raggedshard.platform.mindspore.distribute import distribute_tensor
from raggedshard.platform.mindspore.dtensor import DTensor
from raggedshard.platform.mindspore.parallel_styles import ParallelStyle, Placed

__all__ = ["parallelize_module"]


def parallelize_module(
    module: nn.Cell,
    device_mesh: DeviceMesh,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle],
) -> nn.Cell:
    """Apply tensor parallelism to a cell, in place and without communication; before ``fully_shard``.

    Every rank holds the same values. A parameter that several of the cell's cells share stays shared.

    Args:
        device_mesh: 1-D; a slice such as ``mesh["tp"]``.
        parallelize_plan: a style for the cell, or styles by the names of cells in it. Each part of a name may hold
            ``*`` and ``?``, as in ``"blocks.*.up"``; ``""`` is the cell itself.

    Returns:
        The same cell. The parameters that styles cut are DTensors on ``device_mesh`` now.

    Raises:
        ValueError: the mesh is not 1-D; a name fits no cell; a style does not fit its cell; a parameter is sharded
            already, or is shared by cells whose styles place it differently. Nothing is changed then.
    """
    if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module: the mesh must be 1-D, got {device_mesh}; pass a slice, such as mesh['tp']"
        )
    styles = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    targets = [
        (name, cell, style) for key, style in styles.items() for name, cell, style in _matches(module, key, style)
    ]
    placed = [
        (f"{name}.{place.param}" if name else place.param, place)
        for name, cell, style in targets
        for place in style.plan(name or type(module).__name__, cell)
    ]
    new = _distributed(placed, device_mesh)
    for _, inner in module.cells_and_names():
        for param, value in inner._params.items():
            if id(value) in new:
                inner._params[param] = new[id(value)]
    for name, cell, style in targets:
        style.attach(name or type(module).__name__, cell, device_mesh)
    return module


def _matches(module: nn.Cell, key: str, style: Any) -> list[tuple[str, nn.Cell, ParallelStyle]]:
    """The cells that a name of a plan fits."""
    if not isinstance(style, ParallelStyle):
        raise ValueError(
            f"parallelize_module: the plan has {style!r} for {key!r}; give a style such as ColwiseParallel()"
        )
    found = [("", module)]
    for token in key.split(".") if key else []:
        found = [
            (f"{name}.{child}" if name else child, cell)
            for name, parent in found
            for child, cell in parent._cells.items()
            if cell is not None and fnmatchcase(child, token)
        ]
    if not found:
        raise ValueError(
            f"parallelize_module: no cell is named {key!r}; there are "
            f"{[name for name, _ in module.cells_and_names() if name]}"
        )
    return [(name, cell, style) for name, cell in found]


def _distributed(placed: Sequence[tuple[str, Placed]], mesh: DeviceMesh) -> dict[int, Parameter]:
    """The DTensor in the place of each parameter, by the parameter's id."""
    chosen: dict[int, tuple[str, Parameter, Any]] = {}
    slots: set[tuple[int, str]] = set()
    for name, place in placed:
        param: Any = place.cell._params[place.param]
        if isinstance(param, DTensor):
            raise ValueError(
                f"parallelize_module: parameter '{name}' is {param!r} already; apply it once, before fully_shard"
            )
        if (id(place.cell), place.param) in slots:
            raise ValueError(f"parallelize_module: two styles of the plan are for the cell of parameter '{name}'")
        slots.add((id(place.cell), place.param))
        other, _, placement = chosen.setdefault(id(param), (name, param, place.placement))
        if placement != place.placement:
            raise ValueError(
                f"parallelize_module: parameters '{other}' and '{name}' are one, and the plan gives it {placement} and "
                f"{place.placement}; choose styles that agree, or untie them"
            )
    return {
        key: distribute_tensor(param, mesh, (placement,))  # type: ignore[misc]  # of a Parameter it is one
        for key, (_, param, placement) in chosen.items()
    }
