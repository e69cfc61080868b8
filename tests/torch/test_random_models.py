"""Random models, meshes and options train like the unsharded model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from harness import run_distributed
from raggedshard.torch import FSDPModule, fully_shard
from training import float_batches, mesh_of, train_beside

FEATURES = 8


@dataclass(frozen=True)
class LeafSpec:
    """A linear map to ``rows`` outputs; ``tied`` takes the weight of the leaf before it where shapes allow."""

    rows: int
    bias: bool
    frozen: bool
    tied: bool


@dataclass(frozen=True)
class GroupSpec:
    """Leaves and groups that run one after the other on the same input; ``unit``: fully_shard is applied to it."""

    unit: bool
    leaves: tuple[LeafSpec, ...]
    groups: tuple[GroupSpec, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    model: GroupSpec
    ranks: int
    replicas: int
    reshard_after_forward: bool | None
    optimizer: str
    calls: int


leaf_specs = st.builds(
    LeafSpec,
    rows=st.integers(0, 17),
    bias=st.booleans(),
    frozen=st.sampled_from([False, False, True]),
    tied=st.booleans(),
)
inner_groups = st.builds(GroupSpec, unit=st.booleans(), leaves=st.lists(leaf_specs, min_size=1, max_size=3).map(tuple))
group_specs = st.builds(
    GroupSpec,
    unit=st.booleans(),
    leaves=st.lists(leaf_specs, max_size=2).map(tuple),
    groups=st.lists(inner_groups, max_size=2).map(tuple),
)
run_specs = st.builds(
    lambda groups, leaves, mesh, reshard, optimizer, calls: RunSpec(
        GroupSpec(True, leaves, groups), mesh[0], mesh[1], reshard, optimizer, calls
    ),
    groups=st.lists(group_specs, max_size=3).map(tuple),
    leaves=st.lists(leaf_specs, min_size=1, max_size=2).map(tuple),
    mesh=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]),
    reshard=st.sampled_from([None, True, False]),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    calls=st.integers(1, 2),
)


class Leaf(nn.Module):
    def __init__(self, spec: LeafSpec, before: Leaf | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(spec.rows, FEATURES, dtype=torch.float64), not spec.frozen)
        self.bias = nn.Parameter(torch.randn(spec.rows, dtype=torch.float64)) if spec.bias else None
        if spec.tied and before is not None and before.weight.shape == self.weight.shape:
            self.weight = before.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)).sum(1, keepdim=True)


class Group(nn.Module):
    """Each leaf and group adds its output to what it was given; ``calls`` times over."""

    def __init__(self, spec: GroupSpec, calls: int = 1) -> None:
        super().__init__()
        self.spec, self.calls = spec, calls
        self.leaves = nn.ModuleList()
        for leaf in spec.leaves:
            self.leaves.append(Leaf(leaf, cast(Leaf, self.leaves[-1]) if len(self.leaves) else None))
        self.groups = nn.ModuleList(Group(group) for group in spec.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            for module in (*self.leaves, *self.groups):
                x = x + 0.1 * module(x)
        return x


def shard(model: Group, **options) -> None:
    for group in model.groups:
        shard(cast(Group, group), **options)
    if model.spec.unit:
        fully_shard(model, **options)


def train(rank: int, world_size: int, spec: RunSpec) -> None:
    torch.manual_seed(0)
    reference = Group(spec.model, spec.calls)
    model = copy.deepcopy(reference)
    shard(model, mesh=mesh_of(world_size, spec.replicas), reshard_after_forward=spec.reshard_after_forward)
    assert isinstance(model, FSDPModule)
    if any(p.requires_grad for p in reference.parameters()):
        batches = float_batches(3, torch.float64, FEATURES)
        train_beside(rank, world_size, model, reference, spec.optimizer, batches)


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # a failing example is small enough; shrinking would rerun processes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(run_specs)
def test_random_models_train_like_the_unsharded_model(spec):
    run_distributed(train, spec.ranks, spec)
