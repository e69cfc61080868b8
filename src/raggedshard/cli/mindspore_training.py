"""What MindSpore forces on a rank of ``raggedshard train``."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.experimental import optim

from raggedshard.cli.backend import AdamW
from raggedshard.cli.mindspore_model import GPT, loss_of
from raggedshard.cli.recipes import GPTConfig
from raggedshard.mindspore import (
    DTensor,
    fully_shard,
    get_rank,
    get_world_size,
    init_device_mesh,
    init_process_group,
)
from raggedshard.platform.mindspore.collectives import all_gather, group_of


class MindSporeBackend:
    """A rank that joins the others as its environment says."""

    title = "MindSpore"

    def __init__(self) -> None:
        ms.set_device("CPU")
        # The threads that pass operators on wait by spinning: ranks that share cores would wait for each other's.
        ms.runtime.launch_blocking()
        ms.runtime.dispatch_threads_num(1)
        ms.set_context(runtime_num_threads=1)
        init_process_group()
        self.rank, self.world_size = get_rank(), get_world_size()
        self.group = group_of(tuple(range(self.world_size)))

    def training(self, model: str, seed: int, *, sharded: bool) -> MindSporeTraining:
        if model != "gpt":
            raise ValueError(f"model {model!r} is not there on MindSpore")
        cell = GPT(GPTConfig(), seed)
        if sharded:
            self._shard(cell)
        return MindSporeTraining(cell)

    def _shard(self, cell: GPT) -> None:
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in cell.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(cell, mesh=mesh)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        return np.stack([row.asnumpy() for row in all_gather(Tensor(numbers), self.group)])


class MindSporeTraining:
    """A cell, sharded or not, with its AdamW."""

    def __init__(self, cell: nn.Cell):
        self.cell = cell
        adamw = AdamW()
        self.optimizer = optim.AdamW(
            cell.trainable_params(), lr=adamw.learning_rate, weight_decay=adamw.weight_decay, eps=adamw.epsilon
        )
        no_inputs: Any = None
        self.loss_and_gradients: Any = ms.value_and_grad(self._loss, no_inputs, cell.trainable_params())

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.cell, inputs, targets)

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        # MindSpore's cross entropy takes int32 targets only.
        loss, gradients = self.loss_and_gradients(Tensor(inputs.astype(np.int32)), Tensor(targets.astype(np.int32)))
        self.optimizer(gradients)
        return float(loss.item())

    def parameters(self) -> dict[str, Any]:
        return dict(self.cell.parameters_and_names())

    def values(self, name: str) -> np.ndarray:
        parameter = self.parameters()[name]
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).asnumpy()
