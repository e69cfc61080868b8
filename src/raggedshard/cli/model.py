"""The models that ``raggedshard train`` can train: sizes that few numbers of ranks divide."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from raggedshard.cli.data import BYTE_VOCABULARY, Corpus, byte_corpus, word_corpus


@dataclass(frozen=True)
class Recipe:
    """What a training run needs to know of a model.

    build: a new model, initialised from torch's global seed. blocks: the modules that become one sharded unit each.
    rows_per_rank: sequences of ``context`` tokens that each rank trains on in a step.
    """

    build: Callable[[], nn.Module]
    blocks: Callable[[Any], Iterable[nn.Module]]
    corpus: Callable[[], Corpus]
    context: int
    rows_per_rank: int


@dataclass(frozen=True)
class GPTConfig:
    """Odd on purpose: 257, 105, 315 and 421 rows divide by no even number of ranks."""

    vocabulary: int = BYTE_VOCABULARY
    context: int = 64
    layers: int = 4
    heads: int = 7
    width: int = 105
    mlp_width: int = 421


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised residual stream of shape (batch, time, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.attn_norm = nn.LayerNorm(config.width)
        # No bias: that of the keys cancels in the softmax, and Adam would turn its gradient, pure rounding, into steps.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attn_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_up = nn.Linear(config.width, config.mlp_width)
        self.mlp_down = nn.Linear(config.mlp_width, config.width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self._attend(self.attn_norm(stream))
        return stream + self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(stream))))

    def _attend(self, normed: torch.Tensor) -> torch.Tensor:
        batch, time, width = normed.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(normed).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attn_out(mixed.transpose(1, 2).reshape(batch, time, width))


class GPT(nn.Module):
    """A GPT whose output layer is its embedding: tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            stream = block(stream)
        return self.lm_head(self.norm(stream))


def _build_gpt2() -> nn.Module:
    """transformers' GPT-2 with its true vocabulary of 50257, narrow and shallow, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50257,
        n_positions=32,
        n_embd=63,
        n_layer=2,
        n_head=7,
        n_inner=255,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token in nats, a scalar. Takes our GPT and transformers' models alike."""
    output = model(inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


RECIPES = {
    "gpt": Recipe(lambda: GPT(GPTConfig()), lambda model: model.blocks, byte_corpus, context=64, rows_per_rank=4),
    "gpt2": Recipe(
        _build_gpt2, lambda model: model.transformer.h, lambda: word_corpus(50257), context=32, rows_per_rank=2
    ),
}
