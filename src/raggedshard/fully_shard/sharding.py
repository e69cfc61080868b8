"""Which placement a parameter gets, and the layout behind it: the rule of design.md, once for both backends.

D % W == 0 and all TP blocks equally long   Shard(0), or StridedShard(0, S) over S TP blocks
otherwise                                   RaggedShard((0,), lengths), or RaggedStridedShard over S blocks
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raggedshard.fully_shard.layout import ShardLayout
from raggedshard.geometry import strided_blocks
from raggedshard.placements import is_ragged

__all__ = ["ParamPlan", "PlacementTypes", "plan_parameter"]


@dataclass(frozen=True)
class PlacementTypes:
    """The placement classes of a backend."""

    Shard: Any
    StridedShard: Any
    RaggedShard: Any
    RaggedStridedShard: Any


@dataclass(frozen=True)
class ParamPlan:
    """The placement on the shard mesh dim and the layout of this rank's block.

    Args:
        placement: equal on every rank, also where TP blocks differ.
        layout: of the block that this rank's shard group holds together.
    """

    placement: Any
    layout: ShardLayout


def plan_parameter(
    describe: str,
    size: Sequence[int],
    world_size: int,
    requested: Any,
    types: PlacementTypes,
    tp_parts: Sequence[int] = (),
    tp_block: int = 0,
    tp_shape: Sequence[int] | None = None,
) -> ParamPlan:
    """Decide how a parameter is sharded.

    Args:
        describe: the parameter's name and the mesh dim, for errors.
        size: global shape.
        world_size: ranks of the shard mesh dim.
        requested: what ``shard_placement_fn`` returned: ``None``, a ``Shard`` or a ``RaggedShard``.
        types: the backend's placement classes.
        tp_parts: sizes of the later mesh dims that shard dim 0, in mesh order.
        tp_block: the block of dim 0 that this rank has after them.
        tp_shape: the shape after TP, where it differs from ``size``.

    Raises:
        NotImplementedError: a dim other than 0 that does not divide.
        ValueError: a scalar; a dim out of range; not a Shard or RaggedShard; units that do not fit.
    """
    if not size:
        raise ValueError(
            f"{describe}: a scalar cannot be sharded; make it a tensor of shape (1,) or ignore it with ignored_params"
        )
    local = tuple(tp_shape if tp_shape is not None else size)
    if is_ragged(requested):
        return _plan_units(describe, size, local, world_size, requested, types, tp_parts, tp_block)
    dim = _requested_dim(describe, size, requested)
    if dim != 0:
        return _plan_other_dim(describe, local, dim, world_size, types)
    blocks = strided_blocks(size[0], tp_parts)
    layouts = [ShardLayout.chunked((block.length, *local[1:]), 0, world_size) for block in blocks]
    if all(layout.is_even for layout in layouts) and len({layout.lengths for layout in layouts}) == 1:
        placement = types.Shard(0) if len(blocks) == 1 else types.StridedShard(0, split_factor=len(blocks))
    else:
        placement = _ragged_placement((0,), [layout.lengths for layout in layouts], types)
    return ParamPlan(placement, layouts[tp_block])


def _requested_dim(describe: str, size: Sequence[int], requested: Any) -> int:
    if requested is None:
        return 0
    if not isinstance(getattr(requested, "dim", None), int) or not requested.is_shard():
        raise ValueError(
            f"{describe}: shard_placement_fn returned {requested!r}; return None, a Shard or a RaggedShard"
        )
    dim = requested.dim + len(size) if requested.dim < 0 else requested.dim
    if not 0 <= dim < len(size):
        raise ValueError(
            f"{describe}: shard_placement_fn returned {requested!r}, but shape {tuple(size)} has only {len(size)} dims"
        )
    return dim


def _plan_other_dim(
    describe: str, local: tuple[int, ...], dim: int, world_size: int, types: PlacementTypes
) -> ParamPlan:
    if local[dim] % world_size:
        raise NotImplementedError(
            f"{describe}: shape {local} cannot be sharded on dim {dim}: {local[dim]} does not divide by {world_size} "
            "ranks. Only dim 0 may be uneven: return Shard(0) or None from shard_placement_fn for this parameter"
        )
    return ParamPlan(types.Shard(dim), ShardLayout.chunked(local, dim, world_size))


def _plan_units(
    describe: str,
    size: Sequence[int],
    local: tuple[int, ...],
    world_size: int,
    requested: Any,
    types: PlacementTypes,
    tp_parts: Sequence[int],
    tp_block: int,
) -> ParamPlan:
    """The user's own units. Over TP blocks they apply to each block; strided units are derived, not given."""
    units, lead = requested.local_units, len(requested.dims)
    if requested.split_factor != 1:
        raise ValueError(
            f"{describe}: shard_placement_fn returned {requested!r}; return a RaggedShard, the blocks of "
            "other mesh dims are added to it"
        )
    if len(units) != world_size:
        raise ValueError(f"{describe}: {len(units)} local_units {units} for {world_size} ranks; give one unit per rank")
    if lead > len(size) or (lead > 1 and (tp_parts or local != tuple(size))):
        raise ValueError(
            f"{describe}: {requested!r} flattens {lead} dims, which shape {tuple(size)} (after TP {local}) "
            "does not allow"
        )
    blocks = strided_blocks(size[0], tp_parts) if lead == 1 else ()
    sizes = [(block.length, *local[1:]) for block in blocks] if lead == 1 else [local]
    try:
        layouts = [ShardLayout.ragged(block_size, lead, units) for block_size in sizes]
    except ValueError as error:
        raise ValueError(
            f"{describe}: shape {tuple(size)} and {requested!r}: {error}. Give units whose sum divides "
            f"{math.prod(sizes[0][:lead])}"
        ) from None
    alike = len({layout.lengths for layout in layouts}) == 1
    lengths = [units] if alike and len(layouts) == 1 else [layout.lengths for layout in layouts]
    return ParamPlan(_ragged_placement(requested.dims, lengths, types), layouts[tp_block])


def _ragged_placement(dims: tuple[int, ...], lengths: Sequence[tuple[int, ...]], types: PlacementTypes) -> Any:
    """The placement of blocks whose ranks hold ``lengths[block][rank]`` rows; one set of units if they are alike."""
    if len(lengths) == 1:
        return types.RaggedShard(dims, lengths[0])
    alike = len(set(lengths)) == 1
    units = lengths[0] if alike else tuple(length for block in lengths for length in block)
    return types.RaggedStridedShard(dims, units, len(lengths))
