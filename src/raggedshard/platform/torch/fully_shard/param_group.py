"""The parameters of one unit and their fused communication.

    all-gather     a chunk per rank:  | unit number | shard of p0 | shard of p1 | ...
    reduction      a chunk per rank:  | sign code, used flags, gradient of p0 for that rank, ... |   one dtype a region

Shards and gradients take their padded sizes in a chunk, so that all ranks' chunks are alike; padding is zero in both
and read by neither end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.distributed as dist

from raggedshard.fully_shard.identity import (
    CODE_LENGTH,
    HEADER_BYTES,
    code_agrees,
    decode,
    describe_mismatch,
    encode,
)
from raggedshard.fully_shard.layout import FusedLayout
from raggedshard.platform.torch.fully_shard.collectives import all_gather_chunks, all_reduce_sum, exchange_chunks
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2, chunk_views

__all__ = ["HSDPParamGroup"]


@dataclass
class _Gather:
    """An all-gather under way: its output and the ranks that take part."""

    chunks: torch.Tensor
    work: dist.Work | None
    unit: int


@dataclass
class _Region:
    """The gradients of one dtype in a reduction's chunk: byte range, and each parameter's first element in it."""

    params: list[HSDPParamV2]
    dtype: torch.dtype
    starts: list[int]
    numel: int
    first_byte: int = 0

    def view(self, chunks: torch.Tensor) -> torch.Tensor:
        """``(ranks, numel)`` elements of this region in a byte buffer."""
        return chunks[:, self.first_byte : self.first_byte + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass
class _Reduction:
    """A reduction under way."""

    regions: list[_Region]
    used: list[bool]
    all_reduce: bool
    received: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor = field(repr=False)


@dataclass
class _Partial:
    """HSDP: sums over the shard dim whose all-reduce waits for a later backward."""

    params: list[HSDPParamV2]
    sums: list[torch.Tensor]


class HSDPParamGroup:
    """The parameters of one unit.

    Args:
        params: in an order that is the same on every rank.
        dp_mesh: the mesh that shards (and replicates) them.
    """

    def __init__(self, params: list[HSDPParamV2], dp_mesh: DataParallelMesh) -> None:
        self.params = params
        self.dp_mesh = dp_mesh
        self.unit = 0
        self.unit_names: Sequence[str] = ("",)
        self.gradient_divide_factor: float | None = None
        self.accumulate_in_reduce_dtype = True
        self.post_forward_group: dist.ProcessGroup | None = None
        self.is_unsharded = False
        self._gather: _Gather | None = None
        self._gathered_versions: list[tuple[int, int]] = []
        self._kept: _Gather | None = None
        self._reduction: _Reduction | None = None
        self._partial: _Partial | None = None

    # ---- unsharding

    @property
    def is_stale(self) -> bool:
        """Whether the sharded parameters were written to since they were gathered."""
        gathered = self.is_unsharded or self._gather is not None or self._kept is not None
        return gathered and self._gathered_versions != [p.version for p in self.params]

    def _gather_layout(self) -> FusedLayout:
        fields = [(p.layout.padded_numel, p.param_dtype.itemsize) for p in self.params]
        return FusedLayout.pack(fields, header=HEADER_BYTES, alignment=HEADER_BYTES)

    def unshard(self, async_op: bool = False) -> None:
        """Start the all-gather; `wait_for_unshard` finishes it. Nothing happens if it is done or under way."""
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
        """Finish the all-gather: the unsharded parameters are in the modules afterwards."""
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
            raise RuntimeError(describe_mismatch("all-gather", self.unit, self.unit_names, others))

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

    def reshard(self, after_forward: bool = False) -> None:
        """Free the unsharded parameters and put the sharded ones back.

        Args:
            after_forward: backward will gather again, so keep what ``reshard_after_forward=n`` holds for it.
        """
        if self._gather is not None:  # gathered ahead and not used: other ranks still take part
            if self._gather.work is not None:
                self._gather.work.wait()
            self._gather = None
        if not after_forward:
            self._kept = None
        if not self.is_unsharded:
            return
        for p in self.params:
            p.to_sharded()
            p.free_unsharded()
        self.is_unsharded = False

    def reset_sharded_params(self) -> None:
        """`HSDPParamV2.reset_sharded_param` for all; the unit must be sharded."""
        for p in self.params:
            p.reset_sharded_param()

    # ---- gradients

    @property
    def trainable(self) -> list[HSDPParamV2]:
        return [p for p in self.params if p.sharded_param.requires_grad]

    @property
    def has_trainable(self) -> bool:
        return any(p.sharded_param.requires_grad for p in self.params)

    @property
    def has_unsharded_grads(self) -> bool:
        """Whether autograd left gradients that were not taken yet, or taken ones were not reduced."""
        return any(
            p.unsharded_grad is not None or (p._unsharded_param is not None and p._unsharded_param.grad is not None)
            for p in self.params
        )

    @property
    def has_partial_reduction(self) -> bool:
        """Whether gradients of earlier backwards wait for their all-reduce."""
        return self._partial is not None

    def abandon_backward(self) -> None:
        """Drop what a backward that raised left behind: gradients not yet taken, a reduction not handed out."""
        for p in self.params:
            p.drop_unsharded_grad()
        reduction, self._reduction = self._reduction, None
        if reduction is not None and reduction.work is not None:
            reduction.work.wait()

    @torch.no_grad()
    def take_unsharded_grads(self) -> None:
        for p in self.params:
            p.take_unsharded_grad(p.reduce_dtype if self.accumulate_in_reduce_dtype else None)

    def _regions(self) -> list[_Region]:
        """One region per reduce dtype. The first one starts with the unit's code and the parameters' used flags."""
        trainable = sorted(self.trainable, key=lambda p: str(p.reduce_dtype))
        front = CODE_LENGTH + len(trainable)
        regions = []
        for dtype, params in groupby(trainable, key=lambda p: p.reduce_dtype):
            members = list(params)
            layout = FusedLayout.pack([(p.layout.padded_numel, 1) for p in members], header=front)
            regions.append(_Region(members, dtype, list(layout.offsets), layout.chunk_bytes))
            front = 0
        packed = FusedLayout.pack([(region.numel, region.dtype.itemsize) for region in regions])
        for region, first_byte in zip(regions, packed.offsets, strict=True):
            region.first_byte = first_byte
        return regions

    @torch.no_grad()
    def start_reduce(self, all_reduce: bool) -> None:
        """Copy the taken gradients into one buffer and start to exchange it; `finish_reduce` finishes.

        Parameters without a gradient take part with zeros, so the exchange is the same on ranks that used others.
        """
        regions = self._regions()
        packed = FusedLayout.pack([(region.numel, region.dtype.itemsize) for region in regions])
        size = self.dp_mesh.shard_world_size
        chunks = torch.empty((size, packed.chunk_bytes), dtype=torch.uint8, device=self.dp_mesh.device)
        params = [p for region in regions for p in region.params]
        used = [p.unsharded_grad is not None for p in params]
        front = torch.tensor([*encode(self.unit), *map(float, used)], dtype=regions[0].dtype)
        regions[0].view(chunks)[:, : front.numel()] = front.to(chunks.device)
        for region in regions:
            self.reduce_scatter_copy_in(region, region.view(chunks))
        received, work = chunks, None
        if size > 1:
            received = torch.empty_like(chunks)
            work = exchange_chunks(received, chunks, self.dp_mesh.shard_group)
        self._reduction = _Reduction(regions, used, all_reduce, received, work, chunks)

    def reduce_scatter_copy_in(self, region: _Region, chunks: torch.Tensor) -> None:
        """Write gradients straight into their places in the fused input ``chunks`` (ranks, elements); padding is 0."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        zeros: list[torch.Tensor] = []
        for p, start in zip(region.params, region.starts, strict=True):
            part = chunks[:, start : start + p.layout.padded_numel]
            if p.unsharded_grad is None:
                zeros.append(part)
                continue
            targets += chunk_views(part, p.layout)
            sources += p.gradient_views()
            zeros += [
                part[pad.first_rank : pad.first_rank + pad.ranks, pad.start : pad.start + pad.numel]
                for pad in p.layout.padding
            ]
            p.unsharded_grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)
        before, _ = self._divisors(region.dtype)
        if before != 1:
            first = region.starts[0]
            chunks[:, first:].div_(before)

    def _divisors(self, dtype: torch.dtype) -> tuple[float, float]:
        """What to divide by before and after adding up; fp16 in two steps, since its sum would overflow."""
        factor = self.gradient_divide_factor
        if factor is None:
            factor = float(self.dp_mesh.shard_world_size * self.dp_mesh.replicate_world_size)
        if dtype != torch.float16:
            return 1.0, factor
        before = 1.0
        while before * before < factor:
            before *= 2.0
        return before, factor / before

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add up what the ranks sent and hand each parameter the gradient of its actual shard."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        if reduction.work is not None:
            reduction.work.wait()
        self._check_exchanged(reduction)
        sums = [region.view(reduction.received).sum(dim=0, dtype=region.dtype) for region in reduction.regions]
        if self.dp_mesh.replicate_group is not None and not self._all_reduce(sums, reduction):
            return
        used = self._used_anywhere(reduction, sums[0])
        for region, total in zip(reduction.regions, sums, strict=True):
            self.reduce_scatter_grad(region, total, used)

    def _check_exchanged(self, reduction: _Reduction) -> None:
        codes = reduction.regions[0].view(reduction.received)[:, :CODE_LENGTH].tolist()
        units = [decode(code) for code in codes]
        others = {rank: unit for rank, unit in enumerate(units) if unit != self.unit}
        if others:
            raise RuntimeError(describe_mismatch("gradient reduction", self.unit, self.unit_names, others))

    def _all_reduce(self, sums: list[torch.Tensor], reduction: _Reduction) -> bool:
        """Add up over the replicas; ``False`` while that waits for a later backward."""
        params = [p for region in reduction.regions for p in region.params]
        partial, self._partial = self._partial, None
        if partial is not None:
            if partial.params != params:
                raise RuntimeError(
                    f"unit '{self.unit_names[self.unit]}': parameters were frozen or unfrozen while gradients wait for "
                    "their all-reduce. Do so after a backward with set_requires_all_reduce(True)"
                )
            torch._foreach_add_(sums, partial.sums)
        if not reduction.all_reduce:
            self._partial = _Partial(params, sums)
            return False
        group = self.dp_mesh.replicate_group
        assert group is not None
        # Earlier backwards left their codes in the sum, so it starts anew for this one.
        sums[0][:CODE_LENGTH] = torch.tensor(encode(self.unit), dtype=sums[0].dtype)
        for total in sums:
            all_reduce_sum(total, group)
        if not code_agrees(sums[0][:CODE_LENGTH].tolist(), self.unit, self.dp_mesh.replicate_world_size):
            raise RuntimeError(
                f"all-reduce of unit '{self.unit_names[self.unit]}': another replica reduces another unit. All ranks "
                "must run the same units in the same order"
            )
        return True

    def _used_anywhere(self, reduction: _Reduction, total: torch.Tensor) -> set[HSDPParamV2]:
        """The parameters that some rank had a gradient for. One that no rank used has none, as without sharding."""
        params = [p for region in reduction.regions for p in region.params]
        flags: Sequence[float] = [1.0] * len(params)
        if not all(reduction.used):
            flags = total[CODE_LENGTH : CODE_LENGTH + len(params)].tolist()
        return {p for p, flag in zip(params, flags, strict=True) if flag > 0}

    def reduce_scatter_grad(self, region: _Region, total: torch.Tensor, used: set[HSDPParamV2]) -> None:
        """Give each used parameter its part of the reduced region; padding stays behind."""
        _, after = self._divisors(region.dtype)
        if after != 1:
            total[region.starts[0] :].div_(after)
        for p, start in zip(region.params, region.starts, strict=True):
            if p in used:
                size = p.sharded_size
                p.accumulate_sharded_grad(total[start : start + size.numel()].view(size))
