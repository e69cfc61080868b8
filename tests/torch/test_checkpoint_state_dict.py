"""torch's ``get_state_dict`` and ``set_state_dict`` on sharded models: full, sharded, broadcast, offloaded, meta."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import run_distributed
from raggedshard.platform.torch.dtensor import ShardedDTensor
from raggedshard.torch import RaggedShard, fully_shard, init_device_mesh
from training import full

LAYOUTS = {
    "fsdp": ((4,), ("shard",)),
    "hsdp": ((2, 2), ("replicate", "shard")),
    "fsdp x tp": ((2, 2), ("shard", "tp")),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def build(layout: str, seed: int, device: str = "cpu", units: tuple[int, ...] | None = None) -> Any:
    """units: of a placement over the flattened dims of ``up.weight``, whose ranks hold several boxes."""
    torch.manual_seed(seed)
    model = Model().to(device)
    shape, names = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in names:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["shard"]
    flattened = None if units is None else RaggedShard((0, 1), units)
    fully_shard(model.up, mesh=mesh, shard_placement_fn=lambda p: flattened if p.ndim == 2 else None)
    return fully_shard(model, mesh=mesh)


def trained(layout: str, units: tuple[int, ...] | None = None) -> tuple[Any, torch.optim.Optimizer]:
    model = build(layout, seed=0, units=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def fresh(layout: str, units: tuple[int, ...] | None = None) -> tuple[Any, torch.optim.Optimizer]:
    model = build(layout, seed=1, units=units)
    return model, torch.optim.AdamW(model.parameters(), lr=0.2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def parts(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a model's or optimizer's state dict, gathered."""
    flat, _ = _state_dict_utils._flatten_state_dict(state)
    return {key: full(value).clone() for key, value in flat.items() if isinstance(value, torch.Tensor)}


def assert_equal(actual: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


def assert_same_training(model: Any, optimizer: Any, other: Any, other_optimizer: Any) -> None:
    """Equal values now and after another step, in the sharded tensors of each."""
    for _ in range(2):
        assert_equal(parts(model.state_dict()), parts(other.state_dict()))
        assert_equal(parts(optimizer.state_dict()), parts(other_optimizer.state_dict()))
        assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
        step(model, optimizer)
        step(other, other_optimizer)


FULL = {
    "every rank": {},
    "not strict": {"strict": False},
    "broadcast": {"broadcast_from_rank0": True},
    "broadcast, offloaded": {"broadcast_from_rank0": True, "cpu_offload": True},
    "broadcast, not strict": {"broadcast_from_rank0": True, "strict": False},
}


def full_states(rank: int, world_size: int, layout: str, units: tuple[int, ...] | None) -> None:
    model, optimizer = trained(layout, units)
    kept = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert all(type(value) is torch.Tensor for value in model_state.values())
    assert_equal({name: model_state[name] for name in kept}, kept)
    for name, options in FULL.items():
        other, other_optimizer = fresh(layout, units)
        given = copy.deepcopy((model_state, optimizer_state))
        if "broadcast_from_rank0" in options and rank:
            given = ({}, {})
        chosen = StateDictOptions(full_state_dict=True, **options)
        set_model_state_dict(other, given[0], options=chosen)
        set_optimizer_state_dict(other, other_optimizer, given[1], options=chosen)
        model_again, optimizer_again = trained(layout, units)
        assert_same_training(other, other_optimizer, model_again, optimizer_again)
        assert all(type(p) is nn.Parameter or isinstance(p, DTensor) for p in other.parameters()), name


CASES = [("fsdp", None), ("hsdp", None), ("fsdp x tp", None), ("fsdp", (3, 5, 0, 6))]


@pytest.mark.parametrize(("layout", "units"), CASES, ids=str)
def test_full_states_are_exact_and_are_taken_back(layout, units):
    run_distributed(full_states, 4, layout, units, timeout=120)


def offloaded_states(rank: int, world_size: int, layout: str) -> None:
    model, optimizer = trained(layout)
    expected = parts(model.state_dict()), parts(get_optimizer_state_dict(model, optimizer))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    given = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        assert_equal(given[0], expected[0])
        assert_equal(parts(given[1]), expected[1])
    else:
        assert given == ({}, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloaded_full_states_are_on_the_first_rank_only(layout):
    run_distributed(offloaded_states, 4, layout)


def into_meta(rank: int, world_size: int, layout: str) -> None:
    model, _ = trained(layout)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for broadcast in (False, True):
        other = build(layout, seed=1, device="meta")
        given = {} if broadcast and rank else dict(whole)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, given, options=options)
        assert_equal(parts(other.state_dict()), parts(model.state_dict()))
        assert all(isinstance(p, ShardedDTensor) for p in other.parameters())
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated")  # torch's own calls
@pytest.mark.filterwarnings("ignore:Multiple backends are registered")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_states_materialise_a_model_on_meta(layout):
    run_distributed(into_meta, 4, layout)


def sharded_states(rank: int, world_size: int, layout: str, units: tuple[int, ...] | None, path: Path) -> None:
    options: dict[str, Any]
    for options in ({}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}):
        model, optimizer = trained(layout, units)
        chosen = StateDictOptions(**options)
        given = copy.deepcopy(get_state_dict(model, optimizer, options=chosen))
        other, other_optimizer = fresh(layout, units)
        set_state_dict(other, other_optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=chosen)
        assert_same_training(other, other_optimizer, model, optimizer)
    for save in ("save", "async_save"):
        model, optimizer = trained(layout, units)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = getattr(dcp, save)(
            {"model": model_state, "optimizer": optimizer_state},
            checkpoint_id=path / save,
            process_group=dist.new_group(),  # of its own: an asynchronous save communicates while training does
        )
        if save == "async_save":
            again = trained(layout, units)  # as a loop would, go on while the files are written
            step(model, optimizer)
            saved.result()
            model, optimizer = again
        other, other_optimizer = fresh(layout, units)
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path / save)
        set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_same_training(other, other_optimizer, model, optimizer)


@pytest.mark.parametrize(("layout", "units"), CASES, ids=str)
def test_sharded_states_survive_copies_and_files(layout, units, tmp_path):
    run_distributed(sharded_states, 4, layout, units, tmp_path, timeout=120)


def missing_and_unknown_keys(rank: int, world_size: int) -> None:
    model, _ = trained("fsdp")
    whole: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    short = {name: value for name, value in whole.items() if name != "up.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight|up\.weight.*Missing"):
        set_model_state_dict(build("fsdp", 1), {**short, "x": torch.ones(2)}, options=StateDictOptions())
    other = build("fsdp", 1)
    before = full(other.up.weight).detach().clone()
    options = StateDictOptions(full_state_dict=True, strict=False)
    result = set_model_state_dict(other, {**short, "x": torch.ones(2)}, options=options)
    assert result.unexpected_keys == ["x"]
    assert torch.equal(full(other.up.weight), before)
    assert torch.equal(full(other.down.weight), whole["down.weight"])


def test_missing_and_unknown_keys_raise_only_when_strict():
    run_distributed(missing_and_unknown_keys, 2 * 2)


def torch_tensors_go_to_torch(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    values = torch.arange(14.0).reshape(7, 2) + 100 * rank
    for placements in ([Shard(0)], [Replicate()], [Shard(1)]):
        own = _state_dict_utils.distribute_tensor(values, mesh, placements)
        theirs = distribute_tensor(values, mesh, placements)
        assert type(own) is type(theirs) is DTensor
        assert own.placements == theirs.placements
        assert torch.equal(own.to_local(), theirs.to_local())
        target = distribute_tensor(torch.zeros(7, 2), mesh, placements)
        state = {"w": (target, values), "plain": values}
        _state_dict_utils._distribute_tensors(state, ["w", "plain"], torch.device("cpu"))
        expected = distribute_tensor(values, mesh, placements, src_data_rank=None)
        assert state["w"] is target
        assert torch.equal(target.to_local(), expected.to_local())
        assert state["plain"] is values
    dist.barrier()


def test_tensors_of_torch_are_cut_as_torch_cuts_them():
    run_distributed(torch_tensors_go_to_torch, 3)
