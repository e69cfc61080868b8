"""fully_shard on MindSpore trains like the unsharded cell (Level0 of the requirement's section 9)."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from harness import run_distributed, world_sizes
from ms_training import (
    LIMIT,
    OddMLP,
    assert_no_even_claim,
    carry_by,
    float_batches,
    mesh_of,
    shard_odd_mlp,
    train_beside,
    twin,
)
from raggedshard.mindspore import fully_shard

STYLES = ("value_and_grad", "backward")


def train_odd_mlp(rank, world_size, optimizer, style, replicas, steps=10):
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size, replicas))
    assert_no_even_claim(model, world_size // replicas)
    return train_beside(rank, world_size, model, reference, optimizer, float_batches(steps), style)


@world_sizes(1, 2, 3, 4)
@pytest.mark.parametrize("style", STYLES)
def test_fsdp_trains_like_the_unsharded_cell(world_size, style):
    losses = run_distributed(train_odd_mlp, world_size, "SGD", style, 1, framework="mindspore", timeout=LIMIT)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("style", STYLES)
def test_trains_with_operators_that_run_later(style):
    """The other tests run each operator at once; here a shard's memory is shared with operators still in a queue."""
    run_distributed(train_odd_mlp, 2, "SGD", style, 1, 3, framework="mindspore_async", timeout=LIMIT)


@pytest.mark.parametrize("style", STYLES)
def test_hsdp_trains_like_the_unsharded_cell(style):
    run_distributed(train_odd_mlp, 4, "SGD", style, 2, framework="mindspore", timeout=LIMIT)


def train_with_gloo(rank, world_size, style, replicas, steps):
    carry_by("gloo")
    return train_odd_mlp(rank, world_size, "AdamW", style, replicas, steps)


@pytest.mark.parametrize(
    ("framework", "world_size", "replicas", "style", "steps"),
    [
        ("mindspore", 3, 1, "value_and_grad", 10),
        ("mindspore", 4, 2, "backward", 10),
        ("mindspore_async", 2, 1, "backward", 3),
    ],
)
def test_torchs_gloo_carries_the_same_training(framework, world_size, replicas, style, steps):
    run_distributed(train_with_gloo, world_size, style, replicas, steps, framework=framework, timeout=LIMIT)


@pytest.mark.parametrize("optimizer", ["nn.SGD", "nn.Momentum", "nn.Adam", "nn.AdamWeightDecay", "Adam", "AdamW"])
def test_optimizers_update_actual_rows_only(optimizer):
    run_distributed(train_odd_mlp, 4, optimizer, "value_and_grad", 1, framework="mindspore", timeout=LIMIT)


class Attention(nn.Cell):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # Without bias: the loss does not depend on a key's bias, so Adam would follow the rounding of its gradient.
        self.qkv = nn.Dense(width, 3 * width, has_bias=False)
        self.out = nn.Dense(width, width)

    def construct(self, x):
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = ops.unstack(self.qkv(x).reshape(split).transpose((2, 0, 3, 1, 4)), axis=0)
        scores = ops.matmul(q, k.transpose((0, 1, 3, 2))) / (width // self.heads) ** 0.5
        future = Tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))
        mixed = ops.matmul(ops.softmax(scores + future, axis=-1), v)
        return self.out(mixed.transpose((0, 2, 1, 3)).reshape((batch, length, width)))


class GPTBlock(nn.Cell):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm((width,))
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width + 3)
        self.down = nn.Dense(4 * width + 3, width)

    def construct(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class GPT(nn.Cell):
    """31 tokens of width 10: nothing divides by 4 ranks. The head is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 10, embedding_table="normal")
        self.positions = nn.Embedding(9, 10, embedding_table="normal")
        self.blocks = nn.CellList([GPTBlock(10, 2)])
        self.norm = nn.LayerNorm((10,))

    def construct(self, tokens):
        x = self.tokens(tokens) + self.positions(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return ops.matmul(self.norm(x), self.tokens.embedding_table.transpose((1, 0)))


def next_token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return ops.cross_entropy(logits.reshape((-1, 31)), tokens[:, 1:].reshape((-1,)))


def train_gpt(rank, world_size, style, replicas):
    reference, model = twin(GPT)
    mesh = mesh_of(world_size, replicas)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_no_even_claim(model, world_size // replicas)
    generator = np.random.default_rng(2)
    batches = (Tensor(generator.integers(0, 31, (12, 9)).astype(np.int32)) for _ in range(10))
    return train_beside(rank, world_size, model, reference, "AdamW", batches, style, next_token_loss)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_a_gpt_trains_like_the_unsharded_cell(world_size, replicas, style):
    run_distributed(train_gpt, world_size, style, replicas, framework="mindspore", timeout=LIMIT)
