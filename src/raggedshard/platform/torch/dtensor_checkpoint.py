"""What torch.distributed.checkpoint asks a tensor: which boxes it holds, and the memory of each.

A rank that holds nothing names no box: DCP's check for overlaps takes an empty box for a second owner.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from raggedshard.cuts import Piece
from raggedshard.geometry import Box
from raggedshard.platform.torch.shards import box_view, has_partial, local_of, pieces_on

__all__ = ["chunks", "shard_at", "write_items"]


def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """One item per box of this rank; replicas name the same boxes, and DCP writes one of them.

    Raises:
        ValueError: a Partial placement.
    """
    properties = TensorProperties.create_from_tensor(local_of(tensor).detach())
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in chunks(tensor)
    ]


def chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of this rank's boxes in the global tensor.

    Raises:
        ValueError: a Partial placement.
    """
    return [ChunkStorageMetadata(torch.Size(p.box.offsets), torch.Size(p.box.sizes)) for p in _pieces(tensor)]


def shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the box that starts at ``index.offset``, in the shape of the box: to read or to fill.

    Raises:
        ValueError: this rank holds no such box, or a Partial placement.
    """
    for piece in _pieces(tensor):
        if index.offset is None or torch.Size(piece.box.offsets) == index.offset:
            local = local_of(tensor).detach()
            return local.view(piece.box.sizes) if piece.box.numel == 0 else box_view(local, piece)
    raise ValueError(f"{index.fqn}: rank holds no box at offset {tuple(index.offset or ())} of {tuple(tensor.shape)}")


def _pieces(tensor: DTensor) -> tuple[Piece, ...]:
    if has_partial(tensor.placements):
        raise ValueError(f"a tensor with placements {tensor.placements} cannot be saved or loaded: reduce it first")
    if tensor.numel() == 0:
        empty = Box((0,) * tensor.ndim, tuple(tensor.shape))  # else no rank would state that the tensor is there
        return (Piece(empty, Box((0,) * local_of(tensor).ndim, tuple(local_of(tensor).shape))),)
    return pieces_on(tensor.device_mesh, tensor.shape, tensor.placements)
