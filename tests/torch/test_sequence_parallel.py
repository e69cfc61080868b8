"""Sequence and loss parallelism under FSDP and HSDP: activations keep their layouts, everything else its values."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from harness import run_distributed
from raggedshard.torch import DeviceMesh, fully_shard, init_device_mesh
from training import GLOBAL_BATCH, Tolerances, assert_same_gradients, assert_same_parameters

VOCABULARY, WIDTH, LENGTH = 13, 6, 4


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)  # 5 rows on each of 2 TP ranks
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SequenceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x))


def parallelize(model: SequenceModel, mesh: DeviceMesh) -> None:
    mixer = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    plan = {f"mixers.{i}.{name}": style for i in range(2) for name, style in mixer.items()}
    plan |= {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "mixers.1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)


def watch_layouts(model: SequenceModel) -> dict[str, list[tuple]]:
    """The layouts of each norm's input and output, as they come."""
    seen: dict[str, list[tuple]] = {}

    def note(name: str):
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            assert isinstance(args[0], DTensor)
            assert isinstance(output, DTensor)
            seen.setdefault(name, []).append((args[0].placements, output.placements, tuple(output.shape)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(note(name))
    return seen


def token_batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def cross_entropy(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(rank: int, world_size: int, mesh_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tolerances = Tolerances.of(dtype, adam=True)
    reference = SequenceModel().to(dtype)
    names = ("dp", "tp") if len(mesh_shape) == 2 else ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = copy.deepcopy(reference)
    parallelize(model, mesh["tp"])
    plain_tp = copy.deepcopy(model)
    dp_mesh = mesh["dp"] if len(mesh_shape) == 2 else mesh["replicate", "shard"]
    for mixer in model.mixers:
        fully_shard(mixer, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)
    layouts, plain_layouts = watch_layouts(model), watch_layouts(plain_tp)
    part, ranks = rank // mesh_shape[-1], world_size // mesh_shape[-1]
    own = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-4)
    for tokens, targets in token_batches(10):
        cross_entropy(reference, tokens, targets).backward()
        with loss_parallel():
            cross_entropy(model, tokens.chunk(ranks)[part], targets.chunk(ranks)[part]).backward()
        assert_same_gradients(model, reference, *tolerances.gradients)
        own.step()
        theirs.step()
        assert_same_parameters(model, reference, *tolerances.parameters)
        own.zero_grad()
        theirs.zero_grad()
        with torch.no_grad():
            plain_tp(tokens.chunk(ranks)[part])
    assert layouts == plain_layouts
    assert layouts["mixers.0.norm"][0][:2] == ((Shard(1),), (Shard(1),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_sequence_and_loss_parallel_train_like_the_unsharded_model(mesh_shape, dtype):
    run_distributed(train, torch.Size(mesh_shape).numel(), mesh_shape, dtype, timeout=120)
