"""Language models with vocabularies that divide by nothing train like the unsharded ones, step by step.

Every case compares the loss, every gradient and every parameter of 10 steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from harness import run_distributed
from raggedshard.cli.torch_model import GPT, GPTConfig, loss_of
from raggedshard.torch import RaggedShard, fully_shard
from training import GLOBAL_BATCH, assert_no_even_claim, dtensors, mesh_of, train_beside

F64, F32 = torch.float64, torch.float32
TOKENS = 4


def build_gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=257, context=TOKENS, layers=2, heads=7, width=35, mlp_width=141))


def build_gpt2() -> nn.Module:
    """transformers' GPT-2 with its true vocabulary, tied, narrow: rows 50257, 18, 54 and 72."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50257,
        n_positions=7,
        n_embd=18,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def build_llama(tied: bool) -> nn.Module:
    """transformers' Llama with a vocabulary of 32001, narrow: rows 32001, 20, 10 and 37."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32001,
        hidden_size=20,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    # Its eager attention and its own norms compute in float32 whatever the dtype, which would hide all below 1e-8.
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.input_layernorm = nn.RMSNorm(20, eps=config.rms_norm_eps)
        layer.post_attention_layernorm = nn.RMSNorm(20, eps=config.rms_norm_eps)
    model.model.norm = nn.RMSNorm(20, eps=config.rms_norm_eps)
    return model


def build_untied_llama() -> nn.Module:
    return build_llama(tied=False)


def build_tied_llama() -> nn.Module:
    return build_llama(tied=True)


Blocks = Callable[[Any], nn.ModuleList]
MODELS: dict[str, tuple[Callable[[], nn.Module], Blocks, str, int]] = {
    # how to build it, its blocks, its embedding and the rows of that
    "gpt": (build_gpt, lambda m: m.blocks, "embedding.weight", 257),
    "gpt2": (build_gpt2, lambda m: m.transformer.h, "transformer.wte.weight", 50257),
    "llama": (build_untied_llama, lambda m: m.model.layers, "model.embed_tokens.weight", 32001),
    "tied llama": (build_tied_llama, lambda m: m.model.layers, "model.embed_tokens.weight", 32001),
}


def token_batches(steps: int, vocabulary: int) -> Iterator[torch.Tensor]:
    """The same two batches in turn, so that the loss goes down; the vocabulary's last rows are among the tokens."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(vocabulary, (GLOBAL_BATCH, TOKENS + 1), generator=generator) for _ in range(2)]
    for batch in batches:
        batch[::4, 1] = vocabulary - 1
    for step in range(steps):
        yield batches[step % 2]


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return loss_of(model, batch[:, :-1], batch[:, 1:])


def train(rank: int, world_size: int, name: str, replicas: int, optimizer: str, dtype: torch.dtype) -> Any:
    build, blocks, embedding, rows = MODELS[name]
    torch.manual_seed(0)
    reference = build().to(dtype)
    model = copy.deepcopy(reference)
    mesh = mesh_of(world_size, replicas)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_no_even_claim(model, world_size // replicas)
    assert len(dtensors(model)) == len(list(model.parameters()))
    losses = train_beside(
        rank, world_size, model, reference, optimizer, token_batches(10, rows), next_token_loss, dtype=dtype
    )
    assert losses[-1] < losses[0]
    weight = dtensors(model)[embedding]
    return weight.placements, weight.to_local().shape[0]


@pytest.mark.parametrize(
    ("name", "world_size", "replicas", "optimizer", "dtype"),
    [
        ("gpt", 1, 1, "adamw", F64),
        ("gpt", 2, 1, "sgd", F64),
        ("gpt", 3, 1, "adamw", F64),
        ("gpt", 4, 1, "sgd", F32),
        ("gpt", 4, 1, "adamw", F32),
        ("gpt", 4, 2, "adamw", F64),
        ("gpt2", 1, 1, "sgd", F64),
        ("gpt2", 2, 1, "adamw with a large eps", F32),
        ("gpt2", 3, 1, "adamw", F64),
        ("gpt2", 4, 1, "adamw", F64),
        ("gpt2", 4, 1, "sgd", F32),
        ("gpt2", 4, 2, "sgd", F64),
        ("llama", 2, 1, "sgd", F64),
        ("llama", 4, 1, "adamw", F64),
        ("llama", 4, 2, "adamw", F32),
        ("tied llama", 1, 1, "adamw", F64),
        ("tied llama", 3, 1, "sgd", F64),
        ("tied llama", 4, 1, "adamw", F32),
    ],
    ids=str,
)
def test_a_language_model_trains_like_the_unsharded_one(name, world_size, replicas, optimizer, dtype):
    run_distributed(train, world_size, name, replicas, optimizer, dtype, timeout=120)


def test_gpt2s_embedding_is_ragged_to_the_last_row():
    values = run_distributed(placements_of, 4, "gpt2", 1)
    units = (12565, 12565, 12565, 12562)  # 50257 rows, 4 chunks of ceil(50257 / 4) rows
    assert values == [((RaggedShard((0,), units),), rows) for rows in units]
    values = run_distributed(placements_of, 4, "gpt2", 2)
    halves = (25129, 25128)
    assert values == [((Replicate(), RaggedShard((0,), halves)), rows) for rows in halves * 2]


def placements_of(rank: int, world_size: int, name: str, replicas: int) -> Any:
    build, _, embedding, _ = MODELS[name]
    model = build()
    fully_shard(model, mesh=mesh_of(world_size, replicas))
    weight = dtensors(model)[embedding]
    return weight.placements, weight.to_local().shape[0]
