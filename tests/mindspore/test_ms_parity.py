"""PyTorch and MindSpore from the same weights and batches: the same layouts exactly, the same numbers closely."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

import raggedshard.torch as rt
from harness import run_distributed
from ms_training import LIMIT, gradients, mean_over_ranks, mesh_of, square_loss
from raggedshard.mindspore import fully_shard

SHAPES = {"up": (7, 8), "mid": (5, 7), "few": (2, 5), "even": (8, 5), "down": (3, 10)}
STEPS = 10


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) / 3 for name, shape in SHAPES.items()}


def batches() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal((12, 8)).astype(np.float32) for _ in range(STEPS)]


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in weights().items():
            layer = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
            layer.weight.data = torch.from_numpy(value)
            setattr(self, name, layer)

    def forward(self, x):
        x = torch.tanh(self.mid(torch.tanh(self.up(x))))
        return self.down(torch.cat([torch.tanh(self.even(x)), self.few(x)], dim=1))


class MindSporeNet(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        for name, value in weights().items():
            layer = nn.Dense(value.shape[1], value.shape[0], has_bias=False)
            layer.weight.set_data(Tensor(value))
            setattr(self, name, layer)

    def construct(self, x):
        x = ops.tanh(self.mid(ops.tanh(self.up(x))))
        return self.down(ops.cat([ops.tanh(self.even(x)), self.few(x)], axis=1))


def layouts_of(units, rank_of):
    """What must be equal exactly: placements, sizes, offsets and the bytes that collectives carry."""
    return {
        p.name: (
            repr(p._spmd_placements).replace("_StridedShard", "StridedShard"),
            tuple(p.sharded_size),
            p.layout.run(rank_of(p)).start,
            tuple(p.padded_sharded_param_size),
            data_of(p),
        )
        for unit in units
        for p in unit.group.params
    }


def data_of(p):
    data = p._sharded_param_data
    return (data.numpy() if isinstance(data, torch.Tensor) else data.asnumpy()).tolist()


def train_torch(rank, world_size, replicas):
    shape, names = (
        ((world_size,), ("shard",)) if replicas == 1 else ((replicas, world_size // replicas), ("r", "shard"))
    )
    mesh = rt.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = TorchNet()
    rt.fully_shard(model.up, mesh=mesh)
    rt.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses, layouts = [], None
    rows = 12 // world_size
    for batch in batches():
        loss = model(torch.from_numpy(batch[rank * rows : (rank + 1) * rows])).square().mean()
        layouts = layouts or layouts_of(model._fsdp_states(), lambda p: mesh.get_local_rank("shard"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses, layouts, {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}


def train_mindspore(rank, world_size, replicas):
    mesh = mesh_of(world_size, replicas)
    model = MindSporeNet()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = model.trainable_params()
    optimizer = optim.AdamW(params, lr=0.01, weight_decay=0.01)
    losses, layouts = [], None
    rows = 12 // world_size
    for batch in batches():
        x = Tensor(batch[rank * rows : (rank + 1) * rows])
        loss, grads = gradients("value_and_grad", model, square_loss, x)
        layouts = layouts or layouts_of(model._fsdp_states(), lambda p: p.dp_mesh.shard_rank)
        optimizer(grads)
        losses.append(mean_over_ranks(loss, world_size))
    return losses, layouts, {name: p.full_tensor().asnumpy() for name, p in model.parameters_and_names()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_torch_and_mindspore_agree(replicas):
    ours = run_distributed(train_mindspore, 4, replicas, framework="mindspore", timeout=LIMIT)
    theirs = run_distributed(train_torch, 4, replicas, timeout=LIMIT)
    for (losses, layouts, values), (torch_losses, torch_layouts, torch_values) in zip(ours, theirs, strict=True):
        assert layouts == torch_layouts
        np.testing.assert_allclose(losses, torch_losses, rtol=0, atol=1e-5)
        for name, value in values.items():
            np.testing.assert_allclose(value, torch_values[name], rtol=0, atol=1e-5, err_msg=name)
    assert ours[0][0][-1] < ours[0][0][0]
