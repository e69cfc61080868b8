"""What PyTorch forces on a rank of ``raggedshard train``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from raggedshard.cli.backend import AdamW
from raggedshard.cli.torch_model import blocks_of, build, loss_of
from raggedshard.torch import DTensor, fully_shard, init_device_mesh


class TorchBackend:
    """A rank in a gloo group over all processes."""

    title = "PyTorch"

    def __init__(self, rendezvous: str, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)

    def training(self, model: str, seed: int, *, sharded: bool) -> TorchTraining:
        module = build(model, seed)
        if sharded:
            self._shard(module)
        return TorchTraining(module)

    def _shard(self, module: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(numbers)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).numpy()


class TorchTraining:
    """A module, sharded or not, with its AdamW."""

    def __init__(self, module: nn.Module):
        self.module = module
        adamw = AdamW()
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=adamw.learning_rate, weight_decay=adamw.weight_decay, eps=adamw.epsilon
        )

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        loss = loss_of(self.module, torch.from_numpy(inputs), torch.from_numpy(targets))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def parameters(self) -> dict[str, Any]:
        return dict(self.module.named_parameters())

    def values(self, name: str) -> np.ndarray:
        parameter = self.module.get_parameter(name).detach()
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).numpy()
