"""The GPT of ``raggedshard train`` on MindSpore: the architecture of `torch_model.GPT`."""

# MindSpore's annotations say that cells and operators may be or return None.
# pyright: reportOptionalCall=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import math
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from raggedshard.cli.recipes import GPTConfig, initial_weights

NORM_EPSILON = 1e-5
"""torch's; MindSpore's own default is 1e-7."""

COMMON_NAMES = {"gamma": "weight", "beta": "bias", "embedding_table": "weight"}
"""The last part of a parameter's name, where MindSpore has one of its own."""


class Block(nn.Cell):
    """Causal self-attention and an MLP, each on a normalised residual stream of shape (batch, time, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.attn_norm = nn.LayerNorm((config.width,), epsilon=NORM_EPSILON)
        # No bias: that of the keys cancels in the softmax, and Adam would turn its gradient, pure rounding, into steps.
        self.qkv = nn.Dense(config.width, 3 * config.width, has_bias=False)
        self.attn_out = nn.Dense(config.width, config.width)
        self.mlp_norm = nn.LayerNorm((config.width,), epsilon=NORM_EPSILON)
        self.mlp_up = nn.Dense(config.width, config.mlp_width)
        self.mlp_down = nn.Dense(config.mlp_width, config.width)

    def construct(self, stream: Tensor) -> Tensor:
        stream = stream + self._attend(self.attn_norm(stream))
        return stream + self.mlp_down(ops.gelu(self.mlp_up(self.mlp_norm(stream))))

    def _attend(self, normed: Tensor) -> Tensor:
        batch, time, width = normed.shape
        head_width = width // self.heads
        parts = self.qkv(normed).reshape((batch, time, 3, self.heads, head_width)).transpose((2, 0, 3, 1, 4))
        query, key, value = ops.unstack(parts, axis=0)
        scores = ops.matmul(query, key.transpose((0, 1, 3, 2))) / math.sqrt(head_width)
        later = Tensor(np.triu(np.full((time, time), -np.inf, np.float32), 1))
        mixed = ops.matmul(ops.softmax(scores + later, axis=-1), value)
        return self.attn_out(mixed.transpose((0, 2, 1, 3)).reshape((batch, time, width)))


class GPT(nn.Cell):
    """A GPT whose output layer is its embedding: tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.CellList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm((config.width,), epsilon=NORM_EPSILON)
        weights = initial_weights(config, seed)
        for name, parameter in self.parameters_and_names():
            parameter.set_data(Tensor(weights[common_name(name)]))

    def construct(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.positions(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            stream = block(stream)
        return ops.matmul(self.norm(stream), self.embedding.embedding_table.transpose((1, 0)))


def common_name(name: str) -> str:
    """A parameter's name in `initial_weights`: ``blocks.0.attn_norm.gamma`` is ``blocks.0.attn_norm.weight`` there."""
    *cells, own = name.split(".")
    return ".".join([*cells, COMMON_NAMES.get(own, own)])


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token in nats, a scalar."""
    logits = model(inputs)
    return ops.cross_entropy(logits.reshape((-1, logits.shape[-1])), targets.reshape((-1,)))
