"""state_dict and load_state_dict move the sharded values, and Parameters stay the ones that the optimizer holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate

from harness import run_distributed, world_sizes
from raggedshard.torch import FSDPModule, fully_shard
from training import (
    OddMLP,
    Pair,
    assert_same_parameters,
    dtensors,
    full,
    mesh_of,
    on_own_rows,
    rows_of,
    shard_odd_mlp,
)
from units import all_params, local_of, padding


def odd_mlp(seed: int = 0) -> OddMLP:
    torch.manual_seed(seed)
    return OddMLP().double()


def sharded_odd_mlp(world_size: int, seed: int = 0, replicas: int = 1, **options: Any) -> FSDPModule:
    return shard_odd_mlp(odd_mlp(seed), mesh=mesh_of(world_size, replicas), **options)


def assert_storage_holds(model: nn.Module) -> None:
    """The communication storage starts with the shard that the optimizer holds, and ends with zeros."""
    for p in all_params(model):
        local = local_of(p)
        data = p._sharded_param_data
        assert data.dtype == local.dtype and data.numel() == p.padded_sharded_param_size.numel()
        assert data.data_ptr() == local.data_ptr() or not local.numel()
        assert torch.equal(data[: local.numel()], local.reshape(-1)), p.name
        assert not padding(p).any(), p.name


# ---- saving


def save_at_any_time(rank, world_size, replicas):
    """After a forward some parameters are whole; what state_dict gives is sharded all the same."""
    model = sharded_odd_mlp(world_size, replicas=replicas, reshard_after_forward=False)
    expected = odd_mlp().state_dict()
    loss = None
    for moment in ("before", "after forward", "after backward", "inference"):
        if moment == "after forward":
            loss = on_own_rows(model, rank)
        elif moment == "after backward":
            assert loss is not None
            loss.backward()  # works on what was resharded in between
        elif moment == "inference":
            with torch.no_grad():
                on_own_rows(model, rank)
        state = model.state_dict()
        assert list(state) == list(expected)
        for name, value in state.items():
            assert isinstance(value, DTensor) and value.shape == expected[name].shape
            assert torch.equal(value.full_tensor(), expected[name]), (moment, name)
            assert value.to_local().data_ptr() == dtensors(model)[name].to_local().data_ptr()
        part = model.get_submodule("up").state_dict()
        assert list(part) == ["weight", "bias"] and all(isinstance(value, DTensor) for value in part.values())


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_state_dict_is_sharded_at_any_time(world_size, replicas):
    run_distributed(save_at_any_time, world_size, replicas)


# ---- loading


def sharded_values(world_size: int, replicas: int) -> dict[str, Any]:
    return sharded_odd_mlp(world_size, seed=1, replicas=replicas).state_dict()


def full_values(world_size: int, replicas: int) -> dict[str, Any]:
    return odd_mlp(seed=1).state_dict()


def replicated_values(world_size: int, replicas: int) -> dict[str, Any]:
    mesh = mesh_of(world_size, replicas)
    values = odd_mlp(seed=1).state_dict()
    return {name: distribute_tensor(v, mesh, [TorchReplicate()] * mesh.ndim) for name, v in values.items()}


def load(rank, world_size, replicas, values, assign, when):
    """Values of another seed replace those that the optimizer holds; training goes on as without sharding."""
    model = sharded_odd_mlp(world_size, replicas=replicas)
    pair = Pair(rank, world_size, model, odd_mlp())
    held = list(model.parameters())
    placements = [p.placements for p in dtensors(model).values()]
    if when == "after training":
        pair.train(on_own_rows)
    elif when == "after forward":
        on_own_rows(model, rank)
    state = values(world_size, replicas)
    before = dict(state)
    assert not any(model.load_state_dict(state, assign=assign))
    assert all(state[name] is before[name] for name in before), "the caller's values were replaced"
    pair.reference.load_state_dict(odd_mlp(seed=1).state_dict())
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert [p.placements for p in dtensors(model).values()] == placements
    assert_storage_holds(model)
    assert_same_parameters(model, pair.reference, 0, 0)
    pair.train(on_own_rows)
    assert_storage_holds(model)


@pytest.mark.parametrize("values", [sharded_values, full_values, replicated_values])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(values, assign):
    for world_size, replicas in ((1, 1), (3, 1), (4, 2)):
        for when in ("at once", "after forward", "after training"):
            run_distributed(load, world_size, replicas, values, assign, when)


def load_into_parts(rank, world_size, assign):
    """Into a module that is no unit, and into a unit that is not the root."""
    model = sharded_odd_mlp(world_size)
    pair = Pair(rank, world_size, model, odd_mlp())
    held = list(model.parameters())
    for step, name in enumerate(("up", "down", "mid")):
        other = sharded_odd_mlp(world_size, seed=step + 1)
        model.get_submodule(name).load_state_dict(other.get_submodule(name).state_dict(), assign=assign)
        pair.reference.get_submodule(name).load_state_dict(odd_mlp(seed=step + 1).get_submodule(name).state_dict())
        pair.train(on_own_rows, steps=1)
        assert all(a is b for a, b in zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_a_part(assign):
    run_distributed(load_into_parts, 3, assign)


def load_what_does_not_fit(rank, world_size, values):
    model = sharded_odd_mlp(world_size)
    state = values(world_size, 1)
    missing = {name: value for name, value in state.items() if name != "even.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"even\.bias"'):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"more"'):
        model.load_state_dict({**state, "more": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"size mismatch for mid\.weight.*\[5, 8\].*\[5, 7\]"):
        model.load_state_dict({**state, "mid.weight": torch.ones(5, 8)})
    result = model.load_state_dict({**missing, "more": torch.ones(3)}, strict=False)
    assert result.missing_keys == ["even.bias"] and result.unexpected_keys == ["more"]
    # As without sharding, what did fit was loaded before the error.
    assert_same_parameters(model, odd_mlp(seed=1), 0, 0)


@pytest.mark.parametrize("values", [sharded_values, full_values])
def test_what_does_not_fit_raises_as_without_sharding(values):
    run_distributed(load_what_does_not_fit, 3, values)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens))) * self.scale


def tied_loss(model: nn.Module, rank: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.tensor([0, 2, 4, 6])), torch.tensor([1, 6, 5, rank]))


def load_tied(rank, world_size, assign):
    torch.manual_seed(0)
    reference = Tied().double()
    model: Any = fully_shard(copy.deepcopy(reference), mesh=mesh_of(world_size))
    pair = Pair(rank, world_size, model, reference)
    pair.train(tied_loss)
    state = {name: full(value).clone() for name, value in model.state_dict().items()}
    assert set(state) == {"embedding.weight", "head.weight", "scale"}
    pair.train(tied_loss)
    model.load_state_dict(state, assign=assign)
    reference.load_state_dict(state)
    assert model.head.weight is model.embedding.weight
    pair.train(tied_loss)


@pytest.mark.parametrize("assign", [False, True])
def test_tied_weights_stay_tied(assign):
    run_distributed(load_tied, 3, assign)


# ---- the optimizer's Parameters


def keep_identity(rank, world_size):
    model = sharded_odd_mlp(world_size)
    held = dict(model.named_parameters())

    def check(what: str) -> None:
        now = dict(model.named_parameters())
        assert list(now) == list(held)
        assert all(now[name] is held[name] for name in held), what
        assert_storage_holds(model)

    check("fully_shard")
    on_own_rows(model, rank).backward()
    check("lazy init")
    model.to(torch.float32)
    check("to(float32)")
    model.bfloat16()
    check("bfloat16")
    model.double()
    check("double")
    model.to("cpu")
    check("to(cpu)")
    model.load_state_dict(sharded_values(world_size, 1))
    check("load_state_dict")
    model.load_state_dict(full_values(world_size, 1), assign=True)
    check("load_state_dict(assign=True)")
    model.to_empty(device="cpu")
    check("to_empty")
    model.load_state_dict(full_values(world_size, 1))
    assert_same_parameters(model, odd_mlp(seed=1), 0, 0)


@world_sizes(1, 4)
def test_parameters_keep_their_identity(world_size):
    run_distributed(keep_identity, world_size)


def cast(rank, world_size, cast_sharded, moment):
    """Casts before training, after a forward, and after steps; the storage and its zeros are built anew."""
    model: Any = shard_odd_mlp(odd_mlp().float(), mesh=mesh_of(world_size))
    reference = odd_mlp().float()
    pair = Pair(rank, world_size, model, reference, optimizer="sgd")
    if moment == "after training":
        for own, optimizer in zip((model, reference), pair.optimizers, strict=True):
            own(rows_of(0).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state.clear()
    elif moment == "after forward":
        model(rows_of(0).float())
    cast_sharded(model)
    reference.double()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    if cast_sharded is cast_root:  # else the units notice at their next forward
        assert_storage_holds(model)
    with torch.no_grad():  # a float32 history, equal but for rounding
        for name, param in model.named_parameters():
            reference.get_parameter(name).copy_(full(param))
    pair.train(on_own_rows, steps=3)
    assert {p._sharded_param_data.dtype for p in all_params(model)} == {torch.float64}
    assert_storage_holds(model)


def cast_root(model: nn.Module) -> None:
    model.to(torch.float64)


def cast_parts(model: nn.Module) -> None:
    """Module by module, also those that are no units themselves."""
    for name in ("up", "mid", "one", "even", "down"):
        model.get_submodule(name).double()


@pytest.mark.parametrize(
    ("cast_sharded", "moment"),
    [
        (cast_root, "at once"),
        (cast_root, "after forward"),
        (cast_root, "after training"),
        (cast_parts, "at once"),
        (cast_parts, "after training"),
    ],
)
def test_dtype_casts_after_sharding(cast_sharded, moment):
    run_distributed(cast, 4, cast_sharded, moment)


def start_on_meta(rank, world_size, replicas, materialise):
    with torch.device("meta"):
        model: Any = OddMLP().double()
    shard_odd_mlp(model, mesh=mesh_of(world_size, replicas))
    held = list(model.parameters())
    assert all(p.is_meta for p in held)
    materialise(model, world_size, replicas)
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    pair = Pair(rank, world_size, model, odd_mlp(seed=1))
    assert_same_parameters(model, pair.reference, 0, 0)
    pair.train(on_own_rows)
    assert_storage_holds(model)


def fill_by_load(model: nn.Module, world_size: int, replicas: int) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(full_values(world_size, replicas))


def fill_by_assign(model: nn.Module, world_size: int, replicas: int) -> None:
    model.load_state_dict(full_values(world_size, replicas), assign=True)


def fill_by_sharded_assign(model: nn.Module, world_size: int, replicas: int) -> None:
    model.load_state_dict(sharded_values(world_size, replicas), assign=True)


def fill_in_place(model: nn.Module, world_size: int, replicas: int) -> None:
    """After to_empty of one module after the other; the values come through the Parameters."""
    for name in ("up", "mid", "one", "even", "down"):
        model.get_submodule(name).to_empty(device="cpu")
    with torch.no_grad():
        for name, value in sharded_values(world_size, replicas).items():
            model.get_parameter(name).copy_(value)


Fill = Callable[[nn.Module, int, int], None]


@pytest.mark.parametrize("fill", [fill_by_load, fill_by_assign, fill_by_sharded_assign, fill_in_place])
def test_a_model_made_on_the_meta_device(fill: Fill):
    for world_size, replicas in ((3, 1), (4, 2)):
        run_distributed(start_on_meta, world_size, replicas, fill)
