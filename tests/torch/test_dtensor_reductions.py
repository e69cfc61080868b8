"""Reductions over all elements and what is built on them: all ranks get the plain tensor's value, none fails alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.placements import RaggedShard
from sharded import LAYOUTS, ROWS, assert_same, by_rows, even, grid, line, parameter, replicate, shard

ORDERS = (0, 0.5, 1, 2, 3, math.inf, -math.inf, -1)

REDUCTIONS: dict[str, Any] = {
    "sum": lambda x: x.sum(),
    "sum float64": lambda x: x.sum(dtype=torch.float64),
    "sum dims": lambda x: x.sum((0, 1), keepdim=True),
    "sum negative dims": lambda x: x.sum((-1, 0)),
    "mean": lambda x: x.mean(),
    "mean dims": lambda x: x.mean((0, 1)),
    "prod": lambda x: (1 + x / 10).prod(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin keepdim": lambda x: x.amin((0, 1), keepdim=True),
    "any": lambda x: (x > 1.5).any(),
    "all": lambda x: (x > -3).all(),
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
    "norm": lambda x: x.norm(),
    "norm fro": lambda x: torch.norm(x, "fro"),
    "norm 3": lambda x: torch.norm(x, 3),
    **{f"vector_norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p) for p in ORDERS},
    "vector_norm float64": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "nan": lambda x: torch.where(x == x.max(), math.nan, x).max(),
    "nan norm": lambda x: torch.linalg.vector_norm(torch.where(x == x.max(), math.nan, x), math.inf),
}


def values(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)) * 2).to(dtype)


def outcome(operation: Any, x: torch.Tensor) -> Any:
    try:
        return operation(x)
    except (RuntimeError, IndexError) as error:
        return type(error)


def reduce(rank: int, world_size: int, make: Any) -> None:
    mesh = line(world_size)
    for rows in ROWS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64) if rows in (0, 1, 7) else (torch.float32,):
            x = values(rows, dtype)
            for what, operation in REDUCTIONS.items():
                with torch.no_grad():
                    result, expected = outcome(operation, make(x, mesh)), outcome(operation, x)
                if isinstance(expected, type):
                    assert isinstance(result, type), (what, rows, dtype, result)
                    continue
                assert type(result) is torch.Tensor, (what, type(result), result)
                assert_same(result, expected, (what, rows, dtype), exact=False)
                result = operation(make(x, mesh))
                assert isinstance(result, DTensor) and result.placements == (Replicate(),), what
                assert_same(result, expected, (what, rows, dtype), exact=False)


@pytest.mark.parametrize(("world_size", "make"), LAYOUTS)
def test_reductions_are_plain_without_grad_mode_and_replicated_with_it(world_size: int, make: Any) -> None:
    run_distributed(reduce, world_size, make)


def booleans(rank: int, world_size: int) -> list[bool]:
    mesh = line(world_size)
    with torch.no_grad():
        return [
            bool(operation(shard(x, mesh)))
            for x in (torch.tensor([False] * 4 + [True]), torch.tensor([True] * 4 + [False]), torch.tensor([False]))
            for operation in (torch.max, torch.min, torch.any, torch.all)
        ]


def test_extrema_of_booleans() -> None:
    hand = [True, False, True, False, True, False, True, False, False, False, False, False]
    assert run_distributed(booleans, 3) == [hand] * 3


def half_precision(rank: int, world_size: int) -> None:
    """4096 ones and a half: rounded once, at the end, as torch does for a plain tensor."""
    mesh = line(world_size)
    x = torch.full((4097,), 1.0).bfloat16()
    x[-1] = 0.5
    with torch.no_grad():
        for operation in (torch.sum, torch.mean, torch.linalg.vector_norm):
            assert torch.equal(operation(shard(x, mesh)), operation(x))
    big = torch.full((300,), 300.0, dtype=torch.float16)
    with torch.no_grad():
        assert torch.equal(shard(big, mesh).norm(), big.norm())
        assert torch.equal(shard(big, mesh).mean(), big.mean())


def test_half_precision_is_rounded_once() -> None:
    run_distributed(half_precision, 3)


def compare(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for rows in ROWS:
        x = values(rows, torch.float32)
        a = shard(x, mesh)
        for other in (shard(x, mesh), replicate(x, mesh), even(x, mesh)):
            assert torch.equal(a, other) is True
            assert torch.allclose(a, other)
        assert torch.equal(a, shard(values(rows + 1, torch.float32), mesh)) is False
        if rows:
            x = x.clone()
            x[0, 0] += 1  # differs on rank 0 alone
            assert torch.equal(a, shard(x, mesh)) is False
            assert not torch.allclose(a, shard(x, mesh))
            assert torch.allclose(a, shard(x, mesh), atol=2)


@world_sizes()
def test_equal_and_allclose_agree_on_all_ranks(world_size: int) -> None:
    run_distributed(compare, world_size)


def on_two_dims(rank: int, world_size: int) -> None:
    """Replicas must not be counted twice; two sharded dims must both be."""
    mesh = grid(2, 2)
    x = values(7, torch.float32)
    with torch.no_grad():
        for placements in (
            by_rows(7, mesh),
            (RaggedShard((0,), (3, 4)), Replicate()),
            (RaggedShard((0,), (0, 7)), Shard(1)),
        ):
            a = shard(x, mesh, placements)
            for what in ("sum", "mean", "max", "vector_norm 2", "vector_norm 0", "vector_norm inf", "prod", "all"):
                assert_same(REDUCTIONS[what](a), REDUCTIONS[what](x), (what, placements), exact=False)
            assert torch.equal(a, shard(x, mesh, placements))


def test_replicas_count_once_and_every_sharded_dim_counts() -> None:
    run_distributed(on_two_dims, 4)


class _Parameters:
    """Gradients of two meshes, of torch's placements, of plain tensors; shards without rows."""

    def __init__(self, world_size: int, scale: float = 1.0):
        one, two = line(world_size), grid(1, world_size)
        generator = torch.Generator().manual_seed(5)
        fulls = [torch.randn(rows, 3, generator=generator) * scale for rows in (7, 1, 2, 10, 4, 3)]
        self.plain: list[Any] = [parameter(f) for f in fulls]
        a, b, c, d, e, f = fulls
        tensors = [shard(a, one), shard(b, one), shard(c, two), shard(d, one), even(e, two), f.clone()]
        self.sharded: list[Any] = [parameter(t) for t in tensors]
        for parameters in (self.plain, self.sharded):
            for leaf in parameters:
                leaf.grad = (leaf.detach() * 3).clone()


def clip(rank: int, world_size: int) -> None:
    for p in (1.0, 2.0, 3.0, math.inf, 0.5):
        for foreach in (True, False, None):
            both = _Parameters(world_size)
            expected = torch.nn.utils.clip_grad_norm_(both.plain, 0.7, p, foreach=foreach)
            norm = torch.nn.utils.clip_grad_norm_(both.sharded, 0.7, p, foreach=foreach, error_if_nonfinite=True)
            assert type(norm) is torch.Tensor
            assert_same(norm, expected, (p, foreach), exact=False)
            for sharded, plain in zip(both.sharded, both.plain, strict=True):
                assert_same(sharded.grad, plain.grad, (p, foreach), exact=False)
    both = _Parameters(world_size)
    total = torch.nn.utils.get_total_norm([p.grad for p in both.sharded])
    torch.nn.utils.clip_grads_with_norm_(both.sharded, 0.1, total)
    assert_same(torch.nn.utils.get_total_norm([p.grad for p in both.sharded]), torch.tensor(0.1), exact=False)
    torch.nn.utils.clip_grad_value_(both.sharded, 0.01)
    with torch.no_grad():
        assert max(p.grad.max() for p in both.sharded) <= 0.01


@world_sizes()
def test_clipping_over_two_meshes_and_empty_shards(world_size: int) -> None:
    run_distributed(clip, world_size)


def clip_nonfinite(rank: int, world_size: int, bad: float) -> None:
    mesh = line(world_size)
    for p in (1.0, 2.0, math.inf):
        for foreach in (True, False):
            leaf = parameter(shard(torch.ones(7, 2), mesh))
            grad = torch.ones(7, 2)
            grad[0, 0] = bad  # on rank 0 alone
            leaf.grad = shard(grad, mesh)
            with pytest.raises(RuntimeError, match="non-finite"):
                torch.nn.utils.clip_grad_norm_([leaf], 1.0, p, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_seen_by_every_rank(bad: float) -> None:
    run_distributed(clip_nonfinite, 3, bad)


def count_gathers(rank: int, world_size: int) -> int:
    mesh = line(world_size)
    grads: list[Any] = [shard(torch.ones(rows, 2), mesh) for rows in range(1, 40)]
    calls = []
    from raggedshard.platform.torch import collectives

    original = collectives.all_gather_single
    collectives.all_gather_single = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    try:
        with torch.no_grad():
            torch._foreach_norm(grads)
    finally:
        collectives.all_gather_single = original
    return len(calls)


def test_norms_of_many_tensors_cost_one_collective() -> None:
    assert run_distributed(count_gathers, 2) == [1, 1]


def scale(rank: int, world_size: int, bad_rank: int | None) -> list[Any]:
    mesh = line(world_size)
    start = torch.arange(14.0).view(7, 2)
    leaf = parameter(shard(start, mesh))
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # makes the scaler's own tensors
    leaf.grad = shard(torch.full((7, 2), 16.0), mesh)
    if rank == bad_rank:
        leaf.grad._local_tensor[0, 0] = math.inf
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_([leaf], 1e9)
    scaler.step(optimizer)
    scaler.update()
    return [torch.equal(leaf.full_tensor(), start - 2), torch.equal(leaf.full_tensor(), start), norm.item()]


def test_grad_scaler_steps_when_all_is_finite() -> None:
    norm = math.sqrt(14 * 4)
    assert run_distributed(scale, 3, None) == [[True, False, pytest.approx(norm)]] * 3


def test_grad_scaler_skips_the_step_on_every_rank_when_one_has_an_inf() -> None:
    assert run_distributed(scale, 3, 1) == [[False, True, math.inf]] * 3


def reversed_mesh(rank: int, world_size: int) -> None:
    """Ranks 2, 1, 0 along the mesh: group ranks are no coordinates."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [2, 1, 0])
    x = torch.arange(7.0).view(7, 1)
    a = shard(x, mesh)
    assert a._local_tensor.flatten().tolist() == [[6.0], [3.0, 4.0, 5.0], [0.0, 1.0, 2.0]][rank]
    assert_same(a, x)
    assert_same(a.t(), x.t())
    assert_same(a.max(), x.max())
    dist.barrier()


def test_a_mesh_whose_ranks_do_not_ascend() -> None:
    run_distributed(reversed_mesh, 3)
