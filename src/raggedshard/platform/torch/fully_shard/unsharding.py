"""The parameters of one unit and the all-gather that makes them whole.

a chunk per rank:  | unit number | shard of p0 (padded) | shard of p1 (padded) | ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from raggedshard.fully_shard.identity import HEADER_BYTES
from raggedshard.fully_shard.layout import FusedLayout
from raggedshard.fully_shard.param_group import ParamGroup
from raggedshard.platform.torch.fully_shard.collectives import all_gather_chunks
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2
from raggedshard.platform.torch.fully_shard.views import chunk_views

__all__ = ["UnshardingGroup"]


@dataclass
class _Gather:
    """An all-gather under way: its output and the ranks that take part."""

    chunks: torch.Tensor
    work: dist.Work | None
    unit: int


class UnshardingGroup(ParamGroup[HSDPParamV2, DataParallelMesh]):
    """`ParamGroup`, and how its parameters become whole."""

    def __init__(self, params: list[HSDPParamV2], dp_mesh: DataParallelMesh) -> None:
        super().__init__(params, dp_mesh)
        self._gather: _Gather | None = None
        self._gathered_versions: list[tuple[int, int]] = []
        self._kept: _Gather | None = None

    @property
    def is_stale(self) -> bool:
        gathered = self.is_unsharded or self._gather is not None or self._kept is not None
        return gathered and self._gathered_versions != [p.version for p in self.params]

    def _gather_layout(self) -> FusedLayout:
        fields = tuple((p.layout.padded_numel, p.param_dtype.itemsize) for p in self.params)
        return FusedLayout.pack(fields, header=HEADER_BYTES, alignment=HEADER_BYTES)

    def unshard(self, async_op: bool = False) -> None:
        if self.is_unsharded or self._gather is not None:
            return
        if self._kept is not None:
            self._gather = self._gather_kept(self._kept)
            return
        for p in self.params:
            p.restore_storage()
        self._gathered_versions = [p.version for p in self.params]
        if self.dp_mesh.shard_world_size == 1 and all(p.aliases_shard() for p in self.params):
            self._gather = _Gather(torch.empty(0), None, self.unit)
        else:
            self._gather = self._gather_shards()

    @torch.no_grad()
    def _gather_shards(self) -> _Gather:
        layout = self._gather_layout()
        size = self.dp_mesh.shard_world_size
        chunks = torch.empty((size, layout.chunk_bytes), dtype=torch.uint8, device=self.dp_mesh.device)
        own = chunks[self.dp_mesh.shard_rank]
        own[:HEADER_BYTES].view(torch.int64).fill_(self.unit)
        targets = [
            own[offset : offset + p.layout.padded_numel * p.param_dtype.itemsize].view(p.param_dtype)
            for p, offset in zip(self.params, layout.offsets, strict=True)
        ]
        torch._foreach_copy_(targets, [data for p in self.params for data in p.all_gather_inputs])
        return _Gather(chunks, all_gather_chunks(chunks, self.dp_mesh.shard_group), self.unit)

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        gather, self._gather = self._gather, None
        if gather is None:
            for p in self.params:
                p.follow_requires_grad()
            return
        if gather.work is not None:
            gather.work.wait()
        if gather.chunks.numel():
            self._check_gathered(gather)
        for p in self.params:
            p.alloc_unsharded()
        if gather.chunks.numel():
            self._copy_out(gather.chunks)
            self._keep_rows(gather)
        for p in self.params:
            p.to_unsharded()
        self.is_unsharded = True

    def _check_gathered(self, gather: _Gather) -> None:
        units = gather.chunks[:, :HEADER_BYTES].contiguous().view(torch.int64).flatten().tolist()
        others = {rank: unit for rank, unit in enumerate(units) if unit != gather.unit}
        if others:
            raise self.mismatch("all-gather", others)

    def _copy_out(self, chunks: torch.Tensor) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for p, offset in zip(self.params, self._gather_layout().offsets, strict=True):
            region = chunks[:, offset : offset + p.layout.padded_numel * p.param_dtype.itemsize].view(p.param_dtype)
            targets += p.unsharded_views()
            sources += chunk_views(region, p.layout)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _keep_rows(self, gather: _Gather) -> None:
        """With ``reshard_after_forward=n``, keep this rank's part of the rows for backward's smaller all-gather."""
        if self.post_forward_group is None or self._kept is not None:
            return
        rows = self.dp_mesh.shard_world_size // dist.get_world_size(self.post_forward_group)
        own = dist.get_rank(self.post_forward_group) * rows
        self._kept = _Gather(gather.chunks.narrow(0, own, rows).clone(), None, gather.unit)

    def _gather_kept(self, kept: _Gather) -> _Gather:
        assert self.post_forward_group is not None
        ranks = dist.get_world_size(self.post_forward_group)
        chunks = kept.chunks.new_empty((ranks, kept.chunks.numel()))
        chunks[dist.get_rank(self.post_forward_group)] = kept.chunks.view(-1)
        work = all_gather_chunks(chunks, self.post_forward_group)
        return _Gather(chunks.view(-1, kept.chunks.shape[1]), work, kept.unit)

    def _drop_gathered(self, after_forward: bool) -> None:
        if self._gather is not None:  # gathered ahead and not used: other ranks still take part
            if self._gather.work is not None:
                self._gather.work.wait()
            self._gather = None
        if not after_forward:
            self._kept = None
