"""Gradients through sharded tensors are those of plain tensors, and a leaf's gradient has the leaf's placements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.distribute import distribute_tensor, from_local, redistribute
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.placements import RaggedShard
from sharded import ROWS, assert_layout, assert_same, by_rows, even, full, grid, line, parameter, replicate, shard

LOSSES: dict[str, Any] = {
    "sum": lambda w, x: (w * 2).sum(),
    "mean": lambda w, x: w.mean(),
    "squares": lambda w, x: (w * w).sum() / 2,
    "norm": lambda w, x: w.norm(),
    "norm 3": lambda w, x: torch.linalg.vector_norm(w, 3),
    "max": lambda w, x: w.max(),
    "amin": lambda w, x: w.amin(),
    "matmul": lambda w, x: (x @ w).pow(2).sum(),
    "transposed": lambda w, x: (w.t() @ x.t()).sum(),
    "row": lambda w, x: w[0].exp().sum() if len(w) else w.sum(),
    "columns": lambda w, x: w.sum(0).square().sum(),
    "mixed": lambda w, x: (x.t() * w).sin().sum(),
    "softmax": lambda w, x: (w.softmax(1) * x.t()).sum(),
    "cat": lambda w, x: torch.cat([w, x.t()]).square().sum(),
    "twice": lambda w, x: (w * 3).sum() + w.t().sum() + (w.view(-1) ** 2).sum(),
    "where": lambda w, x: torch.where(w > 0, w, 0.1 * w).sum(),
    "clone": lambda w, x: w.clone().double().sum(),
    "lerp": lambda w, x: torch.lerp(w, x.t(), 0.3).sum(),
    "broadcast": lambda w, x: (w * x[:, :1].t()).sum() if len(w) else w.sum(),
}


def gradients(rank: int, world_size: int, make: Any) -> None:
    mesh = line(world_size)
    for rows in ROWS:
        generator = torch.Generator().manual_seed(rows)
        w, x = torch.randn(rows, 4, generator=generator), torch.randn(4, rows, generator=generator)
        for what, loss in LOSSES.items():
            if rows == 0 and what in ("max", "amin", "mean"):
                continue
            plain, leaf = parameter(w.clone()), parameter(make(w, mesh))
            for _ in range(2):  # the second one is accumulated
                expected, value = loss(plain, x), loss(leaf, replicate(x, mesh))
                assert_same(value, expected, (what, rows), exact=False)
                expected.backward()
                value.backward()
            assert_layout(leaf.grad, leaf, (what, rows))
            assert_same(leaf.grad, plain.grad, (what, rows), exact=False)


@world_sizes()
def test_the_gradient_of_a_leaf_has_its_placements(world_size: int) -> None:
    run_distributed(gradients, world_size, shard)


def test_the_gradient_of_a_leaf_of_torchs_placements_too() -> None:
    run_distributed(gradients, 3, even)


def leaves(rank: int, world_size: int) -> None:
    """However a leaf comes to require grad, its gradient has its placements; one hook each."""
    mesh = line(world_size)
    x = torch.ones(7, 2)
    first = distribute_tensor(x.clone().requires_grad_(), mesh, by_rows(7, mesh))
    made: list[Any] = [first, shard(x, mesh).requires_grad_(), parameter(shard(x, mesh))]
    made.append(wrap_local(shard(x, mesh)._local_tensor, mesh, by_rows(7, mesh), (7, 2), (2, 1), requires_grad=True))
    by_attribute: Any = shard(x, mesh)
    by_attribute.requires_grad = True
    made.append(by_attribute)
    for leaf in made:
        assert leaf.requires_grad and leaf.is_leaf
        (leaf.t() * 3).sum().backward()
        assert_layout(leaf.grad, leaf)
        assert_same(leaf.grad, x * 3)
        assert len(leaf._backward_hooks or {}) == 1
    frozen = parameter(shard(x, mesh), requires_grad=False)
    assert not frozen.requires_grad and not frozen._backward_hooks
    frozen.requires_grad_(False)
    by_attribute.requires_grad = False
    assert not by_attribute.requires_grad


def test_every_way_to_require_grad() -> None:
    run_distributed(leaves, 3)


def local_and_full(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = torch.arange(14.0).view(7, 2)
    leaf = parameter(shard(x, mesh))
    (leaf.to_local() * (rank + 1)).sum().backward()
    owner = torch.arange(7) // -(-7 // world_size)
    expected = (owner + 1.0)[:, None].expand(7, 2)
    assert_layout(leaf.grad, leaf)
    assert_same(leaf.grad, expected.contiguous())

    leaf.grad = None
    (leaf.full_tensor() * x).sum().backward()
    assert_layout(leaf.grad, leaf)
    assert_same(leaf.grad, x)

    leaf.grad = None  # each rank's loss is a term of the whole
    (leaf.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert_same(leaf.grad, torch.full((7, 2), world_size * (world_size + 1) / 2))

    leaf.grad = None
    leaf.redistribute(placements=[Shard(1)]).to_local(grad_placements=[Shard(1)]).sum().backward()
    assert_layout(leaf.grad, leaf)
    assert_same(leaf.grad, torch.ones(7, 2))

    local = leaf.detach()._local_tensor.clone().requires_grad_()
    whole = from_local(local, mesh, by_rows(7, mesh), shape=(7, 2))
    assert type(whole) is ShardedDTensor and whole.requires_grad and not whole.is_leaf
    (whole.full_tensor() * x).sum().backward()
    assert torch.equal(local.grad, x[owner == rank])


@world_sizes()
def test_to_local_full_tensor_and_from_local_are_differentiable(world_size: int) -> None:
    run_distributed(local_and_full, world_size)


def through_layouts(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    layouts = [
        (Replicate(), RaggedShard((0,), (4, 3))),
        (RaggedShard((0,), (1, 6)), Shard(1)),
        (Shard(0), Replicate()),
        (Replicate(), Replicate()),
    ]
    for source in layouts:
        for target in layouts:
            leaf = parameter(shard(x, mesh, source))
            (leaf.redistribute(placements=target) * 3).square().sum().backward()
            assert_layout(leaf.grad, leaf, (source, target))
            assert_same(leaf.grad, 18 * x, (source, target), exact=False)
    plain: Any = replicate(x, mesh).requires_grad_()
    redistribute(plain, placements=layouts[0]).square().sum().backward()
    assert isinstance(plain.grad, DTensor)
    assert_same(plain.grad, 2 * x, exact=False)
    terms: Any = wrap_local(x / 2, mesh, (Partial(), Replicate()), x.shape, x.stride()).requires_grad_()
    terms.redistribute(placements=layouts[0]).square().sum().backward()
    assert_same(full(terms.redistribute(placements=[Replicate()] * 2)), x, exact=False)


def test_redistribute_is_differentiable_in_every_direction() -> None:
    run_distributed(through_layouts, 4)


def dtypes(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    leaf = parameter(shard(torch.full((7, 2), 1.0), mesh))
    low: Any = leaf.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert low.dtype == torch.bfloat16
    low.sum().backward()
    assert leaf.grad.dtype == torch.float32
    assert_same(leaf.grad, torch.ones(7, 2))


def test_dtypes_of_a_redistribution() -> None:
    run_distributed(dtypes, 2)


def second_order(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    results = []
    for leaf in (x.clone().requires_grad_(), parameter(shard(x, mesh))):
        whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        (grad,) = torch.autograd.grad((whole**3).sum(), leaf, create_graph=True)
        grad.square().sum().backward()
        results.append(leaf.grad)
    assert_same(results[1], results[0], exact=False)


def test_second_derivatives_through_full_tensor() -> None:
    run_distributed(second_order, 2)


def compiled(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))

    def function(w: torch.Tensor) -> torch.Tensor:
        return (w * 2 + 1).relu()

    result = torch.compile(function, backend="eager")(shard(x, mesh))
    assert_same(result, function(x))


def test_compile_of_an_element_wise_function() -> None:
    run_distributed(compiled, 2)
