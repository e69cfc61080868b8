"""transformers' Llama under tensor parallelism and FSDP, with everything else that people switch on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from harness import run_distributed
from raggedshard.torch import DeviceMesh, FSDPModule, RaggedStridedShard, fully_shard, init_device_mesh
from training import GLOBAL_BATCH, train_beside

VOCABULARY = 32001


def llama(tied: bool) -> LlamaForCausalLM:
    """The true vocabulary, narrow and shallow; 22 MLP rows are 11 on each of 2 TP ranks, so 6 and 5 of 2 shards."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    return LlamaForCausalLM(config)


def apply_tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh, tied: bool) -> None:
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    if tied:  # torch distributes both places on their own
        model.lm_head.weight = model.model.embed_tokens.weight


def shard_llama(model: LlamaForCausalLM, mesh: DeviceMesh) -> FSDPModule:
    layers = [fully_shard(cast(nn.Module, layer), mesh=mesh) for layer in model.model.layers]
    layers[0].set_forward_prefetch_modules(layers[1:])
    layers[1].set_backward_prefetch_modules(layers[:1])
    return fully_shard(model, mesh=mesh)


def token_batches(steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        batch = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 6), generator=generator)
        batch[:, 0] = torch.arange(VOCABULARY - GLOBAL_BATCH, VOCABULARY)  # the last rows are used in every step
        yield batch


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def train_llama(rank: int, world_size: int, tied: bool, optimizer: str) -> None:
    torch.manual_seed(0)
    reference = llama(tied).double()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = llama(tied).double()
    apply_tensor_parallel(model, mesh["tp"], tied)
    model.activation_checkpointing_enable({"use_reentrant": False})
    sharded = shard_llama(model, mesh["dp"])
    parameters = list(model.parameters())
    sharded.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    copy_buffers(model, reference)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    _check_placements(model)
    model.train()
    reference.train()
    part, ranks = rank // 2, world_size // 2
    train_beside(
        rank, world_size, model, reference, optimizer, token_batches(10), language_loss, ranks=ranks, part=part
    )


def copy_buffers(model: nn.Module, reference: nn.Module) -> None:
    """Rotary frequencies are no part of a state dict."""
    for (_, buffer), (_, value) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        buffer.copy_(value)


def _check_placements(model: LlamaForCausalLM) -> None:
    embedding = cast(Any, model.model.embed_tokens.weight)
    # TP blocks of 16001 and 16000 rows, cut in two: 8001 + 8000 and 8000 + 8000
    assert embedding.placements == (RaggedStridedShard((0,), (8001, 8000, 8000, 8000), 2), Shard(0))
    layer: Any = model.model.layers[0]
    assert layer.mlp.up_proj.weight.placements == (RaggedStridedShard((0,), (6, 5), 2), Shard(0))
    norm = layer.input_layernorm.weight
    assert isinstance(norm, DTensor)
    assert norm.placements == (Shard(0),)


@pytest.mark.parametrize(("tied", "optimizer"), [(True, "adamw"), (False, "sgd")])
def test_llama_with_tp_fsdp_recompute_prefetch_and_meta_init_trains_like_the_unsharded_model(tied, optimizer):
    run_distributed(train_llama, 4, tied, optimizer, timeout=150)
