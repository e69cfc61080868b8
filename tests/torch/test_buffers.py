"""Sizes, placements and padding of sharded parameters and of the buffers that carry them (requirement, section 9)."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import run_distributed
from raggedshard.torch import RaggedShard, RaggedStridedShard, fully_shard, init_device_mesh
from training import OddMLP, Pair, full, mesh_of, on_own_rows, shard_odd_mlp
from units import F64, Unit, all_params, group_of, local_of, padding, placements_of, sharded_unit

# ---- sizes and placements


def sizes(rank, world_size, replicas, *shapes):
    _, params = sharded_unit(world_size, *shapes, replicas=replicas)
    return [
        (
            tuple(p.sharded_param.shape),
            tuple(p.sharded_size),
            tuple(p.padded_sharded_param_size),
            placements_of(p),
            p._sharded_param_data.numel(),
            local_of(p).flatten().tolist(),
        )
        for p in params
    ]


@pytest.mark.parametrize(
    ("shape", "world_size", "rows", "padded"),
    [
        ((7, 8), 4, [2, 2, 2, 1], 2),
        ((10, 3), 4, [3, 3, 3, 1], 3),
        ((5, 3), 2, [3, 2], 3),
        ((2, 3), 4, [1, 1, 0, 0], 1),
        ((1, 1), 3, [1, 0, 0], 1),
        ((9,), 4, [3, 3, 3, 0], 3),
        ((5, 2, 3), 3, [2, 2, 1], 2),
        ((0, 4), 4, [0, 0, 0, 0], 0),
        ((8, 3), 4, [2, 2, 2, 2], 2),
        ((7, 8), 1, [7], 7),
    ],
    ids=str,
)
def test_fsdp_sizes_offsets_and_placements(shape, world_size, rows, padded):
    row = math.prod(shape[1:])
    even = len(set(rows)) == 1
    starts = [sum(rows[:rank]) * row for rank in range(world_size)]
    for rank, (value,) in enumerate(run_distributed(sizes, world_size, 1, shape)):
        logical, sharded, padded_size, placements, storage, values = value
        assert logical == shape
        assert sharded == (rows[rank], *shape[1:])
        assert padded_size == (padded, *shape[1:])
        assert placements == ((Shard(0),) if even else (RaggedShard((0,), tuple(rows)),))
        assert storage == padded * row
        assert values == list(range(starts[rank] + 1, starts[rank] + rows[rank] * row + 1))


def test_hsdp_sizes_offsets_and_placements():
    for rank, (odd, even) in enumerate(run_distributed(sizes, 4, 2, (7, 2), (8, 2))):
        half = rank % 2
        assert odd[:5] == ((7, 2), ((4, 2), (3, 2))[half], (4, 2), (Replicate(), RaggedShard((0,), (4, 3))), 8)
        assert odd[5] == ([1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14])[half]
        assert even[:5] == ((8, 2), (4, 2), (4, 2), (Replicate(), Shard(0)), 8)


def tensor_parallel_sizes(rank, world_size, replicas):
    """7 rows cut by TP to 4 and 3, each of them by two FSDP ranks; and columns cut by TP."""
    shape = (replicas, 2, 2) if replicas else (2, 2)
    names = ("replicate", "shard", "tp") if replicas else ("shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Unit((7, 2), (5, 4))
    for name, placement in (("p0", Shard(0)), ("p1", Shard(1))):
        value = distribute_tensor(model.get_parameter(name).detach(), mesh["tp"], [placement])
        model.register_parameter(name, nn.Parameter(value))
    model = fully_shard(model, mesh=mesh[names[:-1]])
    return [
        (placements_of(p), tuple(p.sharded_size), tuple(p.padded_sharded_param_size)) for p in group_of(model).params
    ]


@pytest.mark.parametrize("replicas", [0, 1])
def test_tensor_parallel_placements_are_kept(replicas):
    front = (Replicate(),) if replicas else ()
    rows = (*front, RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
    columns = (*front, RaggedShard((0,), (3, 2)), Shard(1))
    # Ranks 0, 1 are FSDP rank 0; ranks 0, 2 hold the block of 4 rows.
    assert run_distributed(tensor_parallel_sizes, 4, replicas) == [
        [(rows, (2, 2), (2, 2)), (columns, (3, 2), (3, 2))],
        [(rows, (2, 2), (2, 2)), (columns, (3, 2), (3, 2))],
        [(rows, (2, 2), (2, 2)), (columns, (2, 2), (3, 2))],
        [(rows, (1, 2), (2, 2)), (columns, (2, 2), (3, 2))],
    ]


# ---- poison


@contextlib.contextmanager
def poisoned_memory() -> Iterator[list[int]]:
    """Memory from torch.empty and its kin is full of NaN; yields a list of the bytes poisoned so far."""
    names = ("empty", "empty_like")
    original = {name: getattr(torch, name) for name in names}
    new_empty = torch.Tensor.new_empty
    poisoned = [0]

    def poison(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.numel() and not tensor.is_meta:
                tensor.detach().view(-1).view(torch.uint8).fill_(255)  # a NaN in every floating-point dtype
                poisoned[0] += tensor.nbytes
            return tensor

        return made

    for name in names:
        setattr(torch, name, poison(original[name]))
    torch.Tensor.new_empty = poison(new_empty)  # type: ignore[method-assign]
    try:
        yield poisoned
    finally:
        for name in names:
            setattr(torch, name, original[name])
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]


@contextlib.contextmanager
def watched_exchange(look: Any) -> Iterator[None]:
    """``look(chunks)`` sees, and may change, what each rank is about to send in a reduction: ``(ranks, bytes)``."""
    original = dist.all_to_all_single

    def exchange(output: torch.Tensor, input: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        look(input.view(dist.get_world_size(group), -1))
        return original(output, input, group=group, **kwargs)

    dist.all_to_all_single = exchange
    try:
        yield
    finally:
        dist.all_to_all_single = original


def train_poisoned(rank, world_size, replicas):
    """All padding that this rank can reach is NaN before it is used: no loss, gradient or parameter changes."""
    torch.manual_seed(0)
    reference = OddMLP().double()
    with poisoned_memory() as poisoned:
        model = shard_odd_mlp(copy.deepcopy(reference), mesh=mesh_of(world_size, replicas))
        assert not any(padding(p).any() for p in all_params(model))
        pair = Pair(rank, world_size, model, reference)
        pair.train(on_own_rows, steps=1)
        for _ in range(3):
            for p in all_params(model):
                padding(p).fill_(torch.nan)
            pair.train(on_own_rows, steps=1)
    assert poisoned[0] > 10_000
    return sum(padding(p).isnan().sum().item() for p in all_params(model))


@pytest.mark.parametrize("replicas", [1, 2])
def test_nan_in_padding_and_in_buffers_before_use_changes_nothing(replicas):
    assert sum(run_distributed(train_poisoned, 4, replicas)) > 0, "nothing was poisoned"


def poison_tails(rank, world_size):
    """The tail of every rank's chunk is NaN when it is sent: gradients take the actual rows only."""
    model, params = sharded_unit(world_size, (7, 8), (2, 3))
    fused = []

    def poison(chunks: torch.Tensor) -> None:
        elements = chunks.view(F64)
        front = elements.shape[1] - (16 + 3)  # padded rows (2, 8) and (1, 3)
        elements[3, front + 8 : front + 16] = torch.nan  # rank 3 holds one of its two rows of p0
        elements[2:, front + 16 :] = torch.nan  # ranks 2 and 3 hold none of p1
        fused.append(elements)

    with watched_exchange(poison):
        model().backward()
    assert len(fused) == 1
    for p in params:
        grad: Any = p.sharded_param.grad
        assert tuple(grad.to_local().shape) == tuple(p.sharded_size)
        assert torch.equal(full(grad), torch.arange(1.0, p.sharded_param.numel() + 1).view(grad.shape))


def test_gradients_use_actual_rows_only():
    run_distributed(poison_tails, 4)


# ---- padding stays zero


def reset(rank, world_size):
    _, params = sharded_unit(world_size, (7, 8), (2, 3), (8,))
    for p in params:
        held, values = p.sharded_param, local_of(p).clone()
        for _ in range(2):
            padding(p).fill_(torch.nan)
            p.reset_sharded_param()
            assert not padding(p).any()
            assert p.sharded_param is held
            assert torch.equal(local_of(p), values)
    return [padding(p).numel() for p in params]


def test_padding_is_zero_after_reset_sharded_param():
    assert run_distributed(reset, 4) == [[0, 0, 0], [0, 0, 0], [0, 3, 0], [8, 3, 0]]


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
RUNS = [(name, {"foreach": flag}) for name in OPTIMIZERS for flag in (False, True)] + [
    (n, {"fused": True}) for n in FUSED
]


def optimize(rank, world_size):
    """10 steps of every kind of optimizer, with weight decay where there is any."""
    for name, options in RUNS:
        decay = {} if name == "Rprop" else {"weight_decay": 0.1}
        model, params = sharded_unit(world_size, (7, 8), (2, 3), (8,))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **decay, **options)
        before = [full(p.sharded_param).clone() for p in params]
        tails = []

        def look(chunks: torch.Tensor, tails: list[torch.Tensor] = tails) -> None:
            elements = chunks.view(F64)
            front = elements.shape[1] - (16 + 3 + 2)
            tails += [elements[3, front + 8 : front + 16].clone(), elements[2:, front + 16 : front + 19].clone()]

        with poisoned_memory(), watched_exchange(look):
            for _ in range(10):
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert not any(padding(p).any() for p in params), (name, options)
        assert len(tails) == 20 and not any(tail.any() for tail in tails), (name, options)
        for p, old in zip(params, before, strict=True):
            assert p._sharded_param_data.data_ptr() == local_of(p).data_ptr() or not p.sharded_size[0]
            assert (full(p.sharded_param) != old).all(), (name, options)


def test_padding_is_zero_before_each_use_and_after_every_optimizer():
    run_distributed(optimize, 4)


# ---- the fused buffers


def gather(rank, world_size):
    with poisoned_memory():
        model, params = sharded_unit(world_size, (7, 2), (2, 3), (8,))
    inputs = [data.clone() for p in params for data in p.all_gather_inputs]
    model.unshard()
    outputs = []
    for p in params:
        unsharded = p.unsharded_param
        assert unsharded.untyped_storage().nbytes() == unsharded.numel() * 8, "padding is part of what modules see"
        assert unsharded.is_contiguous()
        outputs.append(unsharded.tolist())
    model.reshard()
    assert all(p.unsharded_param.untyped_storage().nbytes() == 0 for p in params)
    return [data.tolist() for data in inputs], outputs


def test_all_gather_inputs_are_padded_alike_and_the_output_is_the_logical_parameter():
    ranks = run_distributed(gather, 4)
    p0 = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 0, 0]]
    p1 = [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
    p2 = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [rank[0] for rank in ranks] == [list(parts) for parts in zip(p0, p1, p2, strict=True)]
    for _, outputs in ranks:
        assert outputs == [[[2 * i + 1, 2 * i + 2] for i in range(7)], [[1, 2, 3], [4, 5, 6]], list(range(1, 9))]


def reduction_input(rank, world_size):
    model, params = sharded_unit(world_size, (7, 2), (2, 3), (8,))
    seen = []
    with poisoned_memory(), watched_exchange(lambda chunks: seen.append(chunks.view(F64).clone())):
        model().backward()
    (chunks,) = seen
    sizes = [p.padded_sharded_param_size.numel() for p in params]
    assert sizes == [4, 3, 2]
    return chunks[:, -sum(sizes) :].tolist()


def test_reduce_scatter_copy_in_pads_with_zeros_and_advances_by_padded_sizes():
    for chunks in run_distributed(reduction_input, 4):
        assert chunks == [
            # p0: (2, 2)    | p1: (1, 3) | p2: (2,)
            [1, 2, 3, 4, 1, 2, 3, 1, 2],
            [5, 6, 7, 8, 4, 5, 6, 3, 4],
            [9, 10, 11, 12, 0, 0, 0, 5, 6],
            [13, 14, 0, 0, 0, 0, 0, 7, 8],
        ]
