"""Operations on sharded tensors give what they give on plain ones: values, dtype, shape, and the layout they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.distribute import from_local
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.placements import RaggedShard
from sharded import LAYOUTS, ROWS, assert_layout, assert_same, even, full, grid, line, replicate, shard

OUT_OF_PLACE = {
    "add": lambda x, y: x + y,
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "mul scalar": lambda x, y: x * 3,
    "rsub": lambda x, y: 1 - x,
    "div rounding": lambda x, y: torch.div(x, y + 2.5, rounding_mode="floor"),
    "plain scalar tensor": lambda x, y: x * torch.tensor(0.5),
    "promotes": lambda x, y: x + torch.tensor(2, dtype=torch.float64),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y + 5.0, value=0.1),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp tensor": lambda x, y: torch.lerp(x, y, y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where scalar": lambda x, y: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "clamp tensor": lambda x, y: x.clamp(max=y),
    "maximum": lambda x, y: torch.maximum(x, y),
    "max of two": lambda x, y: torch.max(x, y),
    "pow": lambda x, y: x.abs() ** 1.5,
    "sqrt": lambda x, y: x.abs().sqrt(),
    "sign": lambda x, y: x.sign(),
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "nan_to_num": lambda x, y: (x / 0).nan_to_num(),
    "isfinite": lambda x, y: torch.isfinite(x / (y > 0)),
    "isnan": lambda x, y: torch.isnan(x),
    "isclose": lambda x, y: torch.isclose(x, y, rtol=1.0),
    "eq": lambda x, y: x == y,
    "lt scalar": lambda x, y: x < 0.3,
    "logical": lambda x, y: (x > 0) & ~(y > 0),
    "clone": lambda x, y: x.clone(),
    "to float64": lambda x, y: x.to(torch.float64),
    "to bfloat16": lambda x, y: x.bfloat16(),
    "to int": lambda x, y: (x * 10).long(),
    "detach": lambda x, y: x.detach(),
    "view same": lambda x, y: x.view(x.shape),
    "reshape same": lambda x, y: x.reshape(x.shape),
    "contiguous": lambda x, y: x.contiguous(),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "ones_like": lambda x, y: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x, y: torch.full_like(x, 2.5),
    "new_zeros": lambda x, y: x.new_zeros(x.shape),
    "new_full": lambda x, y: x.new_full(x.shape, 4, dtype=torch.int64),
}

IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(0.5),
    "copy_": lambda x, y: x.copy_(y),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(1.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y + 5.0, value=0.1),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "clamp_": lambda x, y: x.clamp_(-0.1, 0.1),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 7.0),
    "erfinv_": lambda x, y: x.tanh_().erfinv_(),
    "ge_": lambda x, y: x.ge_(y),
    "setitem": lambda x, y: x.__setitem__(slice(None), y),
}

GATHERED = {
    "t": lambda x, y: x.t(),
    "first row": lambda x, y: x[:1],
    "column": lambda x, y: x[:, 1],
    "chunk": lambda x, y: torch.chunk(x, 3),
    "split": lambda x, y: x.split(2),
    "unbind": lambda x, y: x.unbind(1),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "view flat": lambda x, y: x.view(-1),
    "reshape": lambda x, y: x.reshape(3, -1),
    "flatten": lambda x, y: x.flatten(),
    "unsqueeze": lambda x, y: x.unsqueeze(0),
    "matmul": lambda x, y: x @ y.t(),
    "addmm": lambda x, y: torch.addmm(x, x @ x.t(), y),
    "sum of columns": lambda x, y: x.sum(0),
    "mean of rows": lambda x, y: x.mean(dim=-1, keepdim=True),
    "row norms": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "softmax": lambda x, y: x.softmax(1),
    "cumsum": lambda x, y: x.cumsum(0),
    "var": lambda x, y: x.var(),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 0),
    "tril": lambda x, y: x.tril(),
    "broadcast row": lambda x, y: x[:1] + y,
    "outer": lambda x, y: x[:, :1] * y[:1, :],
    "new_zeros other": lambda x, y: x.new_zeros(3, 2),
    "norm fro": lambda x, y: torch.linalg.matrix_norm(x),
}

IN_PLACE_GATHERED = {
    "tril_": lambda x, y: x.tril_(),
    "cumsum_": lambda x, y: x.cumsum_(0),
    "index_fill_": lambda x, y: x.index_fill_(1, torch.tensor(1), 9.0),
    "first column": lambda x, y: x[:, 0].fill_(3.0),
    "row and column": lambda x, y: x[-1:, 1:].mul_(2.0),
    "flat": lambda x, y: x.view(-1).add_(1.0),
    "transposed": lambda x, y: x.t().mul_(y.t()),
    "view of a view": lambda x, y: x.t()[0].sub_(1.0),
    "setitem": lambda x, y: x.__setitem__((slice(None), 0), 5.0),
    "broadcast": lambda x, y: x.add_(y[:1]),
}


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 3, generator=generator)


def keep_the_layout(rank: int, world_size: int, rows: int, make: Any) -> None:
    mesh = line(world_size)
    for what, operation in OUT_OF_PLACE.items():
        x, y = tensors(rows)
        a, b = make(x, mesh), make(y, mesh)
        result = operation(a, b)
        assert_layout(result, a, what)
        assert_same(result, operation(x, y), what)
    for what, operation in IN_PLACE.items():
        x, y = tensors(rows)
        a, b = make(x, mesh), make(y, mesh)
        local = a._local_tensor
        operation(a, b)
        operation(x, y)
        assert a._local_tensor is local, what
        assert_same(a, x, what)


@pytest.mark.parametrize(("world_size", "make"), LAYOUTS)
def test_element_wise_operations_and_factories_keep_the_layout(world_size: int, make: Any) -> None:
    for rows in ROWS:
        run_distributed(keep_the_layout, world_size, rows, make)


def gather(rank: int, world_size: int, rows: int, make: Any) -> None:
    mesh = line(world_size)
    for what, operation in GATHERED.items():
        x, y = tensors(rows)
        results, expected = operation(make(x, mesh), make(y, mesh)), operation(x, y)
        for result, plain in zip(*((r,) if torch.is_tensor(r) else r for r in (results, expected)), strict=True):
            assert isinstance(result, torch.Tensor), what
            assert_same(result, plain, what, exact=False)
    for what, operation in IN_PLACE_GATHERED.items():
        x, y = tensors(rows)
        a = make(x, mesh)
        operation(a, make(y, mesh))
        operation(x, y)
        assert_same(a, x, what)
        assert tuple(a._local_tensor.shape) == tuple(make(x, mesh)._local_tensor.shape), what


@pytest.mark.parametrize(("world_size", "make"), LAYOUTS)
def test_other_operations_are_right_and_views_write_to_their_base(world_size: int, make: Any) -> None:
    for rows in (2, 7, 10):
        run_distributed(gather, world_size, rows, make)


def mix_layouts(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x, y = tensors(7)
    a = shard(x, mesh)
    for other in (replicate(y, mesh), even(y, mesh), wrap_local(*partial_terms(y, mesh))):
        for result in (a * other, torch.where(a > 0, a, other)):
            assert_layout(result, a)
        assert_same(a * other, x * y)
        assert_same(torch.sub(other, a), y - x)
        assert_same(a.clone().copy_(other), y)
    assert_same(replicate(y, mesh).mul_(a), y * x)
    assert_layout(replicate(y, mesh) + a, a)
    row, column, one = y[:1], y[:, :1], torch.tensor(2.0)
    for small in (row, column, row[0], one):
        result = a * replicate(small, mesh)
        assert_layout(result, a)
        assert_same(result, x * small)
    assert_same(shard(column, mesh) * shard(x, mesh), column * x)


def partial_terms(value: torch.Tensor, mesh: Any) -> tuple[Any, ...]:
    term = value if mesh.get_rank() == 0 else torch.zeros_like(value)
    return term.clone(), mesh, (Partial(),), value.shape, value.stride()


@world_sizes()
def test_operands_of_other_layouts_are_brought_to_the_first_sharded_one(world_size: int) -> None:
    run_distributed(mix_layouts, world_size)


def keep_partial(rank: int, world_size: int) -> None:
    """Two terms: 1 and 2 on 2 ranks, the value is 3."""
    mesh = line(world_size)
    terms = wrap_local(torch.full((3,), float(rank + 1)), mesh, (Partial(),), (3,), (1,))
    three = torch.full((3,), 3.0)
    assert_same(terms.clone(), three)
    assert_same(terms + 1, three + 1)
    assert_same(terms * terms, three * three)
    assert_same(torch.ones_like(terms), torch.ones(3))
    assert_same(terms.abs().sum(), three.sum())
    assert_same(terms.clone().mul_(terms), three * three)
    assert_same(terms.clone().copy_(terms), three)
    assert_same(terms.clone().copy_(torch.tensor(5.0)), three + 2)
    assert_same(terms.clone().fill_(5.0), three + 2)
    assert_same(replicate(torch.tensor(3.0), mesh) + shard(torch.ones(3), mesh), three + 1)


def test_terms_of_a_partial_are_reduced_before_what_is_not_linear() -> None:
    run_distributed(keep_partial, 2)


def refuse(rank: int, world_size: int) -> None:
    mesh, other_mesh = line(world_size), grid(1, world_size)
    x, y = tensors(7)
    a = shard(x, mesh)
    for operation in (
        lambda: a + y,
        lambda: a.copy_(y),
        lambda: y.add_(a),
        lambda: a @ y.t(),
        lambda: torch.equal(a, y),
    ):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            operation()
    with pytest.raises(RuntimeError, match="two meshes"):
        torch.add(a, shard(y, other_mesh))
    with pytest.raises(RuntimeError, match="two meshes"):
        torch.cat([a, shard(y, other_mesh)])
    with pytest.raises(RuntimeError, match="two meshes"):
        torch.equal(a, shard(x, other_mesh))
    with pytest.raises(NotImplementedError, match="cannot change its storage"):
        a.resize_(3, 3)
    view = a.t()
    a.add_(1)
    with pytest.raises(RuntimeError, match="take the view again"):
        torch.add(view, 1)
    assert_same(a, x + 1)


def test_what_cannot_be_right_is_refused_on_every_rank() -> None:
    run_distributed(refuse, 2)


def run_foreach(rank: int, world_size: int) -> None:
    """Ragged, even, replicated, plain tensors and tensors of another mesh in one list."""
    mesh, other_mesh = line(world_size), grid(1, world_size)
    xs, ys = zip(*(tensors(rows) for rows in (7, 8, 1, 0, 5, 4)), strict=True)

    def make(values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        a, b, c, d, e, f = (v.clone() for v in values)
        return [shard(a, mesh), even(b, mesh), shard(c, mesh), shard(d, mesh), shard(e, other_mesh), f]

    for what, operation in {
        "mul scalar": lambda a, b: torch._foreach_mul(a, 2.0),
        "mul tensor": lambda a, b: torch._foreach_mul(a, torch.tensor(0.5)),
        "add list": lambda a, b: torch._foreach_add(a, b, alpha=3),
        "scalars": lambda a, b: torch._foreach_add(a, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.1),
        "addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, torch._foreach_abs(b), 0.5),
        "maximum": lambda a, b: torch._foreach_maximum(a, b),
        "clamp": lambda a, b: torch._foreach_clamp_min(a, 0.0),
        "pow": lambda a, b: torch._foreach_pow(2.0, a),
        "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_abs(a)),
    }.items():
        a = make(xs)
        for result, expected, like in zip(operation(a, make(ys)), operation(xs, ys), a, strict=True):
            assert_same(result, expected, what)
            assert type(result) is type(like) and getattr(result, "placements", 0) == getattr(like, "placements", 0)
    for what, operation in {
        "copy": lambda a, b: torch._foreach_copy_(a, b),
        "zero": lambda a, b: torch._foreach_zero_(a),
        "mul": lambda a, b: torch._foreach_mul_(a, torch.tensor(0.5)),
        "addcmul": lambda a, b: torch._foreach_addcmul_(a, b, b, 0.5),
        "sub": lambda a, b: torch._foreach_sub_(a, b),
    }.items():
        a, x = make(xs), [x.clone() for x in xs]
        operation(a, make(ys))
        operation(x, ys)
        for result, expected in zip(a, x, strict=True):
            assert_same(result, expected, what)


@world_sizes()
def test_foreach_operations_treat_each_index_by_its_own_layout(world_size: int) -> None:
    run_distributed(run_foreach, world_size)


def on_hsdp(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    x, y = tensors(7)
    a, b = shard(x, mesh), shard(y, mesh)
    assert a.placements == (Replicate(), RaggedShard((0,), (4, 3)))
    assert_same(a.lerp(b, 0.5), x.lerp(y, 0.5))
    assert_same(a @ b.t(), x @ y.t(), exact=False)
    assert_same(a + replicate(y, mesh), x + y)
    c = shard(x, mesh, (RaggedShard((0,), (1, 6)), Shard(1)))
    assert_same(c + b, x + y)
    assert_layout(c + b, c)
    c[0] = 0.5
    x[0] = 0.5
    assert_same(c, x)
    assert isinstance(from_local(a._local_tensor, mesh, a.placements, shape=(7, 3)), ShardedDTensor)


def test_replicas_and_a_second_sharded_dim() -> None:
    run_distributed(on_hsdp, 4)


def in_inference_mode(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x, y = tensors(7)
    a, b = shard(x, mesh), shard(y, mesh)
    with torch.inference_mode():
        for what in ("add", "where scalar", "isfinite", "isclose", "to float64", "reshape same", "clone"):
            assert_same(OUT_OF_PLACE[what](a, b), OUT_OF_PLACE[what](x, y), what)
        for what in ("t", "chunk", "matmul", "reshape"):
            for result, expected in zip(GATHERED[what](a, b), GATHERED[what](x, y), strict=True):
                assert_same(result, expected, what, exact=False)
        assert_same(a.norm(), x.norm(), exact=False)
        c = torch.zeros_like(a)
        c[1] = 4.0
        assert full(c)[:, 0].tolist() == [0, 4, 0, 0, 0, 0, 0]


def test_inference_mode() -> None:
    run_distributed(in_inference_mode, 2)
