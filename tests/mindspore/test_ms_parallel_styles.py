"""Each tensor-parallel style alone: any sizes and layouts; wrong plans and inputs are refused."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from harness import run_distributed
from ms_training import LIMIT, full, twin
from raggedshard.mindspore import (
    ColwiseParallel,
    DTensor,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from raggedshard.platform.mindspore.redistribute import to_tensor

DENSE_LAYOUTS = [(Replicate(), Shard(-1)), (Shard(1), Replicate()), (Shard(-1), Shard(1)), (Shard(0), Shard(0))]
LAYOUTS = {
    nn.Dense: DENSE_LAYOUTS,
    nn.Embedding: [(Replicate(), Shard(-1)), (Shard(1), Shard(0)), (Shard(0), Replicate())],
}
SIZES = [(7, 4), (4, 7)]
"""Inputs and outputs, or words and columns: on 3 ranks 7 is 3 3 1 and 4 is 2 2 0."""


def part(whole: np.ndarray, layout: Any, rank: int, ranks: int) -> np.ndarray:
    """By numpy alone."""
    if isinstance(layout, Replicate):
        return whole
    chunk = -(-whole.shape[layout.dim] // ranks)
    return np.split(whole, range(chunk, chunk * ranks, chunk), axis=layout.dim)[rank]


def compare_cell(rank, ranks, mesh, kind, sizes, style, layouts):
    """One forward and backward of one cell: output, gradients of the input and of the parameters."""
    generator = np.random.default_rng(0)
    reference, cell = twin(lambda: kind(*sizes))
    parallelize_module(cell, mesh, style(input_layouts=layouts[0], output_layouts=layouts[1]))
    is_dense = kind is nn.Dense
    x = generator.standard_normal((3, 5, sizes[0])) if is_dense else generator.integers(0, sizes[0], (3, 5))
    x = x.astype(np.float32 if is_dense else np.int32)
    weights = generator.standard_normal((3, 5, sizes[1])).astype(np.float32)

    def run(model, x, weights):
        params = model.trainable_params()
        # Not summed up: MindSpore's sum over no elements is garbage, and the gradient is that of the sum anyway.
        differentiate = ms.grad(lambda x: model(x) * to_tensor(weights, ms.float32), 0 if is_dense else None, params)
        return differentiate(Tensor(x)), model(Tensor(x)).asnumpy()

    expected, expected_y = run(reference, x, weights)
    grads, y = run(cell, part(x, layouts[0], rank, ranks), part(weights, layouts[1], rank, ranks))
    close = {"rtol": 1e-5, "atol": 1e-6, "err_msg": f"{style.__name__} of {kind.__name__}{sizes}, {layouts}"}
    np.testing.assert_allclose(y, part(expected_y, layouts[1], rank, ranks), **close)
    if is_dense:
        np.testing.assert_allclose(grads[0].asnumpy(), part(expected[0].asnumpy(), layouts[0], rank, ranks), **close)
        grads, expected = grads[1], expected[1]
    for grad, other in zip(grads, expected, strict=True):
        np.testing.assert_allclose(full(grad), full(other), **close)


def compare_cells(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for kind, layouts_of_kind in LAYOUTS.items():
        for sizes in SIZES:
            for style in (ColwiseParallel, RowwiseParallel):
                for layouts in layouts_of_kind:
                    compare_cell(rank, world_size, mesh, kind, sizes, style, layouts)


def test_any_sizes_and_layouts_of_inputs_and_outputs():
    run_distributed(compare_cells, 3, framework="mindspore", timeout=LIMIT)


class Doubled(nn.Dense):
    def construct(self, x: Tensor) -> Tensor:
        return ops.neg(super().construct(x))


class Pair(nn.Cell):
    """Two cells that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(4, 4), nn.Dense(4, 4)
        self.second.weight = self.first.weight
        self.gelu, self.odd = nn.Dense(4, 4, activation="relu"), Doubled(4, 4)


def refused_plans(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = Pair()
    before = {name: (id(p), type(p)) for name, p in model.parameters_and_names()}
    messages = []
    for on, plan in (
        (mesh, {"first": ColwiseParallel()}),
        (mesh["tp"], {"first": ColwiseParallel(), "frist": ColwiseParallel()}),
        (mesh["tp"], {"first": ColwiseParallel(), "": RowwiseParallel()}),
        (mesh["tp"], {"first": ColwiseParallel(), "gelu": ColwiseParallel()}),
        (mesh["tp"], {"odd": ColwiseParallel()}),
        (mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()}),
        (mesh["tp"], {"first": ColwiseParallel(), "fir*": ColwiseParallel()}),
        (mesh["tp"], {"first": "colwise"}),
    ):
        with pytest.raises(ValueError) as error:
            parallelize_module(model, on, plan)
        messages.append(str(error.value))
    assert {name: (id(p), type(p)) for name, p in model.parameters_and_names()} == before
    fully_shard(model.odd, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"weight.*already.*before fully_shard"):
        parallelize_module(model, mesh["tp"], {"odd": SequenceParallel()})
    return messages


def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing():
    messages = run_distributed(refused_plans, 2, framework="mindspore", timeout=LIMIT)[0]
    for message, words in zip(
        messages,
        (
            ("1-D", "mesh['tp']"),
            ("'frist'", "first"),
            ("RowwiseParallel of cell 'Pair'", "nn.Dense and nn.Embedding"),
            ("'gelu'", "activation"),
            ("'odd'", "Doubled"),
            ("'first.weight' and 'second.weight'", "Shard(dim=0)", "Shard(dim=1)"),
            ("two styles", "'first.weight'"),
            ("'colwise'", "ColwiseParallel()"),
        ),
        strict=True,
    ):
        assert all(word in message for word in words), message


def refused_inputs(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = Tensor(np.ones((3, 4, 4), np.float32))

    def message(style: Any, x: Any, cell: Any = None) -> str:
        cells = nn.CellList([cell or nn.Dense(4, 4)])
        parallelize_module(cells, mesh, {"0": style})
        with pytest.raises((ValueError, RuntimeError)) as error:
            cells[0](x)
        return str(error.value)

    other = DTensor.from_local(x, init_device_mesh("cpu", (world_size, 1)), (Replicate(), Replicate()))
    return [
        message(ColwiseParallel(input_layouts=Shard(3)), x),
        message(ColwiseParallel(), other),
        message(ColwiseParallel(), [1.0]),
        message(RowwiseParallel(), x),  # all columns, where a rank's part is expected
        message(ColwiseParallel(input_layouts=Shard(1)), x[:, : 2 + rank]),
        message(RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), x[:, :1]),
        message(PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)), x),
        message(RowwiseParallel(input_layouts=Replicate()), x[: 2 + rank]),
        message(SequenceParallel(), x, cell=nn.LayerNorm((4,), begin_norm_axis=1)),
    ]


def test_an_input_that_does_not_lie_as_stated_is_refused():
    for messages in run_distributed(refused_inputs, 2, framework="mindspore", timeout=LIMIT):
        for message, words in zip(
            messages,
            (
                ("ColwiseParallel of cell '0'", "Shard(dim=3)", "3 dims"),
                ("cell '0'", "DeviceMesh"),
                ("cell '0'", "list"),
                ("RowwiseParallel of cell '0'", "4 columns", "8 over all ranks", "input_layouts"),
                ("cell '0'", "(2, 3)", "(3, 2)"),
                ("cell '0'", "Shard(dim=1)", "(1, 0)", "pad dim 1"),
                ("PrepareModuleInput of cell '0'", "1 positional inputs", "2 input_layouts"),
                ("(0, 1)", "same batch"),
                ("SequenceParallel of cell '0'", "from dim 1", "sequence_dim=1"),
            ),
            strict=True,
        ):
            assert all(word in message for word in words), message


def test_layouts_other_than_replicate_and_shard_are_refused():
    with pytest.raises(ValueError, match=r"ColwiseParallel: input_layouts is Partial"):
        ColwiseParallel(input_layouts=Partial())
    with pytest.raises(ValueError, match="as many desired layouts"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate())
