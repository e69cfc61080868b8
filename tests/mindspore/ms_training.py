"""Trains a sharded cell beside the unsharded one on the same global batches and compares all there is."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from raggedshard.mindspore import (
    DeviceMesh,
    DTensor,
    Shard,
    enable_gloo,
    enable_mindspore_backward_compact,
    fully_shard,
    init_device_mesh,
)
from raggedshard.platform.mindspore.collectives import all_reduce, group_of

LIMIT = 200
"""Seconds for a job, of which a busy machine takes 40; a collective that hangs ends after 30 seconds all the same."""

GLOBAL_BATCH = 12
"""Divides by 1, 2, 3 and 4 ranks."""


class OddMLP(nn.Cell):
    """(7, 8)-like weights: row counts 7, 5, 1, 2, 8 and 3, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(8, 7)
        self.mid = nn.Dense(7, 5, has_bias=False)
        self.one = nn.Dense(5, 1)
        self.two = nn.Dense(5, 2)
        self.even = nn.Dense(5, 8)
        self.down = nn.Dense(10, 3)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.mid(ops.tanh(self.up(x))))
        gated = ops.tanh(self.even(x)) * self.one(x)
        return self.down(ops.cat([gated, self.two(x)], axis=1))


def shard_odd_mlp(model: OddMLP, **options: Any) -> Any:
    """Three units: up, even, and the root with the rest."""
    fully_shard(model.up, **options)
    fully_shard(model.even, **options)
    return fully_shard(model, **options)


def twin(make: Callable[[], nn.Cell]) -> tuple[nn.Cell, nn.Cell]:
    """Two cells with equal values."""
    ms.set_seed(0)
    reference = make()
    other = make()
    values = {name: p.asnumpy() for name, p in reference.parameters_and_names()}
    for name, p in other.parameters_and_names():
        p.set_data(Tensor(values[name].copy()))
    return reference, other


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "nn.SGD": lambda params: nn.SGD(params, 0.05, momentum=0.9),
    "nn.Momentum": lambda params: nn.Momentum(params, 0.05, 0.9),
    "nn.Adam": lambda params: nn.Adam(params, 0.01),
    "nn.AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 0.01, weight_decay=0.1),
    "SGD": lambda params: optim.SGD(params, 0.05, momentum=0.9),
    "Adam": lambda params: optim.Adam(params, 0.01),
    "AdamW": lambda params: optim.AdamW(params, 0.01),
}


def tolerances(optimizer: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """``(rtol, atol)`` of design.md in float32: for losses and gradients, and for parameters."""
    return (1e-5, 1e-6), ((1e-4, 1e-5) if "Adam" in optimizer else (1e-5, 1e-6))


def mesh_of(world_size: int, replicas: int = 1) -> DeviceMesh:
    """1-D, or ``(replicate, shard)`` when there are replicas."""
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def float_batches(steps: int, features: int = 8) -> Iterator[Tensor]:
    generator = np.random.default_rng(1)
    for _ in range(steps):
        yield Tensor(generator.standard_normal((GLOBAL_BATCH, features)).astype(np.float32))


def own_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    rows = batch.shape[0] // world_size
    return batch[rank * rows : (rank + 1) * rows].copy()


def square_loss(model: Any, batch: Tensor) -> Tensor:
    return ops.square(model(batch)).mean()


def gradients(style: str, model: nn.Cell, loss_of: Callable[[Any, Any], Tensor], batch: Any) -> tuple[Tensor, Any]:
    """Loss and the gradients of the trainable parameters, ``None`` where there is none, in one of the two styles."""
    params = model.trainable_params()
    if style == "value_and_grad":
        return ms.value_and_grad(lambda: loss_of(model, batch), None, params)()
    loss: Any = loss_of(model, batch)
    loss.backward()
    grads = tuple(p.grad for p in params)
    for p in params:
        p.grad = None
    return loss, grads


def full(tensor: Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).asnumpy()


def carry_by(carrier: str) -> None:
    """``"mccl"`` or ``"gloo"``: what carries this process's collectives from now on."""
    if carrier == "gloo":
        enable_gloo(timeout=datetime.timedelta(seconds=30))


def expected_part(tensor: Any, whole: np.ndarray) -> np.ndarray:
    """The part of a whole array that a rank must hold of a sharded tensor, cut by numpy at the rank's own offset.

    For placements of dim 0 without tensor parallelism, as all models here have.
    """
    ranks = tensor.device_mesh.shape[-1]
    rows = -(-whole.shape[0] // ranks)
    start = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1) * rows
    return whole[start : start + rows]


def assert_same_parts(names: list[str], actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Every rank compares the rows that it holds; together they hold all."""
    for name, tensor, other in zip(names, actual, expected, strict=True):
        part = expected_part(tensor, other.asnumpy())
        np.testing.assert_allclose(tensor.to_local().asnumpy(), part, rtol=rtol, atol=atol, err_msg=name)


def mean_over_ranks(value: Tensor, world_size: int) -> float:
    group = group_of(tuple(range(world_size)))
    return float(all_reduce(value.reshape((1,)), group).item()) / world_size


def assert_same_parameters(model: nn.Cell, reference: nn.Cell, rtol: float, atol: float) -> None:
    expected = dict(reference.parameters_and_names())
    actual = dict(model.parameters_and_names())
    assert list(actual) == list(expected)
    for name, param in actual.items():
        np.testing.assert_allclose(full(param), full(expected[name]), rtol=rtol, atol=atol, err_msg=name)


def assert_no_even_claim(model: nn.Cell, shards: int) -> None:
    """No ``Shard(0)`` on a parameter whose rows do not divide."""
    for name, param in model.parameters_and_names():
        if isinstance(param, DTensor) and param.shape[0] % shards:
            assert not any(isinstance(placement, Shard) for placement in param.placements), name


def padding_of(model: nn.Cell) -> list[np.ndarray]:
    """Every parameter's padding in this rank's communication storage."""
    found = []
    for _, cell in model.cells_and_names():
        state = cell.__dict__.get("_raggedshard_state")
        if state is not None and state.group is not None:
            for p in state.group.params:
                found.append(p._sharded_param_data.asnumpy()[int(np.prod(p.sharded_size)) :])
    return found


def train_beside(
    rank: int,
    world_size: int,
    sharded: nn.Cell,
    reference: nn.Cell,
    optimizer: str,
    batches: Iterator[Any],
    style: str,
    loss_of: Callable[[Any, Any], Tensor] = square_loss,
) -> list[float]:
    """Step both models and compare losses, every gradient and every parameter after each step; returns the losses."""
    if style == "backward":
        with enable_mindspore_backward_compact():
            return _train_beside(rank, world_size, sharded, reference, optimizer, batches, style, loss_of)
    return _train_beside(rank, world_size, sharded, reference, optimizer, batches, style, loss_of)


def _train_beside(
    rank: int,
    world_size: int,
    sharded: nn.Cell,
    reference: nn.Cell,
    optimizer: str,
    batches: Iterator[Any],
    style: str,
    loss_of: Callable[[Any, Any], Tensor],
) -> list[float]:
    grad_tolerance, param_tolerance = tolerances(optimizer)
    params = sharded.trainable_params()
    own, theirs = OPTIMIZERS[optimizer](params), OPTIMIZERS[optimizer](reference.trainable_params())
    losses = []
    for batch in batches:
        expected, expected_grads = gradients(style, reference, loss_of, batch)
        loss, grads = gradients(style, sharded, loss_of, own_part(batch, rank, world_size))
        np.testing.assert_allclose(
            mean_over_ranks(loss, world_size), expected.item(), rtol=grad_tolerance[0], atol=grad_tolerance[1]
        )
        for p, grad, expected_grad in zip(params, grads, expected_grads, strict=True):
            assert (grad is None) == (expected_grad is None), p.name
            assert grad is None or (isinstance(grad, DTensor) and grad.placements == p.placements), p.name
            assert grad is None or grad.shape == p.shape, p.name
        used = [number for number, grad in enumerate(grads) if grad is not None]
        names = [params[number].name for number in used]
        assert_same_parts(names, [grads[n] for n in used], [expected_grads[n] for n in used], *grad_tolerance)
        own(grads)
        theirs(expected_grads)
        assert_same_parts([p.name for p in params], params, reference.trainable_params(), *param_tolerance)
        losses.append(float(expected.item()))
    assert_same_parameters(sharded, reference, *param_tolerance)
    assert all(not padding.any() for padding in padding_of(sharded))
    return losses
