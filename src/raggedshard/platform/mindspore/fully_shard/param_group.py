"""The parameters of one unit and their fused communication.

    all-gather     a chunk per rank:  | shard of p0 | shard of p1 | ...                       one chunk a dtype
    reduction      a chunk per rank:  | used flags | gradient of p0 for that rank | ...       one chunk a dtype

Shards and gradients take their padded sizes in a chunk, so that all ranks' chunks are alike; padding is zero in both
and read by neither end. Before each collective the ranks compare what they are about to do (`_agree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from raggedshard.fully_shard.data_parallel import DataParallelRoles
from raggedshard.fully_shard.identity import describe_mismatch
from raggedshard.fully_shard.layout import FusedLayout
from raggedshard.fully_shard.reduction import Region, divisors, plan_regions
from raggedshard.platform.mindspore.collectives import Group, agree, all_gather, all_reduce, reduce_scatter
from raggedshard.platform.mindspore.fully_shard.param import HSDPParamV2
from raggedshard.platform.mindspore.private import no_grad

__all__ = ["HSDPParamGroup"]

_ACTIONS = ("all-gather", "gradient reduction", "gradient reduction over replicas")


class _Reduction(NamedTuple):
    """A reduction under way: the sums over the shard ranks of each region's chunk."""

    regions: list[Region[HSDPParamV2]]
    all_used: bool
    all_reduce: bool
    sums: list[Tensor]


class _Partial(NamedTuple):
    """HSDP: sums over the shard dim whose all-reduce waits for a later backward."""

    params: list[HSDPParamV2]
    sums: list[Tensor]


class HSDPParamGroup:
    """The parameters of one unit.

    Args:
        params: in an order that is the same on every rank.
        roles: the mesh that shards (and replicates) them.
    """

    def __init__(self, params: list[HSDPParamV2], roles: DataParallelRoles) -> None:
        self.params = params
        self.roles = roles
        self.unit = 0
        self.unit_names: Sequence[str] = ("",)
        self.gradient_divide_factor: float | None = None
        self.accumulate_in_reduce_dtype = True
        self.post_forward_group: Group | None = None
        self.is_unsharded = False
        self.is_ahead = False
        self._chunks: list[list[Tensor]] | None = None
        self._kept: list[Tensor] | None = None
        self._reduction: _Reduction | None = None
        self._partial: _Partial | None = None

    def _agree(self, action: int, numel: int, group: Group) -> None:
        """Make sure that the whole group is about to do the same; MCCL would mix up what is sent.

        Raises:
            RuntimeError: it is not.
        """
        own = (action, self.unit, numel)
        others = {rank: said for rank, said in enumerate(agree(own, group)) if said != own}
        if not others:
            return
        same_action = all(said[0] == action for said in others.values())
        doing = _ACTIONS[action] if same_action else f"{_ACTIONS[action]} here and another collective elsewhere"
        raise RuntimeError(
            describe_mismatch(doing, self.unit, self.unit_names, {rank: said[1] for rank, said in others.items()})
        )

    # ---- unsharding

    @property
    def is_stale(self) -> bool:
        """Whether the sharded parameters may have been written to since they were gathered.

        MindSpore's optimizers leave no trace (a tensor's version does not count their writes), so only what was
        gathered ahead for the very next forward is known to be fresh.
        """
        gathered = self.is_unsharded or self._chunks is not None or self._kept is not None
        return gathered and not self.is_ahead

    def _by_dtype(self) -> list[list[HSDPParamV2]]:
        ordered = sorted(self.params, key=lambda p: str(p.param_dtype))
        return [list(members) for _, members in groupby(ordered, key=lambda p: str(p.param_dtype))]

    @no_grad()
    def unshard(self, async_op: bool = False) -> None:
        """Start the all-gather; `wait_for_unshard` finishes it. Nothing happens if it is done or under way."""
        if self.is_unsharded or self._chunks is not None:
            return
        if self._kept is not None:
            self._chunks = self._gather_kept(self._kept)
            return
        for p in self.params:
            p.reset_sharded_param()
        group = self.roles.shard_group
        self._agree(0, sum(p.layout.padded_numel for p in self.params), group)
        self._chunks = []
        for members in self._by_dtype():
            inputs = [data.astype(p.param_dtype) for p in members for data in p.all_gather_inputs]
            self._chunks.append(all_gather(ops.cat(inputs), group))

    @no_grad()
    def wait_for_unshard(self) -> None:
        """Finish the all-gather: the cells compute with the unsharded parameters afterwards."""
        chunks, self._chunks = self._chunks, None
        if chunks is None:
            return
        for members, parts in zip(self._by_dtype(), chunks, strict=True):
            layout = FusedLayout.pack([(p.layout.padded_numel, 1) for p in members])
            for p, start in zip(members, layout.offsets, strict=True):
                p.fill_unsharded([part[start : start + p.layout.padded_numel] for part in parts])
        if self.post_forward_group is not None and self._kept is None:
            rows = self.roles.shard_world_size // self.post_forward_group.size
            first = self.post_forward_group.rank * rows
            self._kept = [ops.cat(parts[first : first + rows]) for parts in chunks]
        for p in self.params:
            p.to_unsharded(p.new_unsharded_alias())
        self.is_unsharded = True

    def _gather_kept(self, kept: list[Tensor]) -> list[list[Tensor]]:
        """With ``reshard_after_forward=n``: backward's smaller all-gather of what each rank kept."""
        group = self.post_forward_group
        assert group is not None
        self._agree(0, sum(tensor.size for tensor in kept), group)
        rows = self.roles.shard_world_size // group.size
        return [
            [part for several in all_gather(tensor, group) for part in ops.split(several, tensor.size // rows)]
            for tensor in kept
        ]

    def reshard(self, after_forward: bool = False) -> None:
        """Free the unsharded parameters and put the sharded ones back.

        Args:
            after_forward: backward will gather again, so keep what ``reshard_after_forward=n`` holds for it.
        """
        self._chunks = None
        self.is_ahead = False
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
        """Whether gradients wait for their reduction."""
        return any(p.unsharded_grad is not None for p in self.params)

    @property
    def has_partial_reduction(self) -> bool:
        """Whether gradients of earlier backwards wait for their all-reduce."""
        return self._partial is not None

    @property
    def overlaps_reduction(self) -> bool:
        """Whether a reduction stays under way while the next unit's backward runs. Autograd takes it at once."""
        return False

    def abandon_backward(self) -> None:
        """Drop what a backward that raised left behind."""
        self._reduction = None
        for p in self.params:
            p.drop_grads()

    @no_grad()
    def receive(self, params: Sequence[HSDPParamV2], grads: Sequence[Any]) -> None:
        """Take the gradients of one use's unsharded parameters; ``None`` where the loss does not depend on them."""
        for p, grad in zip(params, grads, strict=True):
            if grad is not None:
                p.add_unsharded_grad(grad, p.reduce_dtype if self.accumulate_in_reduce_dtype else None)

    def take_unsharded_grads(self) -> None:
        """Nothing to do: autograd hands gradients to `receive`."""

    @no_grad()
    def start_reduce(self, all_reduce: bool) -> None:
        """Reduce the waiting gradients over the shard ranks; `finish_reduce` hands them out.

        Parameters without a gradient take part with zeros, so the exchange is the same on ranks that used others.
        """
        regions = plan_regions(self.trainable)
        params = [p for region in regions for p in region.params]
        used = [p.unsharded_grad is not None for p in params]
        group = self.roles.shard_group
        self._agree(1, sum(region.numel for region in regions), group)
        sums = []
        for index, region in enumerate(regions):
            front = Tensor(np.array(used, np.float32), region.dtype) if index == 0 else None
            sums.append(reduce_scatter(self.reduce_scatter_copy_in(region, front), group))
        for p in params:
            p.unsharded_grad = None
        self._reduction = _Reduction(regions, all(used), all_reduce, sums)

    def reduce_scatter_copy_in(self, region: Region[HSDPParamV2], front: Tensor | None) -> Tensor:
        """The fused input: gradients and zeros are written once, straight into their places.

        Args:
            front: what stands in front of each rank's chunk.

        Returns:
            1-D, one chunk of ``region.numel`` elements per shard rank.
        """
        pieces = [p.gradient_pieces() for p in region.params]
        ordered: list[Tensor] = []
        for rank in range(self.roles.shard_world_size):
            ordered += [front] if front is not None else []
            ordered += [piece for of_param in pieces for piece in of_param[rank]]
        fused = ops.cat(ordered)
        before, _ = self._divisors(region)
        return fused if before == 1 else fused / before

    def _divisors(self, region: Region[HSDPParamV2]) -> tuple[float, float]:
        ranks = self.roles.shard_world_size * self.roles.replicate_world_size
        return divisors(self.gradient_divide_factor, ranks, region.dtype == ms.float16)

    @no_grad()
    def finish_reduce(self) -> None:
        """Reduce over the replicas and give each used parameter the gradient of its actual shard."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        sums = reduction.sums
        if self.roles.replicate_group is not None:
            reduced = self._all_reduce(reduction)
            if reduced is None:
                return
            sums = reduced
        used = self._used_anywhere(reduction, sums[0])
        for region, total in zip(reduction.regions, sums, strict=True):
            self.reduce_scatter_grad(region, total, used)

    def _all_reduce(self, reduction: _Reduction) -> list[Tensor] | None:
        """Add up over the replicas; ``None`` while that waits for a later backward."""
        params = [p for region in reduction.regions for p in region.params]
        sums = reduction.sums
        partial, self._partial = self._partial, None
        if partial is not None:
            if partial.params != params:
                raise RuntimeError(
                    f"unit '{self.unit_names[self.unit]}': parameters were frozen or unfrozen while gradients wait for "
                    "their all-reduce. Do so after a backward with set_requires_all_reduce(True)"
                )
            sums = [total + earlier for total, earlier in zip(sums, partial.sums, strict=True)]
        if not reduction.all_reduce:
            self._partial = _Partial(params, sums)
            return None
        group = self.roles.replicate_group
        self._agree(2, sum(total.size for total in sums), group)
        return [all_reduce(total, group) for total in sums]

    def _used_anywhere(self, reduction: _Reduction, total: Tensor) -> set[HSDPParamV2]:
        """The parameters that some rank had a gradient for. One that no rank used has none, as without sharding."""
        params = [p for region in reduction.regions for p in region.params]
        if reduction.all_used:
            return set(params)
        flags = total[: len(params)].astype(ms.float32).asnumpy()
        return {p for p, flag in zip(params, flags, strict=True) if flag > 0}

    def reduce_scatter_grad(self, region: Region[HSDPParamV2], total: Tensor, used: set[HSDPParamV2]) -> None:
        """Give each used parameter its part of the reduced region; padding stays behind."""
        _, after = self._divisors(region)
        if after != 1:
            total = total / after
        for p, start in zip(region.params, region.starts, strict=True):
            if p in used:
                p.put_sharded_grad(total[start : start + int(np.prod(p.sharded_size, dtype=np.int64))])
