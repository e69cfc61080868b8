"""bfloat16 with everything else that people switch on: equal, to the bit, to the same arithmetic without sharding.

The reference trains on every rank without `fully_shard`: a bfloat16 copy of float32 weights (of tensor parallelism's
shards, where there is any) computes the gradients of the rank's own part of the batch, and these are added up over the
data-parallel ranks by hand, in rank order. Nothing differs then but where the values lie, so nothing is tolerated.
Against a whole bfloat16 model, tensor parallelism rounds each rank's term of a sum: that is not what is tested here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

import test_sequence_parallel as sequence
import test_tensor_parallel as tensor_parallel
from harness import run_distributed
from raggedshard.torch import DeviceMesh, FSDPModule, MixedPrecisionPolicy, fully_shard, init_device_mesh
from training import GLOBAL_BATCH, full, own_part

STEPS = 10
NAMES = {1: ("shard",), 2: ("replicate", "shard")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Three blocks of 7 and 5 rows."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = cast(Any, checkpoint(block, x, use_reentrant=False)) if self.recompute else block(x)
        return x


def prefetching(model: Any) -> None:
    first, second, third = model.blocks
    model.set_forward_prefetch_modules([first])
    first.set_forward_prefetch_modules([second, third])
    third.set_backward_prefetch_modules([first, second])


def deferred(model: Any) -> None:
    """To the meta device and back, with the values that were there."""
    values = {name: param.full_tensor() for name, param in model.named_parameters()}
    model.to_empty(device="cpu")
    model.load_state_dict(values)


@dataclass(frozen=True)
class Case:
    """How a model is built, cut by tensor parallelism and treated afterwards; the ranks of each mesh dim."""

    build: Callable[[], nn.Module]
    dp: tuple[int, ...]
    tp: int = 1
    parallelize: Callable[[Any, DeviceMesh], None] | None = None
    units: Callable[[Any], Any] = lambda model: model.blocks
    prepare: Callable[[Any], None] | None = None


CASES = {
    "HSDP": Case(Blocks, (2, 2)),
    "prefetch": Case(Blocks, (3,), prepare=prefetching),
    "recompute": Case(lambda: Blocks(recompute=True), (3,)),
    "recompute, HSDP": Case(lambda: Blocks(recompute=True), (2, 2)),
    "values that were loaded after to_empty": Case(Blocks, (4,), prepare=deferred),
    "TP": Case(
        lambda: tensor_parallel.TwoLayers(7), (2,), 2, tensor_parallel.parallelize, units=lambda model: [model.up]
    ),
    "TP, three shards": Case(
        lambda: tensor_parallel.TwoLayers(7), (3,), 2, tensor_parallel.parallelize, units=lambda model: [model.up]
    ),
    "TP, HSDP": Case(
        lambda: tensor_parallel.TwoLayers(7), (2, 2), 2, tensor_parallel.parallelize, units=lambda model: [model.up]
    ),
    "SP and loss parallel": Case(
        sequence.SequenceModel, (2,), 2, sequence.parallelize, units=lambda model: model.mixers
    ),
    "SP and loss parallel, HSDP": Case(
        sequence.SequenceModel, (2, 2), 2, sequence.parallelize, units=lambda model: model.mixers
    ),
}


def backward(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss, after its backward, which loss parallelism wants to be in its context too."""
    if isinstance(batch, tuple):
        with loss_parallel():
            loss = sequence.cross_entropy(model, *batch)
            loss.backward()
    else:
        loss = model(batch.bfloat16()).float().square().mean()
        loss.backward()
    return loss.detach()


def batches_of(model: nn.Module) -> list[Any]:
    if isinstance(model, sequence.SequenceModel):
        return list(sequence.token_batches(STEPS))
    generator = torch.Generator().manual_seed(1)
    features = 8 if isinstance(model, tensor_parallel.TwoLayers) else 5
    return [torch.randn(GLOBAL_BATCH, features, generator=generator) for _ in range(STEPS)]


def part_of(batch: Any, part: int, parts: int) -> Any:
    return tuple(own_part(t, part, parts) for t in batch) if isinstance(batch, tuple) else own_part(batch, part, parts)


def mean_over(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The mean over data-parallel ranks: sums over the shard ranks in rank order, then over the replicas."""
    for mesh_dim in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(local) for _ in range(mesh.size(mesh_dim))]
        dist.all_gather(parts, local.contiguous(), group=mesh.get_group(mesh_dim))
        local = torch.stack(parts).sum(0)
    return local / mesh.size()


def low_precision_step(reference: nn.Module, batch: Any, mesh: DeviceMesh, reduce_dtype: torch.dtype) -> torch.Tensor:
    """Leave the gradients of a bfloat16 copy, averaged over ``mesh``, in the float32 reference; the rank's own loss."""
    low = copy.deepcopy(reference).to(torch.bfloat16)
    loss = backward(low, batch)
    for p, low_p in zip(reference.parameters(), low.parameters(), strict=True):
        grad = low_p.grad
        assert grad is not None
        if isinstance(p, DTensor):
            local = cast(DTensor, grad).redistribute(p.device_mesh, p.placements).to_local()
            mean = mean_over(local.to(reduce_dtype), mesh).float()
            p.grad = DTensor.from_local(
                mean, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        else:
            p.grad = mean_over(grad.to(reduce_dtype), mesh).float()
    return loss


def train(rank: int, world_size: int, case_name: str, reduce_dtype: torch.dtype | None) -> None:
    case = CASES[case_name]
    names = (*NAMES[len(case.dp)], "tp")
    mesh = init_device_mesh("cpu", (*case.dp, case.tp), mesh_dim_names=names)
    dp_mesh = mesh[names[:-1]]
    torch.manual_seed(0)
    reference = case.build()
    if case.parallelize is not None:
        case.parallelize(reference, mesh["tp"])
    model = shard(case, copy.deepcopy(reference), dp_mesh, reduce_dtype)
    own, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, reference))
    losses = []
    for batch in batches_of(reference):
        part = part_of(batch, rank // case.tp, world_size // case.tp)
        expected = low_precision_step(reference, part, dp_mesh, reduce_dtype or torch.bfloat16)
        loss = backward(model, part)
        assert torch.equal(full(loss), full(expected))
        check_equal(model, reference, lambda p: p.grad)
        for optimizer in (own, theirs):
            optimizer.step()
            optimizer.zero_grad()
        check_equal(model, reference, lambda p: p.detach())
        losses.append(full(loss).item())
    assert losses[-1] < losses[0] or isinstance(reference, sequence.SequenceModel)


def shard(case: Case, model: nn.Module, dp_mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> FSDPModule:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for unit in case.units(model):
        fully_shard(unit, mesh=dp_mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    if case.prepare is not None:
        case.prepare(sharded)
    return sharded


def check_equal(model: nn.Module, reference: nn.Module, value_of: Callable[[Any], Any]) -> None:
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        value = value_of(p)
        assert value.dtype == torch.float32
        assert value.placements == cast(DTensor, p).placements, name
        assert torch.equal(value.full_tensor(), full(value_of(expected[name]))), name


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_equals_the_same_arithmetic_without_sharding(case, reduce_dtype):
    world_size = torch.Size((*CASES[case].dp, CASES[case].tp)).numel()
    run_distributed(train, world_size, case, reduce_dtype, timeout=120)
