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
from mindspore import Tensor, mint, ops

from raggedshard.fully_shard.data_parallel import DataParallelRoles
from raggedshard.fully_shard.param_group import ParamGroup
from raggedshard.fully_shard.reduction import Region, params_of, plan_regions, used_anywhere
from raggedshard.platform.mindspore.collectives import (
    Group,
    agree,
    all_gather,
    all_reduce,
    group_of,
    reduce_scatter,
)
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


class HSDPParamGroup(ParamGroup[HSDPParamV2, DataParallelRoles]):
    """`ParamGroup` in MindSpore's tensors and collectives.

    Attributes:
        is_ahead: gathered for the very next forward, by a prefetch.
    """

    def __init__(self, params: list[HSDPParamV2], dp_mesh: DataParallelRoles) -> None:
        super().__init__(params, dp_mesh)
        self.is_ahead = False
        self._chunks: list[list[Tensor]] | None = None
        self._kept: list[Tensor] | None = None
        self._reduction: _Reduction | None = None

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
        raise self.mismatch(doing, {rank: said[1] for rank, said in others.items()})

    # ---- unsharding

    @property
    def is_stale(self) -> bool:
        # MindSpore's optimizers leave no trace (a tensor's version does not count their writes), so only what was
        # gathered ahead for the very next forward is known to be fresh.
        gathered = self.is_unsharded or self._chunks is not None or self._kept is not None
        return gathered and not self.is_ahead

    def _by_dtype(self) -> list[list[HSDPParamV2]]:
        ordered = sorted(self.params, key=lambda p: str(p.param_dtype))
        return [list(members) for _, members in groupby(ordered, key=lambda p: str(p.param_dtype))]

    @no_grad()
    def unshard(self, async_op: bool = False) -> None:
        if self.is_unsharded or self._chunks is not None:
            return
        if self._kept is not None:
            self._chunks = self._gather_kept(self._kept)
            return
        for p in self.params:
            p.reset_sharded_param()
        group = self.dp_mesh.shard_group
        self._agree(0, sum(p.layout.padded_numel for p in self.params), group)
        self._chunks = []
        for members in self._by_dtype():
            inputs = [data.astype(p.param_dtype) for p in members for data in p.all_gather_inputs]
            self._chunks.append(all_gather(ops.cat(inputs), group))

    @no_grad()
    def wait_for_unshard(self) -> None:
        chunks, self._chunks = self._chunks, None
        if chunks is None:
            return
        for members, parts in zip(self._by_dtype(), chunks, strict=True):
            sizes = [p.layout.padded_numel for p in members]
            of_params = zip(*(mint.split(part, sizes) for part in parts), strict=True)
            for p, chunks_of_param in zip(members, of_params, strict=True):
                p.fill_unsharded(chunks_of_param)
        if self.post_forward_group is not None and self._kept is None:
            rows = self.dp_mesh.shard_world_size // self.post_forward_group.size
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
        rows = self.dp_mesh.shard_world_size // group.size
        return [
            [part for several in all_gather(tensor, group) for part in ops.split(several, tensor.size // rows)]
            for tensor in kept
        ]

    def _drop_gathered(self, after_forward: bool) -> None:
        self._chunks = None
        self.is_ahead = False
        if not after_forward:
            self._kept = None

    def subgroup(self, size: int) -> Group:
        return group_of(self.dp_mesh.shard_group.ranks[self.dp_mesh.neighbours(size)])

    # ---- gradients

    @property
    def has_unsharded_grads(self) -> bool:
        return any(p.unsharded_grad is not None for p in self.params)

    @property
    def overlaps_reduction(self) -> bool:
        return False  # autograd takes the gradients at once

    def abandon_backward(self) -> None:
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
        regions = plan_regions(self.trainable)
        params = params_of(regions)
        used = [p.unsharded_grad is not None for p in params]
        group = self.dp_mesh.shard_group
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
        for rank in range(self.dp_mesh.shard_world_size):
            ordered += [front] if front is not None else []
            ordered += [piece for of_param in pieces for piece in of_param[rank]]
        fused = ops.cat(ordered)
        before, _ = self.divisors(region.dtype == ms.float16)
        return fused if before == 1 else fused / before

    @no_grad()
    def finish_reduce(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        sums = reduction.sums
        if self.dp_mesh.replicate_group is not None:
            reduced = self._all_reduce(reduction)
            if reduced is None:
                return
            sums = reduced
        used = self._used_anywhere(reduction, sums[0])
        for region, total in zip(reduction.regions, sums, strict=True):
            self.reduce_scatter_grad(region, total, used)

    def _all_reduce(self, reduction: _Reduction) -> list[Tensor] | None:
        """Add up over the replicas; ``None`` while that waits for a later backward."""
        params = params_of(reduction.regions)
        sums = reduction.sums
        earlier = self.take_partial_sums(params)
        if earlier is not None:
            sums = [total + kept for total, kept in zip(sums, earlier, strict=True)]
        if not reduction.all_reduce:
            self.keep_partial_sums(params, sums)
            return None
        group = self.dp_mesh.replicate_group
        self._agree(2, sum(total.size for total in sums), group)
        return [all_reduce(total, group) for total in sums]

    def _used_anywhere(self, reduction: _Reduction, total: Tensor) -> set[HSDPParamV2]:
        params = params_of(reduction.regions)
        if reduction.all_used:
            return set(params)
        return used_anywhere(params, total[: len(params)].astype(ms.float32).asnumpy().tolist())

    def reduce_scatter_grad(self, region: Region[HSDPParamV2], total: Tensor, used: set[HSDPParamV2]) -> None:
        """Give each used parameter its part of the reduced region; padding stays behind."""
        _, after = self.divisors(region.dtype == ms.float16)
        if after != 1:
            total = total / after
        for p, start in zip(region.params, region.starts, strict=True):
            if p in used:
                p.put_sharded_grad(total[start : start + int(np.prod(p.sharded_size, dtype=np.int64))])
