"""``raggedshard.mindspore.checkpoint``: a state of tensors to a directory of safetensors files and back.

state = {"model": net.parameters_dict(), "optimizer": optimizer.parameters_dict(), "step": 7}
checkpoint.save(state, "run/step7")
checkpoint.load(state, "run/step7")      any number of ranks, any mesh, any placements, plain tensors

The files are those of `raggedshard.torch.checkpoint`: either framework loads what the other saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor

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
from raggedshard.platform.mindspore.collectives import get_rank, get_world_size, is_initialized
from raggedshard.platform.mindspore.dtensor import DTensor, local_of, wrap_local
from raggedshard.platform.mindspore.private import no_grad
from raggedshard.platform.mindspore.redistribute import box_view

__all__ = ["CheckpointError", "load", "save"]


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint in the place of ``path``. Collective.

    Each rank writes the boxes that it owns, so nothing is gathered. A save that is interrupted at any point leaves the
    checkpoint that was there.

    Args:
        state: nested dicts and lists of DTensors of any placements but Partial, plain tensors (alike on all ranks:
            rank 0's are saved), None, bool, int, float, str, and lists and tuples of these. Alike on all ranks.
        path: a directory of its own on storage that all ranks share; it is replaced if it is a checkpoint already.

    Raises:
        CheckpointError: the ranks' states differ, ``path`` holds something else, or another rank failed.
        TypeError, ValueError: an entry that a checkpoint cannot hold; the message names its key.
        OSError: a file cannot be written.
    """
    ranks = _all_ranks()
    flat, layouts = agree(ranks, lambda: _describe(state, ranks, has_values=True))
    arrays = _HostArrays(flat)
    save_tensors(Path(path), layouts, flat.values, arrays.bytes_of, ranks)


@no_grad()
def load(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill the tensors of ``state`` in place and replace its values. Collective.

    Only the parts that this rank holds are read. Everything is checked before the first tensor is touched. Parameters
    whose initialisation was deferred take the loaded values instead.

    Args:
        state: as for `save`, with exactly the checkpoint's keys, shapes and dtypes, in any layout.
        path: a directory that `save` of either framework, or Hugging Face, made.

    Raises:
        CheckpointError: no checkpoint, a file that is missing, truncated or damaged, keys, shapes or dtypes that
            differ, chunks with gaps or overlaps, or another rank failed. The message names file and key; the state
            is as before.
        TypeError, ValueError: an entry of the state that a checkpoint cannot hold.
        OSError: the storage failed while elements were read; the state may be loaded in part.
    """
    ranks = _all_ranks()
    flat, layouts = agree(ranks, lambda: _describe(state, ranks, has_values=False))
    arriving = _Arriving(flat)
    values = load_tensors(Path(path), layouts, flat.values, arriving.store, ranks)
    for key, value in values.items():
        flat.set_value(key, value)


_DTYPES = {
    ms.float64: "F64",
    ms.float32: "F32",
    ms.float16: "F16",
    ms.bfloat16: "BF16",
    ms.int64: "I64",
    ms.int32: "I32",
    ms.int16: "I16",
    ms.int8: "I8",
    ms.uint64: "U64",
    ms.uint32: "U32",
    ms.uint16: "U16",
    ms.uint8: "U8",
    ms.bool_: "BOOL",
    ms.complex64: "C64",
}
"""The names of dtypes in safetensors files."""


def _all_ranks() -> Ranks:
    if not is_initialized():
        return SingleRank()
    return AllRanks(get_rank(), get_world_size(), dist.all_gather_object)


def _describe(state: Mapping[str, Any], ranks: Ranks, has_values: bool) -> tuple[FlatState, list[TensorLayout]]:
    """The leaves of a state, and the layouts of its tensors in the order of their keys."""
    flat = flatten_state(state, lambda leaf: isinstance(leaf, Tensor))
    return flat, [_layout_of(key, flat.tensors[key], ranks.rank, has_values) for key in sorted(flat.tensors)]


def _layout_of(key: str, tensor: Tensor, rank: int, has_values: bool) -> TensorLayout:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"key '{key}': a tensor of {tensor.dtype} cannot stand in a safetensors file")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        if tensor.has_init:
            raise ValueError(f"key '{key}': a tensor without values: call init_data() first")
        return TensorLayout(key, dtype, shape)
    if has_values and tensor.is_deferred:
        raise ValueError(
            f"key '{key}': the initialisation of {tensor!r} is deferred and it has no values yet: run a forward or "
            "call init_parameters_data() of the outermost cell"
        )
    mesh = tensor.device_mesh
    local_shape = tuple(tensor._shape)
    return TensorLayout.on_mesh(
        key, dtype, shape, mesh.shape, mesh.mesh.flatten().tolist(), tensor.placements, rank, local_shape
    )


def _host_array(tensor: Tensor) -> np.ndarray:
    """This rank's part in host memory; bfloat16 in the numpy dtype that MindSpore brings."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).asnumpy()


class _HostArrays:
    """The tensors of a state in host memory, one at a time: files are written tensor by tensor."""

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._key = ""
        self._array = np.empty(0)

    def bytes_of(self, layout: TensorLayout, piece: Piece) -> np.ndarray:
        if layout.key != self._key:
            self._key, self._array = layout.key, _host_array(self._flat.tensors[layout.key])
        part = np.ascontiguousarray(box_view(self._array, piece, piece.box))
        return part.reshape(-1).view(np.uint8)


class _Arriving:
    """Tensors of which parts have been read: each is written when it is whole, in the memory that it had.

    MindSpore's in-place copies into a part of a tensor are silently lost on a CPU, and a device has no host array.
    """

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._arrays: dict[str, tuple[np.ndarray, int]] = {}

    def store(self, layout: TensorLayout, piece: Piece, box: Box, elements: np.ndarray) -> None:
        tensor = self._flat.tensors[layout.key]
        array, missing = self._arrays.pop(layout.key, (None, 0))
        if array is None:
            array = np.empty(tuple(tensor._shape), elements.dtype)
            missing = array.size
        box_view(array, piece, box)[...] = elements
        missing -= box.numel
        if missing:
            self._arrays[layout.key] = array, missing
        else:
            _write(tensor, array)


def _write(tensor: Tensor, integers: np.ndarray) -> None:
    """Write a whole local tensor, given as ints of its item size."""
    host_dtype = ms.dtype_to_nptype(tensor.dtype)
    value = Tensor(integers.view(host_dtype), tensor.dtype)
    if isinstance(tensor, DTensor):
        tensor.set_data(wrap_local(value, tensor._layout))
    elif tensor.size:
        tensor.copy_(value)
