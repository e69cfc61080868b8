"""Placements, sizes and buffers of sharded parameters on MindSpore: exact, worked out by hand."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from harness import run_distributed
from ms_training import LIMIT, gradients, mesh_of, square_loss
from raggedshard.mindspore import (
    DTensor,
    RaggedShard,
    RaggedStridedShard,
    Replicate,
    Shard,
    distribute_tensor,
    enable_mindspore_backward_compact,
    fully_shard,
    init_device_mesh,
)
from raggedshard.placements import StridedShard


class Weights(nn.Cell):
    """Parameters of given shapes, the elements numbered from 1; a term of the loss for each."""

    def __init__(self, **shapes):
        super().__init__()
        self.names = list(shapes)
        for name, shape in shapes.items():
            values = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
            setattr(self, name, Parameter(Tensor(values), name=name))

    def construct(self, x):
        return sum((getattr(self, name) * x).sum() for name in self.names).reshape((1,))


def params_of(cell):
    return {p.name: p for p in cell.__dict__["_raggedshard_state"].group.params}


def facts(p):
    local = p.sharded_param.to_local()
    return {
        "placements": p.sharded_param.placements,
        "spmd": p._spmd_placements,
        "shape": tuple(p.sharded_param.shape),
        "actual": p.sharded_size,
        "offset": p.layout.run(p.dp_mesh.shard_rank).start,
        "padded": p.padded_sharded_param_size,
        "local": local.asnumpy(),
        "data": p._sharded_param_data.asnumpy(),
        "shares": local.size == 0 or local.data_ptr() == p._sharded_param_data.data_ptr(),
    }


def sharded_facts(rank, world_size, replicas):
    cell = fully_shard(Weights(uneven=(7, 2), few=(2, 3), even=(8, 2)), mesh=mesh_of(world_size, replicas))
    return {name: facts(p) for name, p in params_of(cell).items()}


def test_fsdp_placements_sizes_offsets_and_padding():
    ranks = run_distributed(sharded_facts, 4, 1, framework="mindspore", timeout=LIMIT)
    assert [rank["uneven"]["actual"] for rank in ranks] == [(2, 2), (2, 2), (2, 2), (1, 2)]
    assert [rank["uneven"]["offset"] for rank in ranks] == [0, 2, 4, 6]
    assert [rank["few"]["actual"] for rank in ranks] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert [rank["few"]["offset"] for rank in ranks] == [0, 1, 2, 2]
    for rank in ranks:
        assert rank["uneven"]["placements"] == rank["uneven"]["spmd"] == (RaggedShard((0,), (2, 2, 2, 1)),)
        assert rank["few"]["placements"] == (RaggedShard((0,), (1, 1, 0, 0)),)
        assert rank["even"]["placements"] == (Shard(0),)
        assert [rank[name]["shape"] for name in ("uneven", "few", "even")] == [(7, 2), (2, 3), (8, 2)]
        assert [rank[name]["padded"] for name in ("uneven", "few", "even")] == [(2, 2), (1, 3), (2, 2)]
        assert all(rank[name]["shares"] for name in rank)
    np.testing.assert_array_equal(ranks[3]["uneven"]["local"], [[13, 14]])
    np.testing.assert_array_equal(ranks[3]["uneven"]["data"], [13, 14, 0, 0])
    np.testing.assert_array_equal(ranks[2]["few"]["data"], [0, 0, 0])
    np.testing.assert_array_equal(ranks[1]["even"]["data"], [5, 6, 7, 8])


def test_hsdp_puts_replicate_in_front():
    for index, rank in enumerate(run_distributed(sharded_facts, 4, 2, framework="mindspore", timeout=LIMIT)):
        assert rank["uneven"]["placements"] == (Replicate(), RaggedShard((0,), (4, 3)))
        assert rank["few"]["placements"] == rank["even"]["placements"] == (Replicate(), Shard(0))
        assert rank["uneven"]["actual"] == ((4, 2), (3, 2))[index % 2]


def tensor_parallel_facts(rank, world_size, mesh_shape, names):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    cell = Weights(rows=(7, 2), columns=(3, 4), even=(8, 2))
    for name, dim in (("rows", 0), ("columns", 1), ("even", 0)):
        cell._params[name] = distribute_tensor(cell._params[name], mesh["tp"], (Shard(dim),))
    fully_shard(cell, mesh=mesh[names[:-1]])
    return {name: facts(p) for name, p in params_of(cell).items()}


def test_tensor_parallel_placements_are_kept():
    ranks = run_distributed(tensor_parallel_facts, 4, (2, 2), ("shard", "tp"), framework="mindspore", timeout=LIMIT)
    for rank in ranks:
        # 7 rows: TP blocks of 4 and 3, each cut in two: 2 2 and 2 1.
        assert rank["rows"]["placements"] == (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
        assert rank["columns"]["placements"] == (RaggedShard((0,), (2, 1)), Shard(1))
        assert rank["even"]["placements"] == (StridedShard(0, 2), Shard(0))
    # Ranks are (shard, tp) = 00 01 10 11.
    assert [rank["rows"]["local"][:, 0].tolist() for rank in ranks] == [[1, 3], [9, 11], [5, 7], [13]]
    assert [rank["rows"]["data"].tolist() for rank in ranks][3] == [13, 14, 0, 0]
    assert [rank["columns"]["local"].tolist() for rank in ranks] == [
        [[1, 2], [5, 6]],
        [[3, 4], [7, 8]],
        [[9, 10]],
        [[11, 12]],
    ]


def test_tensor_parallel_placements_under_hsdp():
    ranks = run_distributed(
        tensor_parallel_facts, 4, (2, 1, 2), ("replicate", "shard", "tp"), framework="mindspore", timeout=LIMIT
    )
    for rank in ranks:
        assert rank["rows"]["placements"] == (Replicate(), RaggedStridedShard((0,), (4, 3), 2), Shard(0))
        assert rank["columns"]["placements"] == (Replicate(), Shard(0), Shard(1))


def fused_buffers(rank, world_size):
    """The inputs and outputs of both collectives of one unit."""
    cell = fully_shard(Weights(uneven=(5, 2), few=(1, 3), even=(4, 1)), mesh=mesh_of(world_size))
    group = cell._fsdp_state().group
    params = params_of(cell)
    inputs = {name: p.all_gather_inputs[0].asnumpy() for name, p in params.items()}
    cell.unshard()
    whole = {name: p.unsharded_param.asnumpy() for name, p in params.items()}
    seen = {name: getattr(cell, name).asnumpy() for name in params}
    from raggedshard.fully_shard.reduction import plan_regions

    (region,) = plan_regions(group.trainable)
    for p in group.params:
        p.unsharded_grad = p.unsharded_param * 10 + 0
    fused = group.reduce_scatter_copy_in(region, Tensor(np.ones(3, np.float32))).asnumpy()
    group.start_reduce(all_reduce=True)
    group.finish_reduce()
    grads = {name: p.take_sharded_grad().to_local().asnumpy() for name, p in params.items()}
    cell.reshard()
    return inputs, whole, seen, region.starts, fused.reshape(world_size, -1), grads


def test_collectives_carry_padded_sizes_and_hand_out_actual_ones():
    ranks = run_distributed(fused_buffers, 2, framework="mindspore", timeout=LIMIT)
    for rank, (inputs, whole, seen, starts, fused, grads) in enumerate(ranks):
        # Padded sizes 3 x 2, 1 x 3 and 2 x 1, behind one used flag per parameter.
        assert {name: data.shape for name, data in inputs.items()} == {"uneven": (6,), "few": (3,), "even": (2,)}
        assert starts == (3, 9, 12)
        assert fused.shape == (2, 14)
        np.testing.assert_array_equal(fused[0], [1, 1, 1, 10, 20, 30, 40, 50, 60, 10, 20, 30, 10, 20])
        np.testing.assert_array_equal(fused[1], [1, 1, 1, 70, 80, 90, 100, 0, 0, 0, 0, 0, 30, 40])
        np.testing.assert_array_equal(whole["uneven"], np.arange(1, 11).reshape(5, 2))
        np.testing.assert_array_equal(seen["few"], [[1, 2, 3]])
        np.testing.assert_array_equal(grads["uneven"], [[[10, 20], [30, 40], [50, 60]], [[70, 80], [90, 100]]][rank])
        assert grads["few"].shape == ((1, 3), (0, 3))[rank]
        np.testing.assert_array_equal(grads["even"], [[[10], [20]], [[30], [40]]][rank])
    np.testing.assert_array_equal(ranks[1][0]["uneven"], [7, 8, 9, 10, 0, 0])


def other_dim(rank, world_size):
    """A requested dim 1, and the user's own units."""
    requested = {(3, 4): Shard(1), (6, 2): RaggedShard((0,), (1, 2)), (2, 3, 2): RaggedShard((0, 1), (1, 2))}
    cell = Weights(columns=(3, 4), units=(6, 2), flat=(2, 3, 2))
    fully_shard(cell, mesh=mesh_of(world_size), shard_placement_fn=lambda p: requested[tuple(p.shape)])
    x = Tensor(np.ones(1, np.float32))
    grads = ms.value_and_grad(lambda: square_loss(cell, x), None, cell.trainable_params())()[1]
    return (
        {name: facts(p) for name, p in params_of(cell).items()},
        [p.full_tensor().asnumpy() for p in cell.trainable_params()],
        [grad.full_tensor().asnumpy() for grad in grads],
    )


def test_requested_placements():
    ranks = run_distributed(other_dim, 2, framework="mindspore", timeout=LIMIT)
    for named, values, grads in ranks:
        assert named["columns"]["placements"] == (Shard(1),)
        assert named["units"]["placements"] == (RaggedShard((0,), (1, 2)),)
        assert named["flat"]["placements"] == (RaggedShard((0, 1), (1, 2)),)
        for value, grad, shape in zip(values, grads, [(3, 4), (6, 2), (2, 3, 2)], strict=True):
            np.testing.assert_array_equal(value, np.arange(1, np.prod(shape) + 1).reshape(shape))
            assert (grad == grad.flat[0]).all() and grad.shape == shape
    assert [rank[0]["units"]["actual"] for rank in ranks] == [(2, 2), (4, 2)]
    assert [rank[0]["flat"]["actual"] for rank in ranks] == [(2, 2), (4, 2)]
    assert [rank[0]["flat"]["padded"] for rank in ranks] == [(4, 2), (4, 2)]


def poisoned(rank, world_size, with_poison):
    """Train with NaN written into the padding before every step."""
    cell = fully_shard(Weights(uneven=(7, 2), few=(2, 3)), mesh=mesh_of(world_size))
    params = cell.trainable_params()
    optimizer = nn.Momentum(params, 0.1, 0.9)
    x = Tensor(np.full(1, 1.0 + rank, np.float32))
    for _ in range(10):
        if with_poison:
            for p in params_of(cell).values():
                padding = p._sharded_param_data.asnumpy()[int(np.prod(p.sharded_size)) :]
                padding.setflags(write=True)
                padding[...] = np.nan
        loss, grads = gradients("value_and_grad", cell, square_loss, x)
        optimizer(grads)
    padding = [p._sharded_param_data.asnumpy()[int(np.prod(p.sharded_size)) :] for p in params_of(cell).values()]
    return loss.asnumpy(), [p.full_tensor().asnumpy() for p in params], [part.tolist() for part in padding]


def test_poisoned_padding_changes_nothing_and_is_zero_afterwards():
    clean = run_distributed(poisoned, 4, False, framework="mindspore", timeout=LIMIT)
    dirty = run_distributed(poisoned, 4, True, framework="mindspore", timeout=LIMIT)
    for (loss, values, _), (dirty_loss, dirty_values, padding) in zip(clean, dirty, strict=True):
        assert np.isfinite(dirty_loss).all() and loss == dirty_loss
        for value, dirty_value in zip(values, dirty_values, strict=True):
            np.testing.assert_array_equal(value, dirty_value)
        assert not any(any(part) for part in padding)
    assert [len(part) for part in dirty[3][2]] == [2, 3]


def rebuilt(rank, world_size):
    """reset_sharded_param after a cast gave the parameter other memory."""
    cell = fully_shard(Weights(uneven=(5, 2), few=(1, 3)), mesh=mesh_of(world_size))
    before = cell.trainable_params()
    for p in before:
        p.set_dtype(ms.float16)
    cell.reset_sharded_params()
    assert [id(p) for p in cell.trainable_params()] == [id(p) for p in before]
    return {name: facts(p) for name, p in params_of(cell).items()}, [str(p.dtype) for p in before]


def test_reset_rebuilds_the_storage_after_a_cast():
    for rank, (named, dtypes) in enumerate(run_distributed(rebuilt, 2, framework="mindspore", timeout=LIMIT)):
        assert dtypes == ["Float16", "Float16"]
        assert all(found["shares"] and found["data"].dtype == np.float16 for found in named.values())
        assert named["uneven"]["data"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]][rank]
        assert named["few"]["actual"] == ((1, 3), (0, 3))[rank]


def gradients_of(rank, world_size, replicas):
    with enable_mindspore_backward_compact():
        cell = fully_shard(Weights(uneven=(7, 2), few=(2, 3), even=(8, 2)), mesh=mesh_of(world_size, replicas))
        x = Tensor(np.full(1, 1.0 + rank, np.float32))
        for _ in range(2):  # accumulates
            cell(x).sum().backward()
        result = {p.name: (p.grad, p) for p in cell.trainable_params()}
        for grad, p in result.values():
            assert isinstance(grad, DTensor) and grad.placements == p.placements and grad.shape == p.shape
            assert grad.to_local().shape == p.to_local().shape
        values = {name: grad.full_tensor().asnumpy() for name, (grad, _) in result.items()}
        cell.zero_grad()
        assert all(p.grad is None for p in cell.trainable_params())
    assert not hasattr(Tensor, "backward")
    return values


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_lie_as_their_parameters(replicas):
    for values in run_distributed(gradients_of, 4, replicas, framework="mindspore", timeout=LIMIT):
        for value in values.values():
            np.testing.assert_array_equal(value, np.full(value.shape, 2 * np.mean([1, 2, 3, 4]), np.float32))
