"""Tensor and sequence parallelism on MindSpore, alone and under FSDP and HSDP: like the unsharded cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

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
    RaggedShard,
    RaggedStridedShard,
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
    """Without a dim that 2 or 3 ranks divide: 5 -> 7 -> 5, several times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.up = nn.Dense(5, 7)
        self.down = nn.Dense(7, 5)
        self.times = times

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.down(ops.tanh(self.up(x)))
        return x


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


def train_two_layers(rank, world_size, mesh_shape, style, times):
    reference, model = twin(lambda: TwoLayers(times))
    shard_two_layers(model, mesh_of_shape(mesh_shape))
    return train(rank, mesh_shape, style, model, reference, float_batches(10, 5), square_loss)


@pytest.mark.parametrize(
    ("mesh_shape", "style", "times"),
    [
        ((2, 2), "value_and_grad", 1),
        ((2, 2), "backward", 1),
        ((2, 1, 2), "value_and_grad", 1),
        ((1, 2, 2), "backward", 1),
        ((3, 1), "backward", 2),
        ((1, 3), "value_and_grad", 2),
        ((3,), "value_and_grad", 2),
        ((3,), "backward", 2),
    ],
    ids=str,
)
def test_trains_like_the_unsharded_cell(mesh_shape, style, times):
    ranks = run_distributed(
        train_two_layers, int(np.prod(mesh_shape)), mesh_shape, style, times, framework="mindspore", timeout=LIMIT
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
        self.head = nn.Dense(WIDTH, VOCABULARY, has_bias=False)
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


def layouts_of_norms(model: SequenceModel) -> list[tuple[Any, ...]]:
    """The placements and global shapes of each norm's input and output, as they come."""
    seen = []

    def note(cell: nn.Cell, args: tuple[Any, ...], output: Any) -> None:
        seen.append(tuple((x.placements, x.shape, x.to_local().shape) for x in (args[0], output)))

    for mixer in model.mixers:
        mixer.norm.register_forward_hook(note)
    return seen


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


@pytest.mark.parametrize(
    ("mesh_shape", "style"),
    [((2, 2), "value_and_grad"), ((1, 2, 2), "backward"), ((2,), "backward")],
    ids=str,
)
def test_sequence_parallel_trains_like_the_unsharded_cell(mesh_shape, style):
    run_distributed(
        train_sequence_model, int(np.prod(mesh_shape)), mesh_shape, style, framework="mindspore", timeout=LIMIT
    )


def train_composed(rank, world_size, mesh_shape):
    ms.set_seed(3)
    reference = SequenceModel()
    ms.set_seed(3)
    with nn.utils.no_init_parameters():
        model = SequenceModel()
    shard_sequence_model(model, mesh_of_shape(mesh_shape))
    for mixer in model.mixers:
        mixer.recompute(use_reentrant=False)
    model.set_forward_prefetch_modules([model.mixers[0]])
    model.mixers[0].set_forward_prefetch_modules([model.mixers[1]])
    model.mixers[1].set_backward_prefetch_modules([model.mixers[0]])
    return train(rank, mesh_shape, "backward", model, reference, token_batches(4), cross_entropy, own_tokens, "AdamW")


def test_prefetch_recomputation_and_deferred_initialisation():
    run_distributed(train_composed, 4, (2, 2), framework="mindspore", timeout=LIMIT)


def layouts_kept(rank, world_size, mesh_shape):
    """The norms' inputs and outputs without and with fully_shard."""
    seen = []
    for mesh in (mesh_of_shape(mesh_shape)["tp"], mesh_of_shape(mesh_shape)):
        model = SequenceModel()
        shard_sequence_model(model, mesh)
        seen.append(layouts_of_norms(model))
        for tokens, _ in token_batches(1):
            model(own_part(tokens, rank // 2, world_size // 2))
    assert seen[0] == seen[1]
    return seen[0]


def test_fully_shard_leaves_the_layouts_of_activations_alone():
    for rank, (first, _) in enumerate(run_distributed(layouts_kept, 4, (2, 2), framework="mindspore", timeout=LIMIT)):
        expected = ((Shard(1),), (6, LENGTH, WIDTH), (6, (3, 2)[rank % 2], WIDTH))
        assert first == (expected, expected)


class Norms(nn.Cell):
    """Two cells with parameters and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.scale = Parameter(Tensor(np.linspace(1, 2, 7, dtype=np.float32)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return self.second(ops.tanh(self.first(x))) * self.scale.mean()


class NormsAndHead(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norms = Norms()
        self.head = nn.Dense(WIDTH, 5)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.norms(x))


def train_any_cell(rank, world_size, mesh_shape):
    reference, model = twin(NormsAndHead)
    mesh = mesh_of_shape(mesh_shape)
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "norms": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    shard([model.norms.first, model.norms, model], mesh)
    return train(rank, mesh_shape, "backward", model, reference, float_batches(3, WIDTH), square_loss)


def test_sequence_parallel_of_a_cell_with_units_inside():
    run_distributed(train_any_cell, 4, (2, 2), framework="mindspore", timeout=LIMIT)


def placements(rank, world_size, mesh_shape):
    model = shard_two_layers(TwoLayers(), mesh_of_shape(mesh_shape))
    model.up.unshard()
    weight = model.up.weight
    assert isinstance(weight, DTensor) and weight.placements == (Shard(0),) and weight.device_mesh.ndim == 1
    assert weight.to_local().shape == ((4, 5), (3, 5))[rank % 2]
    model.up.reshard()
    with enable_mindspore_backward_compact():
        square_loss(model, next(float_batches(1, 5))).backward()
        assert all(p.grad.placements == p.placements for p in model.trainable_params())
    return {p.name: (p.placements, p.to_local().shape) for p in model.trainable_params()}


def test_placements_state_both_cuts_and_gradients_have_them():
    ranks = run_distributed(placements, 4, (2, 2), framework="mindspore", timeout=LIMIT)
    # Blocks of 4 and 3 rows, each cut in two; ranks are (dp, tp) = 00 01 10 11.
    assert [rank["up.weight"][1] for rank in ranks] == [(2, 5), (2, 5), (2, 5), (1, 5)]
    assert [rank["down.weight"][1] for rank in ranks] == [(3, 4), (3, 3), (2, 4), (2, 3)]
    for rank in ranks:
        for name in ("up.weight", "up.bias"):
            assert rank[name][0] == (RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
        assert rank["down.weight"][0] == (RaggedShard((0,), (3, 2)), Shard(1))
        assert rank["down.bias"][0] == (RaggedShard((0,), (3, 2)), Replicate())


def test_hsdp_puts_replicate_in_front_of_both_cuts():
    for rank in run_distributed(placements, 4, (1, 2, 2), framework="mindspore", timeout=LIMIT):
        assert rank["up.weight"][0] == (Replicate(), RaggedStridedShard((0,), (2, 2, 2, 1), 2), Shard(0))
        assert rank["down.weight"][0] == (Replicate(), RaggedShard((0,), (3, 2)), Shard(1))
