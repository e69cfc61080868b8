"""The three collectives of a unit, over byte buffers with one equal chunk per rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raggedshard.platform.torch.collectives import all_gather_single

__all__ = ["all_gather_chunks", "all_reduce_sum", "exchange_chunks"]


def all_gather_chunks(chunks: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Fill ``chunks`` (ranks, bytes) with every rank's row; this rank's row holds its own input already."""
    if chunks.shape[0] == 1:
        return None
    own = chunks[dist.get_rank(group)]
    return all_gather_single(chunks.view(-1), own, group=group, async_op=True)


def exchange_chunks(output: torch.Tensor, chunks: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Send row r of ``chunks`` (ranks, bytes) to rank r; row r of ``output`` comes from rank r.

    The first half of a reduce-scatter: the receiver adds the rows up itself, in one order on every machine and with
    the accumulator of a local sum, and bytes of several dtypes travel together. With gloo it also takes about half
    the time of ``reduce_scatter_tensor``.
    """
    return dist.all_to_all_single(output.view(-1), chunks.view(-1), group=group, async_op=True)


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add ``tensor`` up over the replicas, in place."""
    dist.all_reduce(tensor, group=group)
