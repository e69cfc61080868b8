"""Tensor and sequence parallelism on MindSpore, alone and under FSDP and HSDP: like the unsharded cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from harness import run_distributed
from ms_training import (
    GLOBAL_BATCH,
    LIMIT,
    OPTIMIZERS,
    assert_same_parameters,
    float_batches,
    full,
    gradients,
    mean_over_ranks,
    own_part,
    padding_of,
    square_loss,
    tolerances,
    twin,
)
from raggedshard.mindspore import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    enable_mindspore_backward_compact,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)

NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}
VOCABULARY, WIDTH, LENGTH = 13, 6, 5


def mesh_of_shape(mesh_shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", mesh_shape, mesh_dim_names=NAMES[len(mesh_shape)])


def shard(units: list[nn.Cell], mesh: DeviceMesh) -> None:
    """fully_shard over all but the last dim, if there are others."""
    if mesh.ndim > 1:
        for unit in units:
            fully_shard(unit, mesh=mesh[NAMES[mesh.ndim][:-1]])


class TwoLayers(nn.Cell):
    """Without a dim that 2 or 3 ranks divide: 8 -> 7 -> 5."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(8, 7)
        self.down = nn.Dense(7, 5)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x)))


def shard_two_layers(model: TwoLayers, mesh: DeviceMesh) -> TwoLayers:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard([model.up, model], mesh)
    return model


def train(
    rank: int,
    mesh_shape: tuple[int, ...],
    style: str,
    sharded: nn.Cell,
    reference: nn.Cell,
    batches: Iterator[Any],
    loss_of: Callable[[Any, Any], Tensor],
    own_batch: Callable[[Any, int, int], Any] = own_part,
    optimizer: str = "SGD",
) -> list[float]:
    """Step both cells; losses, every gradient and every parameter are the same, and gradients lie as parameters do.

    A step's gradients tell whether the parameters before it were right; the last ones are compared themselves.
    """
    grad_tolerance, param_tolerance = tolerances(optimizer)
    params, whole_params = sharded.trainable_params(), reference.trainable_params()
    own, theirs = OPTIMIZERS[optimizer](params), OPTIMIZERS[optimizer](whole_params)
    ranks = int(np.prod(mesh_shape))
    tp = mesh_shape[-1]
    losses = []
    with enable_mindspore_backward_compact() if style == "backward" else nullcontext():
        for batch in batches:
            expected, expected_grads = gradients(style, reference, loss_of, batch)
            loss, grads = gradients(style, sharded, loss_of, own_batch(batch, rank // tp, ranks // tp))
            np.testing.assert_allclose(mean_over_ranks(loss, ranks), expected.item(), *grad_tolerance)
            for p, grad, expected_grad in zip(params, grads, expected_grads, strict=True):
                assert isinstance(p, DTensor) and isinstance(grad, DTensor), p.name
                assert grad.placements == p.placements and grad.device_mesh == p.device_mesh, p.name
                np.testing.assert_allclose(full(grad), full(expected_grad), *grad_tolerance, err_msg=p.name)
            own(grads)
            theirs(expected_grads)
            losses.append(float(expected.item()))
    assert_same_parameters(sharded, reference, *param_tolerance)
    assert all(not padding.any() for padding in padding_of(sharded))
    return losses


def train_two_layers(rank, world_size, mesh_shape, style):
    reference, model = twin(TwoLayers)
    shard_two_layers(model, mesh_of_shape(mesh_shape))
    return train(rank, mesh_shape, style, model, reference, float_batches(10), square_loss)


@pytest.mark.parametrize("style", ["value_and_grad", "backward"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 1), (1, 3), (2, 1, 2), (1, 2, 2), (3,)], ids=str)
def test_trains_like_the_unsharded_cell(mesh_shape, style):
    ranks = run_distributed(
        train_two_layers, int(np.prod(mesh_shape)), mesh_shape, style, framework="mindspore", timeout=LIMIT
    )
    assert ranks[0][-1] < ranks[0][0]


class Mixer(nn.Cell):
    """9 columns between its layers, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(WIDTH, 9)
        self.down = nn.Dense(9, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class SequenceModel(nn.Cell):
    """13 words, whose vectors are the output layer too, and 5 tokens: each rank holds 3 or 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixers = nn.CellList([Mixer() for _ in range(2)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = nn.Dense(WIDTH, VOCABULARY)
        self.head.weight = self.embed.embedding_table

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x))


def shard_sequence_model(model: SequenceModel, mesh: DeviceMesh) -> None:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "mixers.*.norm": SequenceParallel(),
        "mixers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "mixers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "mixers.1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    shard([*model.mixers, model], mesh)


def token_batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = np.random.default_rng(4)
    for _ in range(steps):
        tokens = generator.integers(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1)).astype(np.int32)
        yield Tensor(tokens[:, :-1].copy()), Tensor(tokens[:, 1:].copy())


def own_tokens(batch: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    return own_part(batch[0], part, parts), own_part(batch[1], part, parts)


def cross_entropy(model: nn.Cell, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ops.cross_entropy(model(batch[0]).reshape((-1, VOCABULARY)), batch[1].reshape((-1,)))


def train_sequence_model(rank, world_size, mesh_shape, style):
    reference, model = twin(SequenceModel)
    shard_sequence_model(model, mesh_of_shape(mesh_shape))
    return train(rank, mesh_shape, style, model, reference, token_batches(10), cross_entropy, own_tokens)


@pytest.mark.parametrize("style", ["value_and_grad", "backward"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 2, 2), (2,)], ids=str)
def test_sequence_parallel_trains_like_the_unsharded_cell(mesh_shape, style):
    run_distributed(
        train_sequence_model, int(np.prod(mesh_shape)), mesh_shape, style, framework="mindspore", timeout=LIMIT
    )
