"""The DTensor of MindSpore, its errors, and the traps of MindSpore that it guards against."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from harness import run_distributed, run_ranks
from ms_training import (
    LIMIT,
    OddMLP,
    carry_by,
    float_batches,
    gradients,
    mesh_of,
    own_part,
    shard_odd_mlp,
    square_loss,
    twin,
)
from raggedshard.mindspore import (
    DTensor,
    Partial,
    RaggedShard,
    RaggedStridedShard,
    Replicate,
    Shard,
    distribute_tensor,
    enable_mindspore_backward_compact,
    fully_shard,
    init_device_mesh,
)
from raggedshard.platform.mindspore.fully_shard.hooks import deliver_leftovers


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_importing_the_face_imports_no_torch():
    code = "import sys, raggedshard.mindspore; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LAYOUTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (RaggedShard((0,), (4, 3)), Replicate()),
    (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0)),
    (RaggedShard((0,), (7, 0)), Shard(1)),
    (Replicate(), RaggedShard((0, 1), (1, 3))),
]


def redistributes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    whole = numbered(7, 4)
    for source in LAYOUTS:
        tensor = distribute_tensor(Tensor(whole), mesh, source)
        np.testing.assert_array_equal(tensor.full_tensor().asnumpy(), whole)
        for target in LAYOUTS:
            moved = tensor.redistribute(target)
            assert moved.placements == tuple(target)
            expected = distribute_tensor(Tensor(whole), mesh, target).to_local().asnumpy()
            np.testing.assert_array_equal(moved.to_local().asnumpy(), expected)
        copies = [copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), tensor.clone()]
        for other in copies:
            assert other.placements == tensor.placements and other.shape == (7, 4)
            np.testing.assert_array_equal(other.to_local().asnumpy(), tensor.to_local().asnumpy())
    part = DTensor.from_local(Tensor(whole * rank), mesh, (Partial(), Partial()))
    np.testing.assert_array_equal(part.full_tensor().asnumpy(), whole * 6)


def test_any_layout_to_any_other():
    run_distributed(redistributes, 4, framework="mindspore", timeout=LIMIT)


def differentiates(rank, world_size):
    mesh = mesh_of(world_size)
    placements = (RaggedShard((0,), (2, 1)),)
    p = Parameter(distribute_tensor(Tensor(numbered(3, 2)), mesh, placements), name="p")
    by_local = ms.value_and_grad(lambda: (p.to_local() * p.to_local()).sum(), None, [p])()[1][0]
    by_whole = ms.value_and_grad(lambda: (p.full_tensor() * p.full_tensor()).sum(), None, [p])()[1][0]
    by_ops = ms.value_and_grad(lambda: (p * p + p / 2).full_tensor().sum(), None, [p])()[1][0]
    for grad, expected in (
        (by_local, 2 * numbered(3, 2)),
        (by_whole, 2 * numbered(3, 2)),
        (by_ops, 2 * numbered(3, 2) + 0.5),
    ):
        assert isinstance(grad, DTensor) and grad.placements == placements
        np.testing.assert_allclose(grad.full_tensor().asnumpy(), expected)


def test_layout_changes_are_differentiable():
    run_distributed(differentiates, 2, framework="mindspore", timeout=LIMIT)


@pytest.fixture
def param():
    mesh = init_device_mesh("cpu", (1,))
    return Parameter(distribute_tensor(Tensor(numbered(3, 2)), mesh, (RaggedShard((0,), (3,)),)), name="p")


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda p: p.sum(), "only element-wise"),
        (lambda p: ops.matmul(p, p), "only element-wise"),
        (lambda p: p + Tensor(numbered(3, 2)), "plain tensor"),
        (lambda p: p + p.redistribute([Replicate()]), "redistribute"),
        (lambda p: p.asnumpy(), "spread over ranks"),
        (lambda p: p[0], "cannot be indexed"),
        (lambda p: p.__setitem__(0, 1.0), "whole values only"),
        (lambda p: p.set_data(Tensor(numbered(2, 2))), "cannot take values of shape"),
        (lambda p: p.redistribute([Partial()]), "cannot be turned into"),
        (lambda p: p.redistribute([RaggedShard((0,), (1, 1))]), "do not fit"),
        (lambda p: DTensor.from_local(p.to_local(), p.device_mesh, [Shard(0)], shape=(4, 2)), "local tensor has shape"),
    ],
)
def test_what_is_not_elementwise_raises_and_names_the_remedy(param, use, error):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=error):
        use(param)


@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_", "__iadd__"])
def test_in_place_arithmetic_that_would_change_nothing_raises(param, name):
    with pytest.raises(RuntimeError, match="in-place arithmetic"):
        getattr(param, name)(2.0)


@pytest.mark.parametrize("make", [mint.optim.Adam, mint.optim.SGD, mint.optim.AdamW])
def test_optimizers_that_would_do_nothing_raise(param, make):
    optimizer = make([param], lr=0.1)
    with pytest.raises(RuntimeError, match=r"mindspore\.experimental\.optim"):
        optimizer((param * 0 + 1,))


def test_the_switch_is_undone_completely():
    before = {
        (owner, name): vars(owner).get(name)
        for owner in (Tensor, nn.Cell, nn.Optimizer)
        for name in ("backward", "grad", "detach", "zero_grad", "step")
    }
    compact = enable_mindspore_backward_compact()
    assert enable_mindspore_backward_compact() is compact
    x = Parameter(Tensor(numbered(2)), name="x")
    with pytest.raises(RuntimeError, match="needs a gradient"):
        (x * x).backward()
    ms.value_and_grad(lambda: (x * x).sum(), None, [x])()
    (x * x).sum().backward()
    (x * x).sum().backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), [0, 4])
    x.grad = None
    assert x.grad is None
    compact.disable()
    compact.disable()
    assert before == {key: vars(key[0]).get(key[1]) for key in before}


class OneParameter(nn.Cell):
    def __init__(self, shape) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.ones(shape, np.float32)), name="w")

    def construct(self, x):
        return x * self.w


class Reentrant(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(2, 2)
        self.layer.recompute()

    def construct(self, x):
        return self.layer(x)


class WithScalar(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(2, 3)
        self.scale = Parameter(Tensor(1.0, ms.float32), name="scale")

    def construct(self, x):
        return self.layer(x) * self.scale


def refuses_before_it_changes_anything(rank, world_size):
    cell = WithScalar()
    params, classes = cell.trainable_params(), [type(cell), type(cell.layer)]
    for options, message in (({}, "'scale'.*scalar"), ({"reshard_after_forward": 3}, "must divide")):
        with pytest.raises(ValueError, match=message):
            fully_shard(cell, mesh=mesh_of(world_size), **options)
        assert all(now is before for now, before in zip(cell.trainable_params(), params, strict=True))
        assert [type(cell), type(cell.layer)] == classes
    fully_shard(cell, mesh=mesh_of(world_size), ignored_params=[cell.scale])
    assert isinstance(cell.layer.weight, DTensor)
    assert cell(Tensor(numbered(1, 2))).shape == (1, 3)


def test_a_call_that_raises_leaves_the_cell_as_it_was():
    run_distributed(refuses_before_it_changes_anything, 2, framework="mindspore", timeout=LIMIT)


def refuses(rank, world_size):
    mesh = mesh_of(world_size)
    wrong = [
        (lambda: fully_shard(nn.CellList([nn.Dense(2, 2)]), mesh=mesh), ValueError, "container without forward"),
        (lambda: fully_shard(fully_shard(nn.Dense(2, 2), mesh=mesh), mesh=mesh), ValueError, "already"),
        (lambda: fully_shard(OneParameter(()), mesh=mesh), ValueError, "'w'.*scalar"),
        (lambda: fully_shard("cell", mesh=mesh), ValueError, r"takes an nn\.Cell"),
        (
            lambda: fully_shard(OneParameter((2, 3)), mesh=mesh, shard_placement_fn=lambda p: Shard(1)),
            NotImplementedError,
            r"'w' of shape \(2, 3\).*'shard'.*Only dim 0 may be uneven",
        ),
        (
            lambda: fully_shard(OneParameter((2, 3)), mesh=mesh, shard_placement_fn=lambda p: Shard(2)),
            ValueError,
            "only 2 dims",
        ),
        (
            lambda: fully_shard(
                OneParameter((2, 3)), mesh=mesh, shard_placement_fn=lambda p: RaggedShard((0,), (3, 2))
            ),
            ValueError,
            "do not divide",
        ),
        (
            lambda: fully_shard(nn.Dense(2, 2), mesh=init_device_mesh("cpu", (1, 2, 1), mesh_dim_names="abc")),
            ValueError,
            "1-D mesh",
        ),
        (lambda: fully_shard(nn.Dense(2, 2), mesh=mesh, reshard_after_forward=3), ValueError, "must divide"),
        (lambda: fully_shard(Reentrant(), mesh=mesh)(Tensor(numbered(1, 2))), RuntimeError, "use_reentrant=False"),
    ]
    for use, error, message in wrong:
        with pytest.raises(error, match=message):
            use()
    first, second = nn.Dense(2, 2), nn.Dense(2, 2)
    second.weight = first.weight
    fully_shard(first, mesh=mesh)
    with pytest.raises(ValueError, match="is tied to"):
        fully_shard(second, mesh=mesh)


def test_errors_name_the_parameter_and_the_remedy():
    run_distributed(refuses, 2, framework="mindspore", timeout=LIMIT)


class TwoUnits(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(3, 3), nn.Dense(3, 3)

    def construct(self, x, second=True):
        x = self.first(x)
        return self.second(x) if second else x


def one_rank_skips(rank, world_size, carrier):
    carry_by(carrier)
    model = TwoUnits()
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh_of(world_size))
    x = Tensor(numbered(2, 3))
    ms.value_and_grad(lambda: model(x, second=rank == 0).sum(), None, model.trainable_params())()


@pytest.mark.parametrize("carrier", ["mccl", "gloo"])
def test_a_unit_that_one_rank_skips_is_an_error_and_no_mix(carrier):
    outcomes = run_ranks(one_rank_skips, 2, carrier, framework="mindspore", timeout=LIMIT)
    assert all(outcome.kind in ("raised", "died") for outcome in outcomes)
    told = [outcome for outcome in outcomes if outcome.kind == "raised"]
    assert any("runs" in outcome.error and "second" in outcome.report for outcome in told), told


def one_rank_skips_a_parameter(rank, world_size):
    """Within a unit, ranks may use different parameters; their mean is taken with zeros."""
    model = fully_shard(TwoUnits(), mesh=mesh_of(world_size))
    x = Tensor(np.ones((1, 3), np.float32))
    with enable_mindspore_backward_compact():
        model(x, second=rank == 0).sum().backward()
        first = model.first.bias.grad.full_tensor().asnumpy()
        second = model.second.bias.grad.full_tensor().asnumpy()
    weight = model.second.weight.full_tensor().asnumpy()
    np.testing.assert_allclose(first, (weight.sum(0) + 1) / 2, rtol=1e-5)
    np.testing.assert_allclose(second, np.full(3, 0.5))


def test_a_parameter_that_one_rank_skips_counts_as_zero_there():
    run_distributed(one_rank_skips_a_parameter, 2, framework="mindspore", timeout=LIMIT)


def frees_memory(rank, world_size):
    """Between forward and backward the gathered weights hold no memory, and backward sees them again."""
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size), reshard_after_forward=True)
    (batch,) = float_batches(1)
    sizes = []

    def loss_of(cell, x):
        loss = square_loss(cell, x)
        if cell is model:
            sizes.extend(
                p.unsharded_param.untyped_storage().size() for s in model._fsdp_states() for p in s.group.params
            )
        return loss

    expected = gradients("value_and_grad", reference, loss_of, batch)[1]
    grads = gradients("value_and_grad", model, loss_of, own_part(batch, rank, world_size))[1]
    assert len(sizes) == 11 and not any(sizes)
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad.full_tensor().asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)


def test_unsharded_weights_are_freed_between_forward_and_backward():
    run_distributed(frees_memory, 2, framework="mindspore", timeout=LIMIT)


def test_a_gradient_that_comes_too_late_for_value_and_grad_is_an_error():
    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Dense(2, 2), mesh=mesh)
    p = model._fsdp_state().group.params[0]
    p.put_sharded_grad(Tensor(numbered(4)))
    with pytest.raises(RuntimeError, match="enable_mindspore_backward_compact"):
        deliver_leftovers([model._fsdp_state()])
