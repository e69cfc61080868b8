"""fully_shard with what people combine it with: prefetch, recomputation, deferred init (Level1 of section 9)."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from harness import run_distributed, world_sizes
from raggedshard.platform.torch.fully_shard import param_group, unsharding
from raggedshard.torch import FSDPModule, fully_shard, init_device_mesh
from training import Tolerances, assert_same_parameters, float_batches, mesh_of, square_loss, train_beside

WIDTH = 7
LEVELS = [("adamw", torch.float64), ("sgd", torch.float32)]
"""Adam divides by the gradient's size, so that in float32 it shows rounding where a gradient is near zero."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Embeds 8 features, runs four blocks (``recompute`` wraps each call), and projects to 5."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x if self.recompute == "none" else x.requires_grad_(True) if x.is_leaf else x
            if self.recompute in ("reentrant", "non-reentrant"):
                x = cast(torch.Tensor, checkpoint(block, x, use_reentrant=self.recompute == "reentrant"))
            else:
                x = block(x)
        return self.head(x)


def shard_stack(model: Stack, **options: Any) -> FSDPModule:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def units(model: Stack) -> list[FSDPModule]:
    return [cast(FSDPModule, block) for block in model.blocks]


def set_prefetch(model: Stack, kind: str) -> None:
    blocks = units(model)
    last = len(blocks) - 1
    for i, block in enumerate(blocks):
        if kind == "right":
            block.set_forward_prefetch_modules(blocks[i + 1 : i + 3])
            block.set_backward_prefetch_modules(blocks[max(0, i - 2) : i][::-1])
        elif kind == "wrong":  # units that ran already, or run much later
            block.set_forward_prefetch_modules([blocks[0], blocks[last - i]])
            block.set_backward_prefetch_modules([blocks[last], blocks[last - i]])
        elif kind == "repeated":
            block.set_modules_to_forward_prefetch([blocks[(i + 1) % 4]] * 3)
            block.set_modules_to_backward_prefetch([block, block])


def train_with_prefetch(rank, world_size, kind, replicas, optimizer="adamw", dtype=torch.float64):
    torch.manual_seed(0)
    reference = Stack().to(dtype)
    model = copy.deepcopy(reference)
    shard_stack(model, mesh=mesh_of(world_size, replicas))
    set_prefetch(model, kind)
    train_beside(rank, world_size, model, reference, optimizer, float_batches(10, dtype), dtype=dtype)
    with torch.no_grad():  # a unit that was prefetched for nothing goes back as well
        model(torch.zeros(1, 8, dtype=dtype))
    assert not any(state.group.is_unsharded for state in cast(FSDPModule, model)._fsdp_states() if state.group)


@world_sizes(1, 3, 4)
@pytest.mark.parametrize("kind", ["right", "wrong", "repeated"])
def test_any_prefetch_order_trains_like_the_unsharded_model(world_size, kind):
    run_distributed(train_with_prefetch, world_size, kind, 1)


@pytest.mark.parametrize(("optimizer", "dtype"), LEVELS, ids=str)
def test_prefetch_with_hsdp(optimizer, dtype):
    run_distributed(train_with_prefetch, 4, "right", 2, optimizer, dtype)


def wrap_blocks(model: Stack, impl: CheckpointImpl) -> None:
    """Wrap each block in torch's ``checkpoint_wrapper``; around a unit it runs the unit's hooks again in backward."""
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, Block),
    )


def train_recomputed(rank, world_size, how, steps, dtype):
    torch.manual_seed(0)
    rtol, atol = Tolerances.of(dtype, adam=False).gradients
    reference = Stack().to(dtype)
    kind, _, where = how.partition("/")
    model = Stack(kind if where == "call" else "none").to(dtype)
    model.load_state_dict(reference.state_dict())
    mesh = mesh_of(world_size)
    impl = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT
    if where == "unit inside":
        shard_stack(model, mesh=mesh)
        wrap_blocks(model, impl)
    elif where == "unit outside":
        wrap_blocks(model, impl)
        shard_stack(model, mesh=mesh)
    else:
        shard_stack(model, mesh=mesh)
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    assert list(named) == [name for name, _ in reference.named_parameters()]
    alive = []
    for batch in float_batches(steps, dtype):
        square_loss(reference, batch).backward()
        with counted_collectives() as calls:
            square_loss(model, batch.chunk(world_size)[rank]).backward()
        gathers, reductions = calls["all_gather_chunks"], calls["exchange_chunks"]
        for name, p in reference.named_parameters():
            torch.testing.assert_close(cast(Any, named[name].grad).full_tensor(), p.grad, rtol=rtol, atol=atol)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p.sub_(p.grad, alpha=0.1)  # pyright: ignore
                named[name].sub_(named[name].grad, alpha=0.1)  # pyright: ignore
        model.zero_grad()
        reference.zero_grad()
        gc.collect()
        alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    return gathers, reductions, alive


@contextmanager
def counted_collectives() -> Iterator[Counter]:
    """Counts calls of the units' collectives by name."""
    calls: Counter = Counter()
    places = {"all_gather_chunks": unsharding, "exchange_chunks": param_group}
    originals = {name: getattr(module, name) for name, module in places.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return originals[name](*args)

        return call

    with ExitStack() as stack:
        for name, module in places.items():
            stack.enter_context(mock.patch.object(module, name, counting(name)))
        yield calls


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.float64)])
@pytest.mark.parametrize(
    "how",
    [
        "none/call",
        "reentrant/call",
        "non-reentrant/call",
        "reentrant/unit inside",
        "non-reentrant/unit inside",
        "reentrant/unit outside",
        "non-reentrant/unit outside",
    ],
)
def test_recomputation_costs_no_collective_and_leaks_nothing(world_size, how, dtype):
    for gathers, reductions, alive in run_distributed(train_recomputed, world_size, how, 10, dtype):
        # four blocks gather in forward and in backward, the root once
        assert (gathers, reductions) == (9, 5)
        assert alive[-1] - alive[1] < len(alive) - 2  # caches come and go, but nothing stays of every step


def reset_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def train_after_deferred_init(rank, world_size, replicas, optimizer_first, dtype=torch.float64):
    torch.manual_seed(0)
    tolerances = Tolerances.of(dtype, adam=True)
    reference = Stack().to(dtype)
    torch.manual_seed(3)
    reset_all(reference)
    with torch.device("meta"):
        model = Stack().to(dtype)
    shard_stack(model, mesh=mesh_of(world_size, replicas))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if optimizer_first else None
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    reset_all(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same_parameters(model, reference, 0, 0)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for batch in float_batches(10, dtype):
        square_loss(reference, batch).backward()
        square_loss(model, batch.chunk(world_size)[rank]).backward()
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        assert_same_parameters(model, reference, *tolerances.parameters)


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_deferred_init_gives_the_values_of_the_unsharded_model(world_size, optimizer_first):
    run_distributed(train_after_deferred_init, world_size, 1, optimizer_first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_deferred_init_with_hsdp(dtype):
    run_distributed(train_after_deferred_init, 4, 2, False, dtype)


def forgotten_meta_parameter(rank, world_size):
    with torch.device("meta"):
        model = Stack()
    shard_stack(model, mesh=init_device_mesh("cpu", (world_size,)))
    with pytest.raises(RuntimeError, match=r"'blocks\.2\.up\.weight'.*meta device.*to_empty"):
        model(torch.zeros(1, 8))


def test_a_forgotten_meta_parameter_is_named():
    run_distributed(forgotten_meta_parameter, 2)
