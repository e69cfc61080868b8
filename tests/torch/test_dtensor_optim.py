"""Optimizers on sharded parameters do what they do on plain ones; their state has the parameters' layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.dtensor import ShardedDTensor
from sharded import assert_layout, assert_same, even, full, grid, line, parameter, shard

ROWS = (7, 2, 0, 5, 13)

optim = torch.optim

# name: (class, options, whether foreach and fused exist)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}, ("foreach", "fused")),
    "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, ("foreach", "fused")),
    "sgd nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ("foreach", "fused")),
    "adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.01}, ("foreach", "fused")),
    "adam tensor lr": (optim.Adam, {"lr": torch.tensor(0.1)}, ("fused",)),
    "adamw amsgrad": (optim.AdamW, {"lr": 0.1, "amsgrad": True}, ("foreach", "fused")),
    "adagrad": (optim.Adagrad, {"lr": 0.1}, ("foreach", "fused")),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}, ("foreach",)),
    "adadelta": (optim.Adadelta, {"lr": 1.0}, ("foreach",)),
    "nadam": (optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True}, ("foreach",)),
    "radam": (optim.RAdam, {"lr": 0.1}, ("foreach",)),
    "adamax": (optim.Adamax, {"lr": 0.1}, ("foreach",)),
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 1.0}, ("foreach",)),
    "rprop": (optim.Rprop, {"lr": 0.1}, ("foreach",)),
}


def parameters(make: Any, mesh: Any, dtype: torch.dtype = torch.float64) -> tuple[list[Any], list[Any], Any]:
    """Plain and sharded parameters of equal values, and what sets equal gradients for a step."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(rows, 3, generator=generator, dtype=dtype) for rows in ROWS]

    def set_gradients(plain: list[Any], sharded: list[Any]) -> None:
        for p, s in zip(plain, sharded, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
            s.grad = make(p.grad, mesh)

    return [parameter(v) for v in values], [parameter(make(v, mesh)) for v in values], set_gradients


def compare(plain: list[Any], sharded: list[Any], one: Any, other: Any, what: Any, exact: bool = True) -> None:
    for p, s in zip(plain, sharded, strict=True):
        assert_same(s, p, what, exact=exact)
        assert set(one.state[p]) == set(other.state[s]), what
        for name, value in one.state[p].items():
            if not torch.is_tensor(value):
                continue
            kept = other.state[s][name]
            assert_same(kept, value, (what, name), exact=exact)
            if value.shape == p.shape:
                assert_layout(kept, s, (what, name))


def step(rank: int, world_size: int, make: Any) -> None:
    """Bit by bit: an element-wise update sees the same numbers wherever they lie."""
    mesh = line(world_size)
    for name, (kind, options, ways) in OPTIMIZERS.items():
        for way in ({"foreach": False}, *({w: True} for w in ways)):
            if "fused" not in way and isinstance(options["lr"], torch.Tensor):
                continue
            plain, sharded, set_gradients = parameters(make, mesh)
            one, other = kind(plain, **options, **way), kind(sharded, **options, **way)
            locals_ = [s._local_tensor for s in sharded]
            for _ in range(3):
                set_gradients(plain, sharded)
                one.step()
                other.step()
            exact = "fused" not in way  # its vectors end elsewhere in a shard
            compare(plain, sharded, one, other, (name, way), exact)
            assert all(s._local_tensor is local for s, local in zip(sharded, locals_, strict=True)), name


@world_sizes()
def test_element_wise_optimizers(world_size: int) -> None:
    run_distributed(step, world_size, shard)


def test_element_wise_optimizers_on_torchs_placements() -> None:
    run_distributed(step, 2, even)


def matrices(rank: int, world_size: int, make: Any) -> None:
    """Optimizers that look at whole rows, columns or matrices."""
    mesh = line(world_size)
    cases: list[tuple[str, Any, dict[str, Any], torch.dtype]] = [
        ("muon", optim.Muon, {"lr": 0.1}, torch.float32),
        ("muon adjusted", optim.Muon, {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}, torch.float64),
        ("adafactor", optim.Adafactor, {"lr": 0.1, "foreach": False}, torch.float64),
        ("adafactor foreach", optim.Adafactor, {"lr": 0.1, "foreach": True}, torch.float64),
    ]
    for name, kind, options, dtype in cases:
        plain, sharded, set_gradients = parameters(make, mesh, dtype)
        if name.startswith("adafactor"):  # of a matrix without elements it takes a mean
            plain, sharded = ([p for p in ps if p.numel()] for ps in (plain, sharded))
        one, other = kind(plain, **options), kind(sharded, **options)
        for _ in range(3):
            set_gradients(plain, sharded)
            one.step()
            other.step()
        compare(plain, sharded, one, other, name, exact=False)
        for s in sharded:
            assert type(s) is ShardedDTensor


@world_sizes()
def test_optimizers_that_need_whole_matrices(world_size: int) -> None:
    run_distributed(matrices, world_size, shard)


def test_optimizers_that_need_whole_matrices_on_torchs_placements() -> None:
    run_distributed(matrices, 3, even)


def lbfgs(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    plain, sharded, _ = parameters(shard, mesh)
    results = []
    for ps in (plain, sharded):
        optimizer = optim.LBFGS(ps, lr=0.5, max_iter=5)

        def closure(ps: list[Any] = ps, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([(full(p) - 1).square().sum() for p in ps]).sum()
            loss.backward()
            return loss

        results.append(optimizer.step(closure))
    assert_same(results[1], results[0], exact=False)
    for p, s in zip(plain, sharded, strict=True):
        assert_same(s, p, exact=False)


def test_lbfgs() -> None:
    run_distributed(lbfgs, 2)


def on_hsdp(rank: int, world_size: int) -> None:
    mesh = grid(2, 2)
    ways: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
    for way in ways:
        plain, sharded, set_gradients = parameters(shard, mesh)
        one, other = optim.AdamW(plain, lr=0.1, **way), optim.AdamW(sharded, lr=0.1, **way)
        for _ in range(2):
            set_gradients(plain, sharded)
            one.step()
            other.step()
        compare(plain, sharded, one, other, way, exact="fused" not in way)


def test_replicas_step_alike() -> None:
    run_distributed(on_hsdp, 4)


def resume(rank: int, world_size: int) -> None:
    """The state of an optimizer loaded into another: the third step is the one without a break."""
    mesh = line(world_size)
    plain, sharded, set_gradients = parameters(shard, mesh)
    one, other = optim.AdamW(plain, lr=0.1), optim.AdamW(sharded, lr=0.1)
    for index in range(3):
        if index == 2:
            state, sharded = other.state_dict(), [parameter(s.detach().clone()) for s in sharded]
            other = optim.AdamW(sharded, lr=0.1)
            other.load_state_dict(state)
        set_gradients(plain, sharded)
        one.step()
        other.step()
    compare(plain, sharded, one, other, "resumed")
    other.zero_grad(set_to_none=False)
    assert all(full(s.grad).count_nonzero() == 0 for s in sharded)


def test_state_dict_of_an_optimizer() -> None:
    run_distributed(resume, 3)


class Model(torch.nn.Module):
    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(values)


def average(rank: int, world_size: int, multi: bool) -> None:
    mesh = line(world_size)
    plain, sharded, set_gradients = parameters(shard, mesh)
    models = [Model(plain), Model(sharded)]
    if multi:
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in models]
    else:
        averages = [AveragedModel(m) for m in models]
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in models]
    for _ in range(3):
        set_gradients(list(models[0].parameters()), list(models[1].parameters()))
        for model, mean, optimizer in zip(models, averages, optimizers, strict=True):
            optimizer.step()
            mean.update_parameters(model)
    for p, s, own in zip(*(a.parameters() for a in averages), models[1].parameters(), strict=True):
        assert_same(s, p, exact=False)
        assert_layout(s, own)
        assert s._local_tensor is not own._local_tensor


@pytest.mark.parametrize("multi", [True, False], ids=["ema", "mean"])
def test_averaged_models(multi: bool) -> None:
    run_distributed(average, 3, multi)
