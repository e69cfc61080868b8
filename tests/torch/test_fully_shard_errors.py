"""What cannot be right raises, with names, shapes and the remedy; ranks that part ways end in an error, not a mix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from harness import run_distributed, run_ranks
from raggedshard.torch import FSDPModule, RaggedShard, RaggedStridedShard, fully_shard, init_device_mesh
from training import OddMLP, mesh_of, rows_of


class Inner(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def refuse(rank, world_size, shape, requested, error, words):
    """The call raises ``error`` with all of ``words``, and changes nothing."""
    model = Inner(shape)
    before = list(model.parameters())
    with pytest.raises(error) as info:
        fully_shard(
            model, mesh=mesh_of(world_size), shard_placement_fn=lambda p: requested if p is before[-1] else None
        )
    for word in ("'inner.weight'", str(tuple(shape)), "'shard'", "4 ranks", *words):
        assert word in str(info.value), (word, str(info.value))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert not isinstance(model, FSDPModule)
    fully_shard(model, mesh=mesh_of(world_size), ignored_params={before[-1]})


PLACEMENT_ERRORS = {
    "another dim that does not divide": ((8, 6), Shard(1), NotImplementedError, ["dim 1", "6", "Shard(0) or None"]),
    "counted from behind": ((8, 6), Shard(-1), NotImplementedError, ["dim 1", "6", "Shard(0) or None"]),
    "dim out of range": ((8, 6), Shard(2), ValueError, ["Shard(dim=2)", "2 dims"]),
    "dim out of range below": ((8, 6), Shard(-3), ValueError, ["Shard(dim=-3)", "2 dims"]),
    "a Replicate": ((8, 6), Replicate(), ValueError, ["Replicate", "return None, a Shard or a RaggedShard"]),
    "a Partial": ((8, 6), Partial(), ValueError, ["Partial", "return None, a Shard or a RaggedShard"]),
    "an int": ((8, 6), 1, ValueError, ["returned 1", "return None, a Shard or a RaggedShard"]),
    "a tuple": ((8, 6), (Shard(0),), ValueError, ["return None, a Shard or a RaggedShard"]),
    "too few units": ((8, 6), RaggedShard((0,), (1, 3)), ValueError, ["2 local_units", "one unit per rank"]),
    "too many units": ((8, 6), RaggedShard((0,), (1,) * 8), ValueError, ["8 local_units", "one unit per rank"]),
    "units that do not fit": ((8, 6), RaggedShard((0,), (1, 1, 1, 2)), ValueError, ["sum divides 8"]),
    "cells that do not fit": ((3, 3), RaggedShard((0, 1), (1, 1, 1, 1)), ValueError, ["sum divides 9"]),
    "more dims than there are": ((8, 6), RaggedShard((0, 1, 2), (1, 1, 1, 1)), ValueError, ["flattens 3 dims"]),
    "strided units": ((8, 6), RaggedStridedShard((0,), (1, 1, 1, 1), 2), ValueError, ["return a RaggedShard"]),
    "a scalar": ((), None, ValueError, ["scalar", "(1,)", "ignored_params"]),
}


@pytest.mark.parametrize(
    ("shape", "requested", "error", "words"), PLACEMENT_ERRORS.values(), ids=PLACEMENT_ERRORS.keys()
)
def test_placements_that_do_not_fit(shape, requested, error, words):
    run_distributed(refuse, 4, shape, requested, error, words)


def refuse_meshes(rank, world_size):
    model = OddMLP()
    with pytest.raises(ValueError, match=r"1-D mesh.*2-D mesh.*got 3 dims.*\(2, 2, 1\).*Slice it by name"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (4,))
    model.down.weight = nn.Parameter(distribute_tensor(torch.randn(3, 8), named["tp"], [Shard(1)]))
    with pytest.raises(ValueError, match=r"down\.weight.*dim names.*mesh_dim_names"):
        fully_shard(model, mesh=unnamed)
    with pytest.raises(ValueError, match=r"down\.weight.*one init_device_mesh"):
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("other",)))
    assert not isinstance(model, FSDPModule)
    fully_shard(model, mesh=named["dp"])


def test_meshes_that_do_not_fit():
    run_distributed(refuse_meshes, 4)


def refuse_modules(rank, world_size):
    mesh = mesh_of(world_size)
    for container in (nn.ModuleList([nn.Linear(3, 3)]), nn.ModuleDict({"a": nn.Linear(3, 3)}), nn.ParameterList()):
        with pytest.raises(ValueError, match=f"{type(container).__name__}, a container without forward.*apply it to"):
            fully_shard(container, mesh=mesh)
    model: Any = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"applied to this FSDPLinear already"):
        fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"applied to this FSDPLinear already"):
        fully_shard([model[1], model[0]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"parameter 'weight' of shape \(7, 7\) in Linear is sharded already.*bottom-up"
    ):
        fully_shard(model[1], mesh=mesh)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([], mesh=mesh)
    with pytest.raises(ValueError, match="got ShardedDTensor"):
        fully_shard(model[1].weight, mesh=mesh)
    with pytest.raises(ValueError, match=r"prefetch.*got Linear"):
        model[0].set_forward_prefetch_modules([nn.Linear(3, 3)])


def test_modules_that_cannot_be_sharded():
    run_distributed(refuse_modules, 2)


def refuse_reshard(rank, world_size):
    for value in (0, -1, 3, 5, 8):
        model = OddMLP()
        with pytest.raises(ValueError, match=f"reshard_after_forward={value} must divide the 4 ranks of .*'shard'"):
            fully_shard(model, mesh=mesh_of(world_size), reshard_after_forward=value)
        assert not isinstance(model, FSDPModule)
        model = fully_shard(model, mesh=mesh_of(world_size))
        with pytest.raises(ValueError, match=f"reshard_after_forward={value} must divide"):
            model.set_reshard_after_forward(value)  # type: ignore[arg-type]


def test_numbers_of_ranks_to_reshard_to_that_do_not_divide():
    run_distributed(refuse_reshard, 4)


def refuse_ties(rank, world_size):
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 8), "head": nn.Linear(8, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    fully_shard(model["embedding"], mesh=mesh_of(world_size))
    with pytest.raises(ValueError) as info:
        fully_shard(model["head"], mesh=mesh_of(world_size))
    for words in ("'weight' of shape (7, 8) in Linear", "'weight' of Embedding", "one unit", "one list"):
        assert words in str(info.value), str(info.value)


def test_ties_across_units_name_both_places():
    run_distributed(refuse_ties, 2)


def forward_on_meta(rank, world_size):
    with torch.device("meta"):
        model = OddMLP()
    fully_shard(model.up, mesh=mesh_of(world_size))
    fully_shard(model, mesh=mesh_of(world_size))
    with pytest.raises(RuntimeError, match=r"'mid\.weight'.*'up\.weight'.*meta device.*to_empty.*load_state_dict"):
        model(torch.randn(2, 8))


def test_a_model_on_the_meta_device_cannot_run():
    run_distributed(forward_on_meta, 2)


# ---- ranks that part ways

GROUP_TIMEOUT = 6.0


class Equal(nn.Module):
    """Units of equal sizes, whose collectives would pair up; each rank chooses which ones to run, and in what order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.order = [0, 1, 2]
        self.ignored: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            y = torch.tanh(self.layers[index](x))
            x = x if index in self.ignored else y
        return x


def part_ways(rank: int, world_size: int, odd_ranks: list[int], replicas: int, change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model: Any = Equal()
    mesh = mesh_of(world_size, replicas)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1 and rank in odd_ranks:
            change(model)
        model(rows_of(rank, features=7).float().requires_grad_()).sum().backward()
        optimizer.step()


def skip_first(model: Equal) -> None:
    model.order = [1, 2]


def skip_middle(model: Equal) -> None:
    model.order = [0, 2]


def skip_last(model: Equal) -> None:
    model.order = [0, 1]


def swap(model: Equal) -> None:
    model.order = [0, 2, 1]


def ignore_output(model: Equal) -> None:
    model.ignored = [1]


def raise_error(model: Equal) -> None:
    raise ArithmeticError("a rank of its own")


def die(model: Equal) -> None:
    os._exit(3)


def outcomes(change: Callable[[Any], None], odd_ranks: list[int], replicas: int = 1) -> list[Any]:
    ends = run_ranks(part_ways, 4, odd_ranks, replicas, change, timeout=60, group_timeout=GROUP_TIMEOUT)
    assert all(end.kind in ("raised", "died") for end in ends), [(end.rank, end.kind) for end in ends]
    first = min(end.seconds for end in ends)
    assert all(end.seconds < first + 2 * GROUP_TIMEOUT + 5 for end in ends), [end.seconds for end in ends]
    return ends


@pytest.mark.parametrize("change", [skip_first, skip_middle, skip_last, swap, ignore_output])
def test_a_rank_that_runs_other_modules_ends_every_rank(change):
    ends = outcomes(change, [1])
    assert all(end.kind == "raised" and end.error.startswith("RuntimeError") for end in ends)
    told = [end.error for end in ends if "All ranks must run the same units in the same order" in end.error]
    assert told and all("unit 'layers." in error and "of the group runs 'layers." in error for error in told)


@pytest.mark.parametrize("change", [skip_first, skip_middle, skip_last, swap])
def test_a_replica_that_runs_other_modules_ends_every_rank(change):
    ends = outcomes(change, [2, 3], replicas=2)
    assert all(end.kind == "raised" and "Error" in end.error for end in ends)
    assert any(re.search(r"all-reduce of unit '.*': rank \d of the group runs", end.error) for end in ends), [
        end.error for end in ends
    ]


@pytest.mark.parametrize(("change", "kind"), [(raise_error, "raised"), (die, "died")])
def test_a_rank_that_is_gone_ends_every_rank(change, kind):
    ends = outcomes(change, [1])
    assert ends[1].kind == kind
    assert all(end.kind == "raised" for end in ends if end.rank != 1)
