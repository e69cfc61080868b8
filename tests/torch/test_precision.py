"""Mixed precision, offload and casts: equal to the same arithmetic done by hand on an unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from harness import run_distributed, world_sizes
from raggedshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from training import OddMLP, assert_same_parameters, dtensors, float_batches, mesh_of, shard_odd_mlp, train_beside


def low_precision_gradients(
    reference: nn.Module, batch: torch.Tensor, ranks: int, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> tuple[list[torch.Tensor], float]:
    """Each rank's gradients of a low-precision copy, added up in rank order in ``reduce_dtype``, and the mean loss.

    The addition accumulates in float32 and is rounded once, as a local sum does.
    """
    per_rank, losses = [], []
    for part in batch.chunk(ranks):
        low = copy.deepcopy(reference).to(param_dtype)
        loss = low(part.to(param_dtype)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        per_rank.append([p.grad.to(reduce_dtype) for p in low.parameters() if p.grad is not None])
    gradients = []
    for parts in zip(*per_rank, strict=True):
        total = torch.stack(parts).sum(0)
        if reduce_dtype == torch.float16:  # halved before the sum as often as keeps it in range
            before = next(b for b in (1, 2, 4, 8) if b * b >= ranks)
            total = torch.stack([part / before for part in parts]).sum(0) / (ranks / before)
        else:
            total = total / ranks
        gradients.append(total.float())
    return gradients, sum(losses) / ranks


def train_in_low_precision(rank, world_size, param_dtype, reduce_dtype, policy_class):
    torch.manual_seed(0)
    reference = OddMLP()
    inner = policy_class(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    outer = policy_class(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32)
    module, mesh = copy.deepcopy(reference), mesh_of(world_size)
    fully_shard(module.up, mesh=mesh, mp_policy=inner)
    fully_shard(module.even, mesh=mesh, mp_policy=inner)
    model = fully_shard(module, mesh=mesh, mp_policy=outer)
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for batch in float_batches(10, torch.float32):
        gradients, expected = low_precision_gradients(
            reference, batch, world_size, param_dtype, reduce_dtype or param_dtype
        )
        output = model(batch.chunk(world_size)[rank])
        assert output.dtype == torch.float32
        loss = output.square().mean()
        loss.backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        # float32 losses of the same low-precision outputs: rounding of float32 means only
        torch.testing.assert_close(mean.item() / world_size, expected, rtol=1e-6, atol=1e-7)
        for (name, p), gradient in zip(dtensors(model).items(), gradients, strict=True):
            assert p.dtype == torch.float32
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
            # the same low-precision values added in the same order: nothing is left to tolerate
            torch.testing.assert_close(p.grad.full_tensor(), gradient, rtol=0, atol=0, msg=name)  # pyright: ignore
        for p, gradient in zip(reference.parameters(), gradients, strict=True):
            p.grad = gradient
        own.step()
        theirs.step()
        own.zero_grad()
        assert_same_parameters(model, reference, 1e-6, 1e-7)


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, None), (torch.float16, torch.float32)],
    ids=str,
)
def test_low_precision_equals_the_same_arithmetic_unsharded(world_size, param_dtype, reduce_dtype):
    run_distributed(train_in_low_precision, world_size, param_dtype, reduce_dtype, MixedPrecisionPolicy)


def test_torchs_own_policy_is_accepted():
    run_distributed(train_in_low_precision, 3, torch.bfloat16, torch.float32, TorchPolicy)


class Recorder(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 7))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = [x.dtype, scale.dtype, index.dtype, self.weight.dtype]
        return {"out": (x.to(self.weight.dtype) @ self.weight) * scale.to(self.weight.dtype), "index": index}


def record_dtypes(rank, world_size, cast_inputs):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=cast_inputs
    )
    model = fully_shard(Recorder(), mesh=mesh_of(world_size), mp_policy=policy)
    output = model(torch.ones(2, 7), scale=torch.tensor(2.0), index=torch.tensor([1]))
    return model.seen, {name: value.dtype for name, value in output.items()}


@pytest.mark.parametrize(("cast_inputs", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_floating_inputs_and_outputs_are_cast(cast_inputs, expected):
    for seen, outputs in run_distributed(record_dtypes, 2, cast_inputs):
        assert seen == [expected, expected, torch.int64, torch.bfloat16]
        assert outputs == {"out": torch.float64, "index": torch.int64}


def accumulate_in_reduce_dtype(rank, world_size):
    """Two backwards whose sum bf16 cannot hold: 256 + 1."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = nn.Linear(1, 3, bias=False)
    model = fully_shard(module, mesh=mesh_of(world_size), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 256.0)).sum().backward()
    assert model.weight.grad is None
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    return model.weight.grad.full_tensor().flatten().tolist()  # pyright: ignore


@world_sizes(1, 2)
def test_unsynchronised_gradients_add_up_in_the_reduce_dtype(world_size):
    assert run_distributed(accumulate_in_reduce_dtype, world_size) == [[257.0] * 3] * world_size


def train_offloaded(rank, world_size, replicas):
    torch.manual_seed(0)
    reference = OddMLP().double()
    model = shard_odd_mlp(
        copy.deepcopy(reference), mesh=mesh_of(world_size, replicas), offload_policy=CPUOffloadPolicy()
    )
    train_beside(rank, world_size, model, reference, "adamw", float_batches(5, torch.float64))
    assert all(p.to_local().device.type == "cpu" for p in dtensors(model).values())


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_offload_trains_like_the_unsharded_model(world_size, replicas):
    run_distributed(train_offloaded, world_size, replicas)


def cast_between_steps(rank, world_size):
    torch.manual_seed(0)
    reference = OddMLP()
    model = shard_odd_mlp(copy.deepcopy(reference), mesh=mesh_of(world_size))
    parameters = list(model.parameters())
    train_beside(rank, world_size, model, reference, "sgd", float_batches(2, torch.float32), dtype=torch.float32)
    reference.load_state_dict({name: p.full_tensor() for name, p in dtensors(model).items()})
    model.to(torch.float64)
    reference.to(torch.float64)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for state in model._fsdp_states():
        for p in state.group.params if state.group is not None else ():
            assert p._sharded_param_data.dtype == torch.float64
            assert p._sharded_param_data.numel() == p.padded_sharded_param_size.numel()
            assert not p._sharded_param_data[p.sharded_size.numel() :].any()
    train_beside(rank, world_size, model, reference, "adamw", float_batches(10, torch.float64))


@world_sizes(1, 2, 3, 4)
def test_a_cast_rebuilds_the_storage(world_size):
    run_distributed(cast_between_steps, world_size)
