"""Loading: everything is checked first, on all ranks; only then is a tensor touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raggedshard.checkpoint import directory
from raggedshard.checkpoint.agreement import Ranks, agree
from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.checkpoint.index import INDEX_NAME, CheckpointIndex, read_index
from raggedshard.checkpoint.layout import TensorLayout
from raggedshard.checkpoint.plan import find_fault, plan_reads
from raggedshard.checkpoint.shard_file import StoredChunk, map_chunk, read_header
from raggedshard.checkpoint.state import decode_value
from raggedshard.cuts import Piece
from raggedshard.geometry import Box

__all__ = ["load_tensors"]


def load_tensors(
    path: Path,
    layouts: Sequence[TensorLayout],
    value_keys: Iterable[str],
    store: Callable[[TensorLayout, Piece, Box, np.ndarray], None],
    ranks: Ranks,
) -> dict[str, Any]:
    """Read a checkpoint into tensors of any layout. Collective.

    Args:
        path: the checkpoint's directory.
        layouts: every tensor of the state, however this run holds it.
        value_keys: the keys of the state's values.
        store: puts elements into a piece that this rank holds: the part ``box`` of it (in coordinates of the global
            tensor), as ints of the item size in the shape of ``box``, to be reinterpreted and copied.
        ranks: all of them.

    Returns:
        The values by key.

    Raises:
        CheckpointError: before anything is stored: no checkpoint; a file missing, truncated or of other content than
            the index says; keys, shapes or dtypes that differ from the state's; chunks with gaps or overlaps; or one
            of these on another rank.
    """
    found = directory.find(path.absolute())
    index = agree(ranks, lambda: read_index(found))
    values = agree(ranks, lambda: _check_state(found, index, layouts, set(value_keys)))
    stored = agree(ranks, lambda: _check_files(found, index, layouts, ranks))
    agree(ranks, lambda: _read(found, index, layouts, stored, store, ranks.rank))
    return values


def _check_state(
    found: Path, index: CheckpointIndex, layouts: Sequence[TensorLayout], value_keys: set[str]
) -> dict[str, Any]:
    source = found / INDEX_NAME if index.is_own else found
    wanted = {layout.key for layout in layouts} | value_keys
    held = index.tensors.keys() | index.values.keys()
    if missing := sorted(wanted - held):
        raise CheckpointError(f"{source}: missing in the checkpoint: {_list(missing)} of the state")
    if extra := sorted(held - wanted):
        raise CheckpointError(
            f"{source}: missing in the state: {_list(extra)} of the checkpoint. (On torch, an optimizer has no state "
            "before its first step; torch.distributed.checkpoint.state_dict.get_optimizer_state_dict makes it.)"
        )
    for layout in layouts:
        _check_tensor(found, source, index, layout)
    if as_tensors := sorted(value_keys & index.tensors.keys()):
        raise CheckpointError(f"{source}: key '{as_tensors[0]}' is a tensor in the checkpoint, a value in the state")
    return {key: decode_value(value) for key, value in index.values.items()}


def _check_tensor(found: Path, source: Path, index: CheckpointIndex, layout: TensorLayout) -> None:
    entry = index.tensors.get(layout.key)
    if entry is None:
        raise CheckpointError(f"{source}: key '{layout.key}' is a value in the checkpoint, a tensor in the state")
    where = f"{source}: key '{layout.key}'"
    if entry.shape != layout.shape:
        raise CheckpointError(f"{where} has shape {entry.shape} in the checkpoint, {layout.shape} in the state")
    if entry.dtype != layout.dtype:
        raise CheckpointError(
            f"{where} has dtype {entry.dtype} in the checkpoint, {layout.dtype} in the state; load into the "
            "checkpoint's dtype and convert afterwards"
        )
    fault = find_fault(entry.shape, entry.boxes)
    if fault is not None:
        file = source if fault.chunk is None else found / entry.files[fault.chunk]
        raise CheckpointError(f"{file}: key '{layout.key}': {fault.text}")


def _list(keys: Sequence[str]) -> str:
    shown = ", ".join(f"'{key}'" for key in keys[:5])
    return f"key {shown}" if len(keys) == 1 else f"keys {shown}{', ...' if len(keys) > 5 else ''}"


def _check_files(
    found: Path, index: CheckpointIndex, layouts: Sequence[TensorLayout], ranks: Ranks
) -> dict[str, dict[str, StoredChunk]]:
    """Compare files with the index: those that this rank reads, and its share of the others.

    Returns:
        The chunks by file and key, of the files that were looked at.
    """
    for extra in sorted({p.name for p in found.glob("*.safetensors")} - index.files.keys()):
        if index.is_own:
            raise CheckpointError(f"{found / extra}: the file is no part of the checkpoint, by {INDEX_NAME}")
    share = set(sorted(index.files)[ranks.rank :: ranks.size])
    for layout in layouts:
        entry = index.tensors[layout.key]
        share.update(entry.files[read.chunk] for read in plan_reads(entry.boxes, layout.held_by(ranks.rank)))
    return {name: _check_file(found / name, name, index) for name in sorted(share)}


def _check_file(path: Path, name: str, index: CheckpointIndex) -> dict[str, StoredChunk]:
    if name not in index.files:
        raise CheckpointError(f"{path.parent / INDEX_NAME}: the index names {name}, but not among its files")
    expected = index.chunks_by_file[name]
    try:
        stored = {s.chunk.key: s for s in read_header(path)}
    except CheckpointError as error:
        raise CheckpointError(f"{error} (by the index it holds {_list(sorted(expected))})") from error
    for key in sorted(expected.keys() | stored.keys()):
        if key not in stored or key not in expected:
            where = "the index" if key not in expected else "the file"
            raise CheckpointError(f"{path}: key '{key}' is missing in {where}")
        actual, said = stored[key].chunk, expected[key]
        if (actual.dtype, actual.box) != (said.dtype, said.box):
            raise CheckpointError(
                f"{path}: key '{key}' is {actual.dtype} at {tuple(actual.box)}; by the index it is {said.dtype} "
                f"at {tuple(said.box)}"
            )
    size = path.stat().st_size
    if size != index.files[name]:
        raise CheckpointError(f"{path}: {size} bytes, by the index {index.files[name]}")
    return stored


def _read(
    found: Path,
    index: CheckpointIndex,
    layouts: Sequence[TensorLayout],
    stored: Mapping[str, Mapping[str, StoredChunk]],
    store: Callable[[TensorLayout, Piece, Box, np.ndarray], None],
    rank: int,
) -> None:
    for layout in layouts:
        entry = index.tensors[layout.key]
        for read in plan_reads(entry.boxes, layout.held_by(rank)):
            file = entry.files[read.chunk]
            elements = map_chunk(found / file, stored[file][layout.key])
            store(layout, read.piece, read.box, elements[_within(entry.boxes[read.chunk], read.box)])


def _within(chunk: Box, box: Box) -> tuple[Any, ...]:
    """Where ``box`` lies in the array of ``chunk``; the ellipsis keeps an array of no dims an array."""
    slices = (
        slice(offset - start, offset - start + size)
        for offset, size, start in zip(box.offsets, box.sizes, chunk.offsets, strict=True)
    )
    return (..., *slices)
