"""Views of the same elements in a logical tensor and in a buffer of one padded chunk per rank."""

from __future__ import annotations

import torch

from raggedshard.fully_shard.layout import ShardLayout

__all__ = ["chunk_views", "full_views", "padding_views"]


def full_views(tensor: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """Views of a logical tensor of shape ``layout.size`` (contiguous), one per segment: ``(ranks, elements)``.

    For a dim other than 0 the one view is ``(ranks, *sharded size)``.
    """
    if layout.dim != 0:
        parts = (layout.world_size, layout.dim_shard_size)
        return [tensor.unflatten(layout.dim, parts).movedim(layout.dim, 0)] if layout.numel else []
    flat = tensor.view(-1)
    return [flat.narrow(0, s.start, s.ranks * s.numel).view(s.ranks, s.numel) for s in layout.segments]


def chunk_views(region: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """The same elements in a buffer of one padded chunk per rank: views of ``region``, ``(ranks, padded_numel)``."""
    if layout.dim != 0:
        return [region.unflatten(1, layout.padded_sharded_param_size)] if layout.numel else []
    return [region[s.first_rank : s.first_rank + s.ranks, : s.numel] for s in layout.segments]


def padding_views(region: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """The elements of ``region``, ``(ranks, padded_numel)``, that belong to nobody."""
    return [region[p.first_rank : p.first_rank + p.ranks, p.start : p.start + p.numel] for p in layout.padding]
