"""Kinds of sharded tensors: cells of several dims, meta, strides, complex numbers."""

from __future__ import annotations

from typing import Any

import torch

from harness import run_distributed
from raggedshard.platform.torch.dtensor import wrap_local
from raggedshard.platform.torch.placements import RaggedShard
from sharded import assert_layout, assert_same, by_rows, line, replicate, shard


def flattened_cells(rank: int, world_size: int) -> None:
    """(6, 4, 2) in cells of the first two dims, 8 and 16 of them."""
    mesh = line(world_size)
    x = torch.arange(48.0).view(6, 4, 2)
    a = shard(x, mesh, (RaggedShard((0, 1), (1, 2)),))
    assert tuple(a._local_tensor.shape) == ((8, 2), (16, 2))[rank]
    assert_layout(a * 2 + a, a)
    assert_same(a * 2 + a, x * 3)
    assert_same(a * replicate(x[0], mesh), x * x[0])
    assert_same(a.transpose(0, 2), x.transpose(0, 2))
    assert_same(a.sum((0, 1)), x.sum((0, 1)))
    assert_same(torch.zeros_like(a, memory_format=torch.contiguous_format), x * 0)
    a[1, 2] = -1.0
    x[1, 2] = -1.0
    assert_same(a, x)


def test_cells_of_several_dims() -> None:
    run_distributed(flattened_cells, 2)


def on_meta(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    placements = by_rows(7, mesh)
    rows = (3, 3, 1)[rank]
    a = wrap_local(torch.empty(rows, 4, device="meta"), mesh, placements, (7, 4), (4, 1))
    results: Any = (a + a, torch.empty_like(a), a.bfloat16(), a.detach(), a.normal_(), torch.rand_like(a))
    for result in results:
        assert_layout(result, a)
        assert result.is_meta and result._local_tensor.shape == (rows, 4)
    filled = torch.zeros_like(a, device="cpu")
    assert_layout(filled, a)
    assert_same(filled, torch.zeros(7, 4))
    assert a.full_tensor().shape == (7, 4)
    assert a.sum().shape == ()


def test_meta_tensors_keep_the_layout_and_communicate_nothing() -> None:
    run_distributed(on_meta, 3)


def memory_formats(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = torch.randn(7, 2, 3, 3)
    a = shard(x, mesh)
    last = a.contiguous(memory_format=torch.channels_last)
    assert last.stride() == x.contiguous(memory_format=torch.channels_last).stride()
    assert_layout(last, a)
    assert_same(last, x)
    column_major = torch.randn(4, 7).t()
    b = wrap_local(shard(column_major, mesh)._local_tensor.t().contiguous().t(), mesh, by_rows(7, mesh), (7, 4), (1, 7))
    assert (b + b).stride() == (1, 7) and torch.zeros_like(b).stride() == (1, 7)
    assert b.clone(memory_format=torch.contiguous_format).stride() == (4, 1)
    assert_same(b * 2, column_major * 2)


def test_strides_are_those_of_a_plain_tensor() -> None:
    run_distributed(memory_formats, 2)


def complex_numbers(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = torch.randn(5, 2, dtype=torch.complex64)
    a = shard(x, mesh)
    assert_same(a.conj() * a, x.conj() * x, exact=False)
    assert_same(torch.view_as_real(a), torch.view_as_real(x))
    torch.view_as_real(a).mul_(2)
    assert_same(a, x * 2)
    assert_same(a.abs(), (x * 2).abs(), exact=False)


def test_complex_tensors_and_their_real_views() -> None:
    run_distributed(complex_numbers, 2)
