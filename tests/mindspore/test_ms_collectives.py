"""Collectives, groups and meshes on MindSpore."""

from __future__ import annotations

import datetime
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from harness import run_distributed, world_sizes
from ms_training import LIMIT, carry_by
from raggedshard.platform.mindspore.collectives import (
    agree,
    all_gather,
    all_reduce,
    broadcast,
    group_of,
    init_process_group,
    reduce_scatter,
)
from raggedshard.platform.mindspore.device_mesh import DeviceMesh, init_device_mesh
from raggedshard.platform.mindspore.gloo import Gloo

DTYPES = ["float32", "float16", "float64", "int64", "uint8"]
CARRIERS = ["mccl", "gloo"]


def collectives(rank, world_size, dtype, carrier):
    carry_by(carrier)
    group = group_of(tuple(range(world_size)))
    kind = getattr(ms, dtype)
    own = Tensor(np.arange(6) + rank, kind)
    gathered = [part.asnumpy() for part in all_gather(own, group)]
    chunks = Tensor(np.arange(3 * world_size) + rank, kind)
    total = all_reduce(own, group)
    assert own.asnumpy()[0] == rank, "all_reduce must not change its input"
    assert total.dtype == kind
    return (
        np.stack(gathered),
        reduce_scatter(chunks, group).asnumpy(),
        total.asnumpy(),
        all_reduce(own, group, "max").asnumpy(),
        broadcast(own, world_size - 1, group).asnumpy(),
    )


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_compute_what_they_name(world_size, dtype, carrier):
    ranks = np.arange(world_size)[:, None]
    base = np.arange(6)
    for rank, results in enumerate(
        run_distributed(collectives, world_size, dtype, carrier, framework="mindspore", timeout=LIMIT)
    ):
        gathered, scattered, total, largest, sent = results
        assert gathered.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(gathered, base + ranks)
        chunk = np.arange(3 * world_size).reshape(world_size, 3)[rank]
        np.testing.assert_array_equal(scattered, chunk * world_size + ranks.sum())
        np.testing.assert_array_equal(total, base * world_size + ranks.sum())
        np.testing.assert_array_equal(largest, base + world_size - 1)
        np.testing.assert_array_equal(sent, base + world_size - 1)


def collectives_of_views(rank, world_size, carrier):
    """A view with an offset is what MCCL silently leaves alone."""
    carry_by(carrier)
    group = group_of(tuple(range(world_size)))
    view = Tensor(np.arange(8, dtype=np.float32))[4:]
    return all_reduce(view, group).asnumpy(), np.stack([part.asnumpy() for part in all_gather(view, group)])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_collectives_read_views(carrier):
    for total, gathered in run_distributed(collectives_of_views, 2, carrier, framework="mindspore", timeout=LIMIT):
        np.testing.assert_array_equal(total, [8, 10, 12, 14])
        np.testing.assert_array_equal(gathered, [[4, 5, 6, 7]] * 2)


def test_gloo_without_torch_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"enable_gloo\(\) needs torch"):
        Gloo(0, 1, datetime.timedelta(seconds=1))


def bits_and_halves(rank, world_size, carrier):
    """bool, and bfloat16, which numpy and torch know by different names."""
    carry_by(carrier)
    group = group_of(tuple(range(world_size)))
    half = Tensor(np.array([1.5, -2.0 * rank], np.float32), ms.bfloat16)
    flags = Tensor(np.array([rank == 0, True, False]))
    return (
        [part.astype(ms.float32).asnumpy().tolist() for part in all_gather(half, group)],
        all_reduce(half, group).astype(ms.float32).asnumpy().tolist(),
        [part.asnumpy().tolist() for part in all_gather(flags, group)],
        all_reduce(flags, group, "min").asnumpy().tolist(),
    )


@pytest.mark.parametrize("carrier", CARRIERS)
def test_collectives_of_bits_and_halves(carrier):
    for gathered, total, flags, all_set in run_distributed(
        bits_and_halves, 2, carrier, framework="mindspore", timeout=LIMIT
    ):
        assert gathered == [[1.5, 0.0], [1.5, -2.0]]
        assert total == [3.0, -2.0]
        assert flags == [[True, True, False], [False, True, False]]
        assert all_set == [False, True, False]


def empty_collectives(rank, world_size):
    group = group_of(tuple(range(world_size)))
    empty = Tensor(np.zeros((0, 3), np.float32))
    return [part.shape for part in all_gather(empty, group)], all_reduce(empty, group).shape


def test_empty_tensors_need_no_communication():
    assert run_distributed(empty_collectives, 2, framework="mindspore", timeout=LIMIT) == [([(0, 3)] * 2, (0, 3))] * 2


def disagree(rank, world_size):
    return agree((rank, 2**62 - rank), group_of((0, 1)))


def test_agree_tells_every_rank_what_the_others_say():
    expected = [(0, 2**62), (1, 2**62 - 1)]
    assert run_distributed(disagree, 2, framework="mindspore", timeout=LIMIT) == [expected] * 2


def sums_over_mesh_dims(rank, world_size, shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    value = Tensor(np.array([float(rank)], np.float32))
    sums = [all_reduce(value, mesh.get_group(dim)).item() for dim in range(mesh.ndim)]
    return mesh.get_coordinate(), sums, [mesh.get_local_rank(name) for name in names]


def test_a_2d_mesh_has_rows_and_columns():
    results = run_distributed(
        sums_over_mesh_dims, 4, (2, 2), ("replicate", "shard"), framework="mindspore", timeout=LIMIT
    )
    assert results == [
        ((0, 0), [2.0, 1.0], [0, 0]),
        ((0, 1), [4.0, 1.0], [0, 1]),
        ((1, 0), [2.0, 5.0], [1, 0]),
        ((1, 1), [4.0, 5.0], [1, 1]),
    ]


def test_a_3d_mesh_has_a_group_along_every_dim():
    results = run_distributed(
        sums_over_mesh_dims, 4, (2, 1, 2), ("replicate", "shard", "tp"), framework="mindspore", timeout=LIMIT
    )
    assert [sums for _, sums, _ in results] == [[2.0, 0.0, 1.0], [4.0, 1.0, 1.0], [2.0, 2.0, 5.0], [4.0, 3.0, 5.0]]


def slices(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    dp, tp = mesh["replicate", "shard"], mesh["tp"]
    joined = DeviceMesh.concatenate([dp, tp])
    with pytest.raises(KeyError, match="no dim 'pp'"):
        mesh["pp"]
    with pytest.raises(ValueError, match="not slices of one mesh"):
        DeviceMesh.concatenate([dp, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))])
    return dp.mesh.tolist(), tp.mesh.tolist(), joined == mesh, dp.mesh_dim_names, tp.size(), hash(joined) == hash(mesh)


def test_slices_of_a_mesh_hold_this_rank_and_join_again():
    ranks = run_distributed(slices, 4, framework="mindspore", timeout=LIMIT)
    assert [rank[:2] for rank in ranks] == [
        ([[0], [2]], [0, 1]),
        ([[1], [3]], [0, 1]),
        ([[0], [2]], [2, 3]),
        ([[1], [3]], [2, 3]),
    ]
    assert all(rank[2:] == (True, ("replicate", "shard"), 2, True) for rank in ranks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: init_device_mesh("npu", (1,)), "MindSpore runs on 'cpu'"),
        (lambda: init_device_mesh("cpu", (2,)), "does not hold 1 processes"),
        (lambda: DeviceMesh("cpu", [0, 0]), "stands twice"),
        (lambda: DeviceMesh("cpu", [1, 0]), "must ascend"),
        (lambda: DeviceMesh("cpu", [0], mesh_dim_names=("a", "b")), "mesh_dim_names"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_several_processes_need_a_port(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="MASTER_PORT"):
        init_process_group()
