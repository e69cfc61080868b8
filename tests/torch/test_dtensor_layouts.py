"""Making sharded tensors and changing their layout: every pair of placements, on meshes of 1 to 3 dims."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from harness import run_distributed, world_sizes
from layouts import Layout, layouts
from raggedshard import placements as neutral
from raggedshard.platform.torch.distribute import distribute_tensor, from_local, redistribute
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.placements import RaggedShard, RaggedStridedShard
from raggedshard.platform.torch.private import StridedShard
from sharded import ROWS, assert_same, by_rows, full, grid, line, parameter, replicate, shard

DTYPES = (torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def to_torch(placement: Any) -> Any:
    if isinstance(placement, neutral.RaggedStridedShard):
        return RaggedStridedShard(placement.dims, placement.local_units, placement.split_factor)
    if isinstance(placement, neutral.RaggedShard):
        return RaggedShard(placement.dims, placement.local_units)
    if isinstance(placement, neutral.StridedShard):
        return StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, neutral.Shard):
        return Shard(placement.dim)
    return Partial() if placement.is_partial() else Replicate()


def numbers(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    values = torch.arange(1, count + 1) % 100
    return (values % 3 == 0 if dtype == torch.bool else values.to(dtype)).view(shape)


def change_by_hand(rank: int, world_size: int, mesh_shape: tuple[int, ...], shape: tuple[int, ...], menu: list) -> None:
    """Every placement tuple of the menu to every other; locals are compared with a slice of the global tensor."""
    mesh = grid(*mesh_shape)
    x = numbers(shape)
    for source, target in itertools.product(menu, menu):
        a = shard(x, mesh, source)
        b = a.redistribute(placements=target)
        expected = shard(x, mesh, target)
        assert type(b) is ShardedDTensor and b.placements == tuple(target), (source, target)
        if not any(p.is_partial() for p in target) or source == target:
            torch.testing.assert_close(b._local_tensor, expected._local_tensor, rtol=0, atol=0)
        assert_same(b, x, (source, target))
        assert_same(a, x, (source, target))


R, P = Replicate(), Partial()
ONE_DIM = [(R,), (P,), (Shard(0),), (Shard(1),), (RaggedShard((0,), (3, 3, 1)),), (RaggedShard((0,), (0, 2, 5)),)]
ONE_DIM += [(RaggedShard((0, 1), (1, 0, 3)),), (RaggedStridedShard((0,), (1, 2, 1, 1, 1, 1), 2),), (Partial("avg"),)]
TWO_DIMS = [
    (R, R),
    (R, RaggedShard((0,), (4, 3))),
    (RaggedShard((0,), (3, 4)), Shard(1)),
    (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0)),
    (StridedShard(0, split_factor=2), Shard(0)),
    (Shard(0), Shard(0)),
    (P, RaggedShard((0,), (0, 7))),
    (RaggedShard((0,), (1, 6)), P),
    (Shard(1), R),
]
THREE_DIMS = [
    (R, R, R),
    (R, RaggedShard((0,), (4, 3)), Shard(1)),
    (Shard(1), R, RaggedShard((0,), (2, 5))),
    (Shard(0), P, Shard(0)),
    (RaggedStridedShard((0,), (1, 1, 1, 1, 1, 1, 1, 0), 4), Shard(0), Shard(0)),
]


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "menu"),
    [((3,), (7, 4), ONE_DIM), ((2, 2), (7, 3), TWO_DIMS), ((2, 2, 2), (7, 3), THREE_DIMS)],
    ids=["1-D", "2-D", "3-D"],
)
def test_every_placement_to_every_other(mesh_shape: Any, shape: Any, menu: list) -> None:
    run_distributed(change_by_hand, int(np.prod(mesh_shape)), mesh_shape, shape, menu)


def change(rank: int, world_size: int, cases: list[tuple[Layout, Layout]]) -> None:
    for source, target in cases:
        mesh = grid(*source.mesh_shape)
        x = numbers(source.shape)
        a = shard(x, mesh, [to_torch(p) for p in source.placements])
        b = a.redistribute(placements=[to_torch(p) for p in target.placements])
        assert_same(b, x, (source, target))
        if not any(p.is_partial() for p in target.placements):
            local = target.local_of(x.numpy(), tuple(mesh.get_coordinate() or ()))
            np.testing.assert_array_equal(b._local_tensor.numpy(), local)


MESHES = {2: [(2,), (1, 2), (2, 1)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (2, 1, 2)]}


@st.composite
def pairs_on(draw: st.DrawFn, ranks: int) -> list[tuple[Layout, Layout]]:
    sources = [draw(layouts(mesh_shape=draw(st.sampled_from(MESHES[ranks])))) for _ in range(8)]
    return [(source, draw(layouts(like=source))) for source in sources]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_pairs_of_layouts(ranks: int) -> None:
    # A failure costs new processes, so examples are not shrunk.
    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
        phases=[Phase.generate],
    )
    @given(pairs_on(ranks))
    def check(cases: list[tuple[Layout, Layout]]) -> None:
        run_distributed(change, ranks, cases)

    check()


def gather_dtypes(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for dtype in DTYPES:
        for rows in ROWS:
            x = numbers((rows, 3), dtype)
            assert_same(shard(x, mesh), x, (dtype, rows))
            assert_same(shard(x, mesh).redistribute(placements=[Shard(1)]), x, (dtype, rows))
    # A local tensor with gaps, and a global one whose first dim varies fastest.
    x = numbers((7, 4))
    wide = torch.full((7, 9), -1.0)
    wide[:, ::2][:, :4] = x
    rows = pieces(7, world_size)[rank]
    a = wrap_local(wide[rows, ::2][:, :4], mesh, by_rows(7, mesh), (7, 4), (4, 1))
    assert_same(a, x)
    assert_same(a.redistribute(placements=[Shard(1)]), x)
    assert_same(shard(x.t(), mesh), x.t())


def pieces(rows: int, parts: int) -> list[slice]:
    size = -(-rows // parts)
    return [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(parts)]


@world_sizes()
def test_every_dtype_and_locals_that_are_not_contiguous(world_size: int) -> None:
    run_distributed(gather_dtypes, world_size)


def make(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for rows in ROWS:
        x = numbers((rows, 3)).requires_grad_()
        own = x if rank == 0 else torch.full_like(x, -1.0).requires_grad_()
        a = distribute_tensor(own, mesh, by_rows(rows, mesh))
        assert type(a) is ShardedDTensor and a.requires_grad and a.is_leaf
        assert_same(a, x)
        local = pieces(rows, world_size)[rank]
        assert torch.equal(a._local_tensor, x.detach()[local])
        assert a._local_tensor.untyped_storage().nbytes() == a._local_tensor.numel() * 4, "the full tensor stays alive"
        b = distribute_tensor(own.detach(), mesh, by_rows(rows, mesh), src_data_rank=None)
        assert torch.equal(b._local_tensor, own.detach()[local])
        assert distribute_tensor(b, mesh, by_rows(rows, mesh)) is b
        c = from_local(b._local_tensor, mesh, by_rows(rows, mesh), shape=(rows, 3))
        assert c.shape == (rows, 3) and c.stride() == torch.empty(rows, 3).stride()
    last = world_size - 1
    a = distribute_tensor(torch.full((7,), float(rank)), mesh, by_rows(7, mesh), src_data_rank=last)
    assert full(a).tolist() == [float(last)] * 7
    for tensor in (
        distribute_tensor(numbers((8, 2)), mesh, [Shard(0)]),
        from_local(torch.ones(2, 2), mesh, [Shard(0)]),
    ):
        assert type(tensor) is DTensor
    assert distribute_tensor(numbers((7, 2)), mesh, [RaggedShard((0,), (7, *(0,) * last))]).shape == (7, 2)


@world_sizes()
def test_distribute_tensor_and_from_local(world_size: int) -> None:
    run_distributed(make, world_size)


def make_on_grid(rank: int, world_size: int) -> None:
    """Values of the rank at (1, 1): of the ranks 0 to 3 the last."""
    mesh = grid(2, 2)
    ragged = (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(-2))
    a = distribute_tensor(numbers((7, 3)) * (rank + 1), mesh, ragged, src_data_rank=1)
    assert a.placements == (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
    assert_same(a, numbers((7, 3)) * 4)
    # Of the replicas (0, j) and (1, j) the first counts.
    b = from_local(torch.full((4 - rank % 2, 1), float(rank)), mesh, by_rows(7, mesh), shape=(7, 1), run_check=True)
    assert full(b).flatten().tolist() == [0.0] * 4 + [1.0] * 3


def test_making_tensors_on_two_mesh_dims() -> None:
    run_distributed(make_on_grid, 4)


def refuse(rank: int, world_size: int) -> None:
    mesh, other = line(world_size), grid(1, world_size)
    x = numbers((7, 2))
    with pytest.raises(ValueError, match=r"needs the global shape"):
        from_local(x[:4], mesh, by_rows(7, mesh))
    with pytest.raises(ValueError, match=r"shape \(6, 2\) does not fit.*global shape \(7, 2\) .* \([43], 2\)"):
        from_local(x[:6], mesh, by_rows(7, mesh), shape=(7, 2))
    for call in (
        lambda placements: distribute_tensor(x, mesh, placements),
        lambda placements: from_local(x[:4], mesh, placements, shape=(7, 2)),
        lambda placements: shard(x, mesh).redistribute(placements=placements),
        lambda placements: redistribute(replicate(x, mesh), placements=placements),
    ):
        with pytest.raises(ValueError, match=r"do not fit shape \(7, 2\).*mesh dim 0"):
            call([RaggedShard((0,), (1, 1))])
        with pytest.raises(ValueError, match=r"do not fit shape \(7, 2\)"):
            call([RaggedShard((0,), (4, 3)), Replicate()])
    a = shard(x, mesh)
    with pytest.raises(ValueError, match="another mesh"):
        a.redistribute(other, [R])
    with pytest.raises(ValueError, match="needs placements"):
        a.redistribute()
    with pytest.raises(ValueError, match="distributed already"):
        distribute_tensor(a, mesh, [RaggedShard((0,), (1, 6))])
    with pytest.raises(RuntimeError, match="leaf"):
        distribute_tensor(x.requires_grad_() * 2, mesh, by_rows(7, mesh))
    with pytest.raises(ValueError, match=r"cannot be turned into terms of P"):
        a.redistribute(placements=[Partial("product")])
    wrong = wrap_local(torch.ones(5, 2), mesh, by_rows(7, mesh), (7, 2), (2, 1))
    with pytest.raises(ValueError, match=r"has shape \(5, 2\), but placements .* give \([43], 2\) at mesh coordinate"):
        wrong.full_tensor()


def test_errors_name_what_does_not_fit() -> None:
    run_distributed(refuse, 2)


def reduce_terms(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    for kind, expected in (("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0), ("product", 6.0)):
        a = wrap_local(torch.full((5, 2), rank + 1.0), mesh, (Partial(kind),), (5, 2), (2, 1))
        for target in ([R], [Shard(0)], by_rows(5, mesh)):
            assert_same(a.redistribute(placements=target), torch.full((5, 2), expected), kind)
        assert torch.equal(a._local_tensor, torch.full((5, 2), rank + 1.0)), "reduced in place"
    for kind in ("sum", "avg", "max", "min"):
        terms = shard(numbers((5, 2), torch.int64), mesh).redistribute(placements=[Partial(kind)])
        assert terms.dtype == torch.int64
        if kind != "avg":
            assert_same(terms, numbers((5, 2), torch.int64))


def test_terms_of_every_kind() -> None:
    run_distributed(reduce_terms, 3)


def from_torch(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = numbers((7, 4))
    for placement in (R, Shard(0), Shard(1)):
        a = torch_distribute_tensor(x, mesh, [placement])
        assert type(redistribute(a, placements=by_rows(7, mesh))) is ShardedDTensor
        assert_same(redistribute(a, mesh, by_rows(7, mesh)), x)
        assert type(redistribute(a, placements=[Shard(0)])) is DTensor
    assert type(redistribute(shard(x, mesh), placements=[Shard(0)])) is ShardedDTensor
    assert_same(shard(x, mesh).redistribute(placements=[Shard(-1)]), x)
    assert shard(x, mesh).redistribute(placements=[R], forward_dtype=torch.float64).dtype == torch.float64


@world_sizes(1, 3)
def test_the_source_may_be_torchs_own(world_size: int) -> None:
    run_distributed(from_torch, world_size)


def wrap(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    storage = torch.zeros(10)
    local = storage[: 6 if rank == 0 else 3].view(-1, 3)
    leaf = parameter(wrap_local(local, mesh, by_rows(3, mesh), torch.Size((3, 3)), (3, 1)))
    assert leaf._local_tensor is local
    assert isinstance(leaf, torch.nn.Parameter) and isinstance(leaf, DTensor)
    with torch.no_grad():
        leaf.add_(1)
        assert leaf.to_local() is local
    assert storage.tolist() == [1.0] * local.numel() + [0.0] * (10 - local.numel())
    assert "RaggedShard(dims=(0,), local_units=(2, 1))" in repr(leaf)
    tensors, meta = leaf.__tensor_flatten__()
    again = ShardedDTensor.__tensor_unflatten__(
        {name: getattr(leaf, name) for name in tensors}, meta, leaf.shape, leaf.stride()
    )
    assert type(again) is ShardedDTensor and again._local_tensor is local and again.placements == leaf.placements


def test_wrap_local_keeps_the_tensor_it_is_given() -> None:
    run_distributed(wrap, 2)


def own_groups(rank: int, world_size: int) -> list[int]:
    """HSDP: gathering rows talks within a replica only; nothing waits for the other one."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    a = shard(numbers((7, 2)), mesh)
    if rank < 2:
        a.full_tensor()
    return [rank]


def test_gathering_uses_the_groups_of_the_mesh_dims_that_change() -> None:
    assert run_distributed(own_groups, 4, group_timeout=10) == [[0], [1], [2], [3]]
