"""Collectives on a CPU by torch's gloo, on the memory of MindSpore's tensors. Opt-in: only here is torch imported."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

import mindspore as ms
import mindspore.mint.distributed as mindspore_dist
from mindspore import Tensor, mint

if TYPE_CHECKING:
    from raggedshard.platform.mindspore.collectives import Group

__all__ = ["Gloo"]


class Gloo:
    """torch's process group over the ranks that MindSpore has joined.

    Args:
        rank, world_size: this process's and how many there are.
        timeout: of a collective.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """

    def __init__(self, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"enable_gloo() needs torch ({error}); install it, or leave the call out"
            ) from None
        self._torch: Any = torch
        self._dist: Any = dist
        self._groups: dict[tuple[int, ...], Any] = {}
        if not dist.is_initialized():
            store = self._meet(rank, world_size, timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def _meet(self, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
        """A store of torch's on rank 0, at a free port that MindSpore tells the others."""
        host = os.environ.get("MASTER_ADDR") or os.environ.get("MS_SCHED_HOST", "127.0.0.1")
        ports: list[Any] = [None] * world_size
        store: Any = None
        if rank == 0:
            store = self._dist.TCPStore(host, 0, world_size, True, timeout, wait_for_workers=False)
        mindspore_dist.all_gather_object(ports, store.port if rank == 0 else None)
        return store or self._dist.TCPStore(host, ports[0], world_size, False, timeout)

    def _group(self, group: Group) -> Any:
        if group.ranks not in self._groups:
            # Only members take part: other lines of a mesh make groups of their own.
            self._groups[group.ranks] = self._dist.new_group(list(group.ranks), use_local_synchronization=True)
        return self._groups[group.ranks]

    def _memory(self, tensor: Tensor) -> Any:
        """A torch tensor on the memory of one that is no view. numpy has no bfloat16 that torch knows."""
        array = tensor.asnumpy()
        if tensor.dtype == ms.bfloat16:
            return self._torch.from_numpy(array.view("int16")).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def all_gather(self, tensor: Tensor, group: Group) -> list[Tensor]:
        parts = [mint.empty(tensor.shape, dtype=tensor.dtype) for _ in group.ranks]
        self._dist.all_gather(list(map(self._memory, parts)), self._memory(tensor), group=self._group(group))
        return parts

    def reduce_scatter(self, chunks: Tensor, group: Group) -> Tensor:
        """An exchange and a sum in rank order, in a wide accumulator and rounded once, as the torch backend has it."""
        output = mint.empty((chunks.size // group.size,), dtype=chunks.dtype)
        sent = self._memory(chunks)
        received = self._torch.empty_like(sent)
        self._dist.all_to_all_single(received, sent, group=self._group(group))
        self._torch.sum(received.view(group.size, -1), 0, out=self._memory(output))
        return output

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> None:
        """In place; ``tensor`` is no view."""
        ops = {"sum": self._dist.ReduceOp.SUM, "max": self._dist.ReduceOp.MAX, "min": self._dist.ReduceOp.MIN}
        self._dist.all_reduce(self._memory(tensor), op=ops[op], group=self._group(group))

    def broadcast(self, tensor: Tensor, source: int, group: Group) -> None:
        """In place, from a global rank; ``tensor`` is no view."""
        self._dist.broadcast(self._memory(tensor), src=source, group=self._group(group))
