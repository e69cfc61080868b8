"""Gradients that a user reads, sets, scales and clips between backwards: DTensors with the parameter's placements."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from harness import run_distributed, world_sizes
from ms_training import (
    LIMIT,
    OPTIMIZERS,
    OddMLP,
    assert_same_parts,
    float_batches,
    mesh_of,
    own_part,
    padding_of,
    shard_odd_mlp,
    square_loss,
    twin,
)
from raggedshard.mindspore import (
    DTensor,
    RaggedShard,
    Shard,
    clip_grad_norm_,
    enable_mindspore_backward_compact,
    fully_shard,
)


def scale(params, how):
    """Change the gradients between two backwards; the factor that all of them got."""
    if how == "clipped":
        norm = float(clip_grad_norm_(params, 0.01))
        assert norm > 0.01
        return 0.01 / norm
    for p in params:
        p.grad = p.grad * 0.5
    return 0.5


def accumulate_after(rank, world_size, how):
    """backward, change the gradients, backward: the sum, twice in a row."""
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size))
    params = model.trainable_params()
    first, second = float_batches(2)
    with enable_mindspore_backward_compact():
        for _ in range(2):
            expected = []
            for batch in (first, second):
                square_loss(reference, batch).backward()
                expected.append([p.grad.asnumpy() for p in reference.trainable_params()])
                reference.zero_grad()
            square_loss(model, own_part(first, rank, world_size)).backward()
            factor = scale(params, how)
            square_loss(model, own_part(second, rank, world_size)).backward()
            for p in params:
                assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements, p.name
                assert p.grad is p.grad, p.name
            sums = [Tensor(before * factor + after) for before, after in zip(*expected, strict=True)]
            assert_same_parts([p.name for p in params], [p.grad for p in params], sums, rtol=1e-4, atol=1e-6)
            model.zero_grad()
            assert all(p.grad is None for p in params)


@world_sizes(1, 2, 3)
@pytest.mark.parametrize("how", ["clipped", "scaled"])
def test_a_backward_adds_to_gradients_that_were_changed(world_size, how):
    run_distributed(accumulate_after, world_size, how, framework="mindspore", timeout=LIMIT)


class Sides(nn.Cell):
    """Two units side by side, of 3 and 1 rows: rank 1 of 2 holds one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one = nn.Dense(4, 3), nn.Dense(4, 1)

    def construct(self, x):
        return self.three(x), self.one(x)


def clip_and_step(rank, world_size, optimizer):
    """Clipped gradients of no rows are an operator's result; no optimizer may write into the padding for them."""
    model = shard_odd_mlp(twin(OddMLP)[1], mesh=mesh_of(world_size))
    params = model.trainable_params()
    own = OPTIMIZERS[optimizer](params)
    with enable_mindspore_backward_compact():
        for batch in float_batches(10):
            square_loss(model, own_part(batch, rank, world_size)).backward()
            clip_grad_norm_(params, 0.01)
            own(tuple(p.grad for p in params))
            assert not any(padding.any() for padding in padding_of(model))
            model.zero_grad()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_padding_stays_zero_after_clipped_gradients(optimizer):
    run_distributed(clip_and_step, 4, optimizer, framework="mindspore", timeout=LIMIT)


def one_rank_drops_an_output(rank, world_size):
    """Rank 1 runs both units, but its loss does not depend on `three`, whose gradient autograd does not bring then."""
    model = Sides()
    for unit in (model.three, model.one, model):
        fully_shard(unit, mesh=mesh_of(world_size), reshard_after_forward=False)
    x = Tensor(np.ones((1, 4), np.float32))
    grads = []
    with enable_mindspore_backward_compact():
        for _ in range(2):
            three, one = model(x)
            (three.sum() + one.sum() if rank == 0 else one.sum()).backward()
            grads.append({p.name: p.grad.full_tensor().asnumpy() for p in model.trainable_params()})
            assert all(p.grad.placements == p.placements for p in model.trainable_params())
    return grads


def test_gradients_that_come_late_add_up():
    for grads in run_distributed(one_rank_drops_an_output, 2, framework="mindspore", timeout=LIMIT):
        for number, of_params in enumerate(grads, 1):
            for name, grad in of_params.items():
                mean = 0.5 if name.startswith("three") else 1.0
                np.testing.assert_array_equal(grad, np.full(grad.shape, number * mean), err_msg=name)


def test_a_gradient_that_does_not_lie_as_its_tensor_is_refused():
    cell = fully_shard(nn.Dense(3, 5), mesh=mesh_of(1))
    weight = cell.weight
    with enable_mindspore_backward_compact():
        with pytest.raises(ValueError, match=r"shape \(5, 3\).*shape \(3, 5\)"):
            weight.grad = mint.zeros((3, 5))
        with pytest.raises(ValueError, match="lies as it does"):
            weight.grad = mint.zeros((5, 3))
        weight.grad = weight * 2
        assert weight.grad.placements == weight.placements
        weight.grad = None
        assert weight.grad is None


VIEWS = {
    "a slice": lambda x: x[2:6],
    "a slice at the front": lambda x: x[:4],
    "a reshape": lambda x: x[:4].copy().reshape((2, 2)).reshape((4,)),
    "nothing of it": lambda x: x[3:3],
}


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16, ms.int64], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_operators_see_a_dtensor_whose_local_tensor_was_a_view(view, dtype):
    local = VIEWS[view](Tensor(np.arange(8), dtype))
    expected = local.astype(ms.float32).asnumpy() * 2
    tensor = DTensor.from_local(local, mesh_of(1), [Shard(0)], shape=local.shape)
    for doubled in (tensor + tensor, tensor * 2, tensor * Tensor(2, dtype)):
        assert isinstance(doubled, DTensor) and doubled.placements == tensor.placements
        np.testing.assert_array_equal(doubled.to_local().astype(ms.float32).asnumpy(), expected)


def test_a_local_tensor_that_is_no_view_is_shared():
    local = Tensor(np.zeros(3, np.float32))
    DTensor.from_local(local, mesh_of(1), [Shard(0)], shape=(3,)).fill_(7.0)
    np.testing.assert_array_equal(local.asnumpy(), [7, 7, 7])


def bfloat16_rows(rank, world_size):
    cell = fully_shard(nn.Dense(3, 5, has_bias=False, dtype=ms.bfloat16), mesh=mesh_of(world_size))
    doubled = cell.weight * 2
    cell.weight.set_data(doubled)
    (param,) = cell._fsdp_state().group.params
    shared = param._sharded_param_data.astype(ms.float32).asnumpy()
    return isinstance(doubled, DTensor), doubled.placements, doubled.full_tensor().astype(ms.float32).asnumpy(), shared


def test_uneven_bfloat16_shards_lie_in_their_padded_storage():
    ranks = run_distributed(bfloat16_rows, 2, framework="mindspore", timeout=LIMIT)
    for rank, (is_dtensor, placements, whole, padded) in enumerate(ranks):
        assert is_dtensor and placements == (RaggedShard((0,), (3, 2)),)
        np.testing.assert_array_equal(padded[: (9, 6)[rank]], whole[rank * 3 : rank * 3 + 3].reshape(-1))
        assert not padded[(9, 6)[rank] :].any()
