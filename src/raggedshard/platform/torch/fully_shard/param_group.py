"""The parameters of one unit and the fused reduction of their gradients.

    a chunk per rank:  | unit number, used flags, gradient of p0 for that rank (padded), ... |   one region per dtype

Padding is zero in every chunk and read by neither end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from raggedshard.fully_shard.identity import DIGITS, decode, encode
from raggedshard.fully_shard.layout import FusedLayout
from raggedshard.fully_shard.reduction import Region, params_of, plan_regions, used_anywhere
from raggedshard.platform.torch.fully_shard.collectives import all_reduce_sum, exchange_chunks
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh, subgroup
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2
from raggedshard.platform.torch.fully_shard.unsharding import UnshardingGroup
from raggedshard.platform.torch.fully_shard.views import chunk_views, padding_views

__all__ = ["HSDPParamGroup"]


@dataclass(frozen=True)
class _Region:
    """A region of the fused buffer and where it lies in a chunk, in bytes."""

    plan: Region[HSDPParamV2]
    first_byte: int

    def view(self, chunks: torch.Tensor) -> torch.Tensor:
        """``(ranks, numel)`` elements of this region in a byte buffer."""
        stop = self.first_byte + self.plan.numel * self.plan.dtype.itemsize
        return chunks[:, self.first_byte : stop].view(self.plan.dtype)


@dataclass
class _Reduction:
    """A reduction under way."""

    regions: list[_Region]
    used: list[bool]
    all_reduce: bool
    received: torch.Tensor
    work: dist.Work | None
    sent: torch.Tensor = field(repr=False)


class HSDPParamGroup(UnshardingGroup):
    """`UnshardingGroup` and its gradients."""

    def __init__(self, params: list[HSDPParamV2], dp_mesh: DataParallelMesh) -> None:
        super().__init__(params, dp_mesh)
        self._reduction: _Reduction | None = None

    @property
    def has_unsharded_grads(self) -> bool:
        # Those that autograd left and nobody has taken, and taken ones that were not reduced.
        return any(
            p.unsharded_grad is not None or (p._unsharded_param is not None and p._unsharded_param.grad is not None)
            for p in self.params
        )

    @property
    def overlaps_reduction(self) -> bool:
        return self.dp_mesh.device.type != "cpu"

    def abandon_backward(self) -> None:
        for p in self.params:
            p.drop_unsharded_grad()
        reduction, self._reduction = self._reduction, None
        if reduction is not None and reduction.work is not None:
            reduction.work.wait()

    def subgroup(self, size: int) -> dist.ProcessGroup:
        return subgroup(self.dp_mesh, size)

    @torch.no_grad()
    def take_unsharded_grads(self) -> None:
        for p in self.params:
            p.take_unsharded_grad(p.reduce_dtype if self.accumulate_in_reduce_dtype else None)

    def _plan_chunk(self) -> tuple[list[_Region], int]:
        """The regions of a chunk and its bytes; the first one starts with the unit's number and the used flags."""
        planned = plan_regions(self.trainable, front=self._number_length)
        packed = FusedLayout.pack(tuple((region.numel, region.dtype.itemsize) for region in planned))
        regions = [_Region(region, first) for region, first in zip(planned, packed.offsets, strict=True)]
        return regions, packed.chunk_bytes

    @torch.no_grad()
    def start_reduce(self, all_reduce: bool) -> None:
        regions, chunk_bytes = self._plan_chunk()
        size = self.dp_mesh.shard_world_size
        chunks = torch.empty((size, chunk_bytes), dtype=torch.uint8, device=self.dp_mesh.device)
        params = params_of(region.plan for region in regions)
        used = [p.unsharded_grad is not None for p in params]
        front = torch.tensor([*self._number(), *map(float, used)], dtype=regions[0].plan.dtype)
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
        for p, start in zip(region.plan.params, region.plan.starts, strict=True):
            part = chunks[:, start : start + p.layout.padded_numel]
            if p.unsharded_grad is None:
                zeros.append(part)
                continue
            targets += chunk_views(part, p.layout)
            sources += p.gradient_views()
            zeros += padding_views(part, p.layout)
            p.unsharded_grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
        if zeros:
            torch._foreach_zero_(zeros)
        before, _ = self.divisors(region.plan.dtype == torch.float16)
        if before != 1:
            first = region.plan.starts[0]
            chunks[:, first:].div_(before)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        if reduction.work is not None:
            reduction.work.wait()
        self._check_exchanged(reduction)
        sums = [region.view(reduction.received).sum(dim=0, dtype=region.plan.dtype) for region in reduction.regions]
        if self.dp_mesh.replicate_group is not None and not self._all_reduce(sums, reduction):
            return
        used = self._used_anywhere(reduction, sums[0])
        for region, total in zip(reduction.regions, sums, strict=True):
            self.reduce_scatter_grad(region, total, used)

    @property
    def _number_length(self) -> int:
        return DIGITS * self.dp_mesh.replicate_world_size

    def _number(self) -> list[float]:
        """The unit's number in this replica's slot."""
        slots = [0.0] * self._number_length
        first = DIGITS * self.dp_mesh.replicate_rank
        slots[first : first + DIGITS] = encode(self.unit)
        return slots

    def _check_units(self, action: str, numbers: torch.Tensor) -> None:
        """``numbers``, ``(ranks, DIGITS)``, must all be this unit's."""
        others = {rank: unit for rank, unit in enumerate(map(decode, numbers.tolist())) if unit != self.unit}
        if others:
            raise self.mismatch(action, others)

    def _check_exchanged(self, reduction: _Reduction) -> None:
        first = DIGITS * self.dp_mesh.replicate_rank
        received = reduction.regions[0].view(reduction.received)
        self._check_units("gradient reduction", received[:, first : first + DIGITS])

    def _all_reduce(self, sums: list[torch.Tensor], reduction: _Reduction) -> bool:
        """Add up over the replicas; ``False`` while that waits for a later backward."""
        params = params_of(region.plan for region in reduction.regions)
        earlier = self.take_partial_sums(params)
        if earlier is not None:
            torch._foreach_add_(sums, earlier)
        if not reduction.all_reduce:
            self.keep_partial_sums(params, sums)
            return False
        group = self.dp_mesh.replicate_group
        assert group is not None
        # Adding up over shard ranks and earlier backwards has multiplied the number, so it starts anew.
        sums[0][: self._number_length] = torch.tensor(self._number(), dtype=sums[0].dtype)
        for total in sums:
            all_reduce_sum(total, group)
        self._check_units("all-reduce", sums[0][: self._number_length].view(-1, DIGITS))
        return True

    def _used_anywhere(self, reduction: _Reduction, total: torch.Tensor) -> set[HSDPParamV2]:
        params = params_of(region.plan for region in reduction.regions)
        if all(reduction.used):
            return set(params)
        flags = total[self._number_length : self._number_length + len(params)]
        return used_anywhere(params, flags.real.tolist())

    def reduce_scatter_grad(self, region: _Region, total: torch.Tensor, used: set[HSDPParamV2]) -> None:
        """Give each used parameter its part of the reduced region; padding stays behind."""
        _, after = self.divisors(region.plan.dtype == torch.float16)
        if after != 1:
            total[region.plan.starts[0] :].div_(after)
        for p, start in zip(region.plan.params, region.plan.starts, strict=True):
            if p in used:
                size = p.sharded_size
                p.accumulate_sharded_grad(total[start : start + size.numel()].view(size))
