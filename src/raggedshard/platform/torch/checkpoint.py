"""``raggedshard.torch.checkpoint``: a state of tensors to a directory of safetensors files and back.

state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 7}
checkpoint.save(state, "run/step7")
checkpoint.load(state, "run/step7")      any number of ranks, any mesh, any placements, plain tensors
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from raggedshard.checkpoint import (
    AllRanks,
    CheckpointError,
    FlatState,
    Ranks,
    SingleRank,
    TensorLayout,
    agree,
    flatten_state,
    load_tensors,
    save_tensors,
)
from raggedshard.cuts import Piece
from raggedshard.geometry import Box

# Imported for what they do: torch's own functions learn our layouts.
from raggedshard.platform.torch import full_state_dict as full_state_dict
from raggedshard.platform.torch import hugging_face_writer as hugging_face_writer
from raggedshard.platform.torch.shards import box_view, local_of

__all__ = ["CheckpointError", "load", "save"]


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint in the place of ``path``. Collective.

    Each rank writes the boxes that it owns, so nothing is gathered. The files can be read by
    ``torch.distributed.checkpoint.HuggingFaceStorageReader`` too. A save that is interrupted at any point leaves the
    checkpoint that was there.

    Args:
        state: nested dicts and lists of DTensors of any placements but Partial, plain tensors (alike on all ranks:
            rank 0's are saved), None, bool, int, float, str, and lists and tuples of these. Alike on all ranks.
        path: a directory of its own on storage that all ranks share; it is replaced if it is a checkpoint already.

    Raises:
        CheckpointError: the ranks' states differ, ``path`` holds something else, or another rank failed.
        TypeError, ValueError: an entry that a checkpoint cannot hold; the message names its key.
        OSError: a file cannot be written.
        RuntimeError: a rank died.
    """
    ranks = _all_ranks()
    flat, layouts = agree(ranks, lambda: _describe(state, ranks))
    save_tensors(Path(path), layouts, flat.values, lambda layout, piece: _bytes_of(flat, layout, piece), ranks)


def load(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill the tensors of ``state`` in place and replace its values. Collective.

    Only the parts that this rank holds are read. Everything is checked before the first tensor is touched.

    Args:
        state: as for `save`, with exactly the checkpoint's keys, shapes and dtypes, in any layout. What
            ``model.state_dict()`` returns are the model's own tensors; an optimizer takes the loaded state by
            ``set_optimizer_state_dict`` or ``load_state_dict``.
        path: a directory that `save`, torch's ``HuggingFaceStorageWriter`` or Hugging Face made.

    Raises:
        CheckpointError: no checkpoint, a file that is missing, truncated or damaged, keys, shapes or dtypes that
            differ, chunks with gaps or overlaps, or another rank failed. The message names file and key; the state
            is as before.
        TypeError, ValueError: an entry of the state that a checkpoint cannot hold.
        OSError: the storage failed while elements were read; the state may be loaded in part.
        RuntimeError: a rank died.
    """
    ranks = _all_ranks()
    flat, layouts = agree(ranks, lambda: _describe(state, ranks))

    def store(layout: TensorLayout, piece: Piece, box: Box, elements: np.ndarray) -> None:
        target = box_view(_local(flat.tensors[layout.key]), piece, box)
        target.copy_(torch.from_numpy(np.asarray(elements)).view(target.dtype))

    with torch.no_grad():
        values = load_tensors(Path(path), layouts, flat.values, store, ranks)
    for key, value in values.items():
        flat.set_value(key, value)


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The names of dtypes in safetensors files."""


def _all_ranks() -> Ranks:
    if not (dist.is_available() and dist.is_initialized()):
        return SingleRank()
    return AllRanks(dist.get_rank(), dist.get_world_size(), dist.all_gather_object)


def _describe(state: Mapping[str, Any], ranks: Ranks) -> tuple[FlatState, list[TensorLayout]]:
    """The leaves of a state, and the layouts of its tensors in the order of their keys."""
    flat = flatten_state(state, lambda leaf: isinstance(leaf, torch.Tensor))
    return flat, [_layout_of(key, flat.tensors[key], ranks.rank) for key in sorted(flat.tensors)]


def _layout_of(key: str, tensor: torch.Tensor, rank: int) -> TensorLayout:
    what = f"key '{key}': a tensor of {tensor.dtype} on {tensor.device}, layout {tensor.layout}"
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        raise TypeError(f"{what}, cannot stand in a safetensors file")
    if tensor.is_meta:
        raise ValueError(f"{what}, has no values: materialise it with to_empty first")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorLayout(key, dtype, shape)
    mesh = tensor.device_mesh
    local_shape = tuple(tensor._local_tensor.shape)
    return TensorLayout.on_mesh(
        key, dtype, shape, mesh.shape, mesh.mesh.flatten().tolist(), tensor.placements, rank, local_shape
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part; writes to it count as writes to the tensor."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def _bytes_of(flat: FlatState, layout: TensorLayout, piece: Piece) -> np.ndarray:
    part = box_view(_local(flat.tensors[layout.key]), piece).resolve_conj().resolve_neg()
    return part.cpu().contiguous().view(-1).view(torch.uint8).numpy()
