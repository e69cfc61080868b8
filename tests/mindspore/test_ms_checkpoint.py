"""Checkpoints on MindSpore: training goes on from them on any number of ranks, and torch reads and writes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters

import raggedshard.mindspore as rm
import raggedshard.torch as rt
from harness import run_distributed
from ms_training import (
    LIMIT,
    OPTIMIZERS,
    OddMLP,
    float_batches,
    full,
    gradients,
    mean_over_ranks,
    mesh_of,
    own_part,
    shard_odd_mlp,
    square_loss,
)
from raggedshard.mindspore import DTensor, Partial, RaggedShard, Replicate, Shard, checkpoint, distribute_tensor

STEPS = 5


def start(world_size: int, seed: int, optimizer: str, replicas: int = 1) -> tuple[nn.Cell, Any]:
    ms.set_seed(seed)
    model = shard_odd_mlp(OddMLP(), mesh=mesh_of(world_size, replicas))
    return model, OPTIMIZERS[optimizer](model.trainable_params())


def train(model: nn.Cell, optimizer: Any, batches: list[Tensor], rank: int, world_size: int) -> dict[str, np.ndarray]:
    """Train on global batches; the losses, parameters and optimizer states afterwards."""
    losses = []
    for batch in batches:
        loss, grads = gradients("value_and_grad", model, square_loss, own_part(batch, rank, world_size))
        optimizer(grads)
        losses.append(mean_over_ranks(loss, world_size))
    states = {f"optimizer.{name}": full(p) for name, p in optimizer.parameters_dict().items()}
    return {"losses": np.array(losses), **{name: full(p) for name, p in model.parameters_and_names()}, **states}


def state_of(model: nn.Cell, optimizer: Any, step: int) -> dict[str, Any]:
    return {"model": model.parameters_dict(), "optimizer": optimizer.parameters_dict(), "step": step}


def save_at_half(rank: int, world_size: int, path: Path, optimizer: str, replicas: int) -> dict[str, np.ndarray]:
    batches = list(float_batches(2 * STEPS))
    model, own = start(world_size, 0, optimizer, replicas)
    train(model, own, batches[:STEPS], rank, world_size)
    checkpoint.save(state_of(model, own, STEPS), path)
    return train(model, own, batches[STEPS:], rank, world_size)


def resume(rank: int, world_size: int, path: Path, optimizer: str) -> dict[str, np.ndarray]:
    """Load into a model and an optimizer that trained from other values, and train the second half."""
    batches = list(float_batches(2 * STEPS))
    model, own = start(world_size, 1, optimizer)
    train(model, own, batches[:1], rank, world_size)
    state = state_of(model, own, 0)
    checkpoint.load(state, path)
    assert state["step"] == STEPS
    return train(model, own, batches[STEPS:], rank, world_size)


@pytest.mark.parametrize(
    ("optimizer", "before", "replicas", "after"),
    [("AdamW", 4, 1, (4, 3, 1)), ("AdamW", 4, 2, (2,)), ("nn.Adam", 2, 1, (3,)), ("AdamW", 1, 1, (4,))],
    ids=str,
)
def test_the_next_steps_equal_those_of_the_run_that_never_stopped(tmp_path, optimizer, before, replicas, after):
    path = tmp_path / "checkpoint"
    run = {"framework": "mindspore", "timeout": LIMIT}
    expected = run_distributed(save_at_half, before, path, optimizer, replicas, **run)[0]
    for world_size in after:
        for actual in run_distributed(resume, world_size, path, optimizer, **run):
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


SHAPES = {"odd": (7, 3), "few": (2, 5), "none": (0, 4), "even": (12, 2), "vector": (13,)}
PLAIN: dict[str, Any] = {
    "float16": np.arange(5, dtype=np.float16),
    "int64": np.array([2**62 + 1, -3]),
    "bool": np.array([[True], [False]]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.empty((0, 2), np.float32),
}


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 0.25


def bfloat16_values() -> np.ndarray:
    return np.array([1.5, -2.0, 3.25], np.float32)


def chunked(shape: tuple[int, ...], ranks: int, framework: Any) -> Any:
    """The placement that ``fully_shard`` gives rows on ``ranks`` ranks."""
    size = -(-shape[0] // ranks)
    units = [max(min(size, shape[0] - rank * size), 0) for rank in range(ranks)]
    return framework.Shard(0) if len(set(units)) == 1 else framework.RaggedShard((0,), tuple(units))


def arrays(empty: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """What is sharded, what is plain, and what becomes bfloat16; zeros if ``empty``."""
    sharded = {name: numbered(shape) for name, shape in SHAPES.items()}
    change = np.zeros_like if empty else np.copy
    return (
        {name: change(value) for name, value in sharded.items()},
        {name: change(value) for name, value in PLAIN.items()},
        change(bfloat16_values()),
    )


def mindspore_tensor(value: np.ndarray) -> Tensor:
    return Tensor(value) if value.size else ms.mint.empty(value.shape)


def mindspore_state(world_size: int, empty: bool = False) -> dict[str, Any]:
    mesh = mesh_of(world_size)
    sharded, plain, bfloat16 = arrays(empty)
    tensors = {name: mindspore_tensor(value) for name, value in sharded.items()}
    return {
        "sharded": {
            name: distribute_tensor(tensor, mesh, [chunked(tensor.shape, world_size, rm)])
            for name, tensor in tensors.items()
        },
        "plain": {
            **{name: mindspore_tensor(value) for name, value in plain.items()},
            "bfloat16": Tensor(bfloat16, ms.bfloat16),
        },
    }


def torch_state(world_size: int, empty: bool = False) -> dict[str, Any]:
    mesh = rt.init_device_mesh("cpu", (world_size,))
    sharded, plain, bfloat16 = arrays(empty)
    return {
        "sharded": {
            name: rt.distribute_tensor(torch.from_numpy(value), mesh, [chunked(value.shape, world_size, rt)])
            for name, value in sharded.items()
        },
        "plain": {
            **{name: torch.from_numpy(value) for name, value in plain.items()},
            "bfloat16": torch.from_numpy(bfloat16).bfloat16(),
        },
    }


def check(state: dict[str, Any], array_of: Any) -> None:
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(array_of(state["sharded"][name].full_tensor()), numbered(shape), err_msg=name)
    for name, value in PLAIN.items():
        found = array_of(state["plain"][name])
        assert found.dtype == value.dtype and found.shape == value.shape, name
        np.testing.assert_array_equal(found, value, err_msg=name)
    np.testing.assert_array_equal(array_of(state["plain"]["bfloat16"]), bfloat16_values())


def mindspore_array(tensor: Tensor) -> np.ndarray:
    return (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()


def torch_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def save_mindspore(rank: int, world_size: int, path: Path) -> None:
    checkpoint.save(mindspore_state(world_size), path)


def load_mindspore(rank: int, world_size: int, path: Path) -> None:
    state = mindspore_state(world_size, empty=True)
    checkpoint.load(state, path)
    check(state, mindspore_array)


def save_torch(rank: int, world_size: int, path: Path) -> None:
    rt.checkpoint.save(torch_state(world_size), path)


def load_torch(rank: int, world_size: int, path: Path) -> None:
    state = torch_state(world_size, empty=True)
    rt.checkpoint.load(state, path)
    check(state, torch_array)


def test_either_framework_loads_what_the_other_saved(tmp_path):
    run_distributed(save_mindspore, 3, tmp_path / "ms", framework="mindspore", timeout=LIMIT)
    run_distributed(load_mindspore, 2, tmp_path / "ms", framework="mindspore", timeout=LIMIT)
    run_distributed(load_torch, 4, tmp_path / "ms", timeout=LIMIT)
    run_distributed(save_torch, 3, tmp_path / "torch", timeout=LIMIT)
    run_distributed(load_mindspore, 4, tmp_path / "torch", framework="mindspore", timeout=LIMIT)


def refuse_and_leave_alone(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    values = {"w": distribute_tensor(Tensor(numbered((5, 2))), mesh, [RaggedShard((0,), (3, 2))]), "n": 1}
    checkpoint.save(values, path)
    terms = DTensor.from_local(Tensor(numbered((2,))), mesh, [Partial()])
    refused = [
        (lambda: checkpoint.save({"t": terms}, path), ValueError, "'t'.*reduce it first"),
        (lambda: checkpoint.save({"t": object()}, path), TypeError, "'t'.*object"),
        (lambda: checkpoint.load({**values, "more": 1}, path), checkpoint.CheckpointError, "'more'"),
        (lambda: checkpoint.load({"n": 1}, path), checkpoint.CheckpointError, "'w' of the checkpoint"),
        (
            lambda: checkpoint.load({"w": Tensor(numbered((5, 3))), "n": 1}, path),
            checkpoint.CheckpointError,
            r"'w' has shape \(5, 2\)",
        ),
        (
            lambda: checkpoint.load({"w": Tensor(numbered((5, 2))).astype(ms.float16), "n": 1}, path),
            checkpoint.CheckpointError,
            "'w' has dtype F32",
        ),
    ]
    for use, error, message in refused:
        with pytest.raises(error, match=message):
            use()
    checkpoint.load(values, path)
    np.testing.assert_array_equal(values["w"].full_tensor().asnumpy(), numbered((5, 2)))


def test_what_cannot_be_saved_or_loaded_is_refused_by_its_key(tmp_path):
    run_distributed(refuse_and_leave_alone, 2, tmp_path / "checkpoint", framework="mindspore", timeout=LIMIT)


def load_deferred(rank: int, world_size: int, path: Path) -> None:
    mesh = mesh_of(world_size)
    trained = shard_odd_mlp(OddMLP(), mesh=mesh)
    checkpoint.save(trained.parameters_dict(), path)
    with no_init_parameters():
        model = OddMLP()
    shard_odd_mlp(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"'down\.bias'.*deferred"):
        checkpoint.save(model.parameters_dict(), path)
    checkpoint.load(model.parameters_dict(), path)
    batch = next(float_batches(1))
    np.testing.assert_array_equal(model(batch).asnumpy(), trained(batch).asnumpy())


def test_parameters_whose_initialisation_was_deferred_take_loaded_values(tmp_path):
    run_distributed(load_deferred, 3, tmp_path / "checkpoint", framework="mindspore", timeout=LIMIT)


def replicated_and_views(rank: int, world_size: int, path: Path) -> None:
    """A replicated DTensor, one cut by columns, and a Parameter of no unit."""
    mesh = mesh_of(world_size)
    whole = numbered((4, 6))
    state = {
        "same": distribute_tensor(Tensor(whole), mesh, [Replicate()]),
        "columns": distribute_tensor(Tensor(whole), mesh, [Shard(1)]),
        "plain": Parameter(Tensor(whole), name="plain"),
    }
    checkpoint.save(state, path)
    for tensor in state.values():
        tensor.set_data(Tensor(whole * 0))
    checkpoint.load(state, path)
    for name, tensor in state.items():
        np.testing.assert_array_equal(full(tensor), whole, err_msg=name)


def test_other_layouts_and_plain_parameters(tmp_path):
    run_distributed(replicated_and_views, 2, tmp_path / "checkpoint", framework="mindspore", timeout=LIMIT)
