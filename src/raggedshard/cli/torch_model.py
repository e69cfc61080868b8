"""The models of ``raggedshard train`` on PyTorch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from raggedshard.cli.recipes import GPT2_VOCABULARY, GPTConfig, initial_weights


def build(name: str, seed: int) -> nn.Module:
    """A new model of ``recipes.RECIPES`` with initial values from the seed."""
    if name == "gpt":
        return GPT(GPTConfig(), seed)
    torch.manual_seed(seed)
    return _build_gpt2()


def blocks_of(model: Any) -> Iterable[nn.Module]:
    """The modules that become one sharded unit each."""
    return model.blocks if isinstance(model, GPT) else model.transformer.h


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

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight
        weights = initial_weights(config, seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            stream = block(stream)
        return self.lm_head(self.norm(stream))


def _build_gpt2() -> nn.Module:
    """transformers' GPT-2 with its true vocabulary of 50257, narrow and shallow, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=GPT2_VOCABULARY,
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
