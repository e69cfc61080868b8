"""Units on MindSpore in every order of use: prefetch, recompute, deferred init, ties, several uses, accumulation."""

from __future__ import annotations

import dataclasses
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from harness import run_distributed
from ms_training import (
    LIMIT,
    OddMLP,
    assert_same_parameters,
    float_batches,
    full,
    gradients,
    mean_over_ranks,
    mesh_of,
    own_part,
    shard_odd_mlp,
    square_loss,
    train_beside,
    twin,
)
from raggedshard.mindspore import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    enable_mindspore_backward_compact,
    fully_shard,
)

STYLES = ("value_and_grad", "backward")


class Block(nn.Cell):
    """With ``nested``, it calls itself, and uses its weights again afterwards."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.up = nn.Dense(5, 7)
        self.down = nn.Dense(7, 5)
        self.nested = nested

    def construct(self, x: Tensor, is_inner: bool = False) -> Tensor:
        if self.nested and not is_inner:
            x = self(x, True)
        return x + self.down(ops.tanh(self.up(x)))


class Stack(nn.Cell):
    """Three blocks; with ``repeats``, each runs several times. ``recompute`` is where to recompute."""

    def __init__(self, repeats: int = 1, recompute: str = "", nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(nested) for _ in range(3)])
        self.head = nn.Dense(5, 3)
        self.repeats = repeats
        self.in_construct = recompute == "function"
        if recompute == "unit":
            for block in self.blocks:
                block.recompute(use_reentrant=False)
        if recompute == "inside":
            for block in self.blocks:
                block.up.recompute(use_reentrant=False)

    def construct(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            for block in self.blocks:
                x = ms.recompute(block, x, use_reentrant=False) if self.in_construct else block(x)
        return self.head(x)


def shard_stack(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def prefetching(model):
    blocks = list(model.blocks)
    for block, following in itertools.pairwise(blocks):
        block.set_forward_prefetch_modules([following])
        following.set_backward_prefetch_modules([block])
    model.set_forward_prefetch_modules([blocks[0]])
    return model


CASES = {
    "forward and backward prefetch": ({}, {}, prefetching),
    "parameters kept after forward": ({}, {"reshard_after_forward": False}, None),
    "resharded to smaller groups": ({}, {"reshard_after_forward": 2}, None),
    "a cell that runs several times": ({"repeats": 2}, {}, None),
    "a cell that calls itself": ({"nested": True}, {}, None),
    "recompute of a unit": ({"recompute": "unit"}, {}, None),
    "recompute inside a unit": ({"recompute": "inside"}, {}, None),
    "mindspore.recompute with prefetch": ({"recompute": "function"}, {}, prefetching),
}
"""What the stack is, how it is sharded, and what is done to it then."""


def train_stack(rank, world_size, case, style, replicas):
    make, options, prepare = CASES[case]
    reference, model = twin(lambda: Stack(**make))
    shard_stack(model, mesh=mesh_of(world_size, replicas), **options)
    if prepare is not None:
        prepare(model)
    return train_beside(rank, world_size, model, reference, "SGD", float_batches(10, 5), style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
def test_trains_like_the_unsharded_cell(case, style):
    world_size = 4 if "groups" in case else 2
    run_distributed(train_stack, world_size, case, style, 1, framework="mindspore", timeout=LIMIT)


@pytest.mark.parametrize("case", ["forward and backward prefetch", "mindspore.recompute with prefetch"])
def test_hsdp_trains_like_the_unsharded_cell(case):
    run_distributed(train_stack, 4, case, "backward", 2, framework="mindspore", timeout=LIMIT)


def train_deferred(rank, world_size, how):
    ms.set_seed(3)
    reference = OddMLP()
    ms.set_seed(3)
    if how == "no_init":
        with nn.utils.no_init_parameters():
            model = OddMLP()
    else:
        with ms.DeviceCtx("meta"):
            model = OddMLP()
    assert all(p.has_init or p.is_meta for p in model.get_parameters())
    shard_odd_mlp(model, mesh=mesh_of(world_size))
    with pytest.raises(RuntimeError, match=r"up\.weight.*init_parameters_data"):
        model.up.weight.to_local()
    model.init_parameters_data()
    for p, expected in zip(model.get_parameters(), reference.get_parameters(), strict=True):
        np.testing.assert_array_equal(full(p), expected.asnumpy(), err_msg=p.name)
    return train_beside(rank, world_size, model, reference, "SGD", float_batches(10), "backward")


@pytest.mark.parametrize("how", ["no_init", "meta"])
def test_deferred_initialisation_gives_the_values_of_an_eager_one(how):
    run_distributed(train_deferred, 2, how, framework="mindspore", timeout=LIMIT)


class Tied(nn.Cell):
    """An embedding of 7 rows whose weight is the head's too, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, embedding_table="normal")
        self.middle = nn.Dense(5, 5)
        self.frozen = nn.Dense(5, 5)
        self.head = nn.Dense(5, 7, has_bias=False)
        self.head.weight = self.embedding.embedding_table
        for p in self.frozen.get_parameters():
            p.requires_grad = False

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.frozen(ops.tanh(self.middle(x))))


def token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return ops.cross_entropy(logits.reshape((-1, 7)), tokens[:, 1:].reshape((-1,)))


def train_tied(rank, world_size, style):
    reference, model = twin(Tied)
    mesh = mesh_of(world_size)
    for unit in (model.middle, model.frozen, model):
        fully_shard(unit, mesh=mesh)
    assert model.head.weight is model.embedding.embedding_table
    assert len(model.trainable_params()) == 3
    generator = np.random.default_rng(0)
    batches = (Tensor(generator.integers(0, 7, (12, 6)).astype(np.int32)) for _ in range(10))
    return train_beside(rank, world_size, model, reference, "SGD", batches, style, token_loss)


@pytest.mark.parametrize("style", STYLES)
def test_tied_and_frozen_parameters(style):
    run_distributed(train_tied, 2, style, framework="mindspore", timeout=LIMIT)


def accumulate(rank, world_size, replicas, how):
    """Two micro-batches a step; the first without communication (or without its all-reduce)."""
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size, replicas))
    with enable_mindspore_backward_compact():
        for first, second in zip(float_batches(3), float_batches(3), strict=True):
            ((square_loss(reference, first) + square_loss(reference, second * 2)) / 1).backward()
            if how == "no sync":
                model.set_requires_gradient_sync(False)
            elif how == "no all-reduce":
                model.set_requires_all_reduce(False)
            square_loss(model, own_part(first, rank, world_size)).backward()
            if how != "sync":
                assert all(p.grad is None for p in model.trainable_params())
            model.set_requires_gradient_sync(True)
            model.set_requires_all_reduce(True)
            square_loss(model, own_part(second * 2, rank, world_size)).backward()
            for p, expected in zip(model.trainable_params(), reference.trainable_params(), strict=True):
                np.testing.assert_allclose(full(p.grad), expected.grad.asnumpy(), rtol=1e-5, atol=1e-6, err_msg=p.name)
            model.zero_grad()
            reference.zero_grad()


@pytest.mark.parametrize(
    ("world_size", "replicas", "how"), [(2, 1, "sync"), (2, 1, "no sync"), (4, 2, "no sync"), (4, 2, "no all-reduce")]
)
def test_gradients_accumulate(world_size, replicas, how):
    run_distributed(accumulate, world_size, replicas, how, framework="mindspore", timeout=LIMIT)


def half_precision(rank, world_size, reduce_dtype):
    reference, model = twin(OddMLP)
    policy = MixedPrecisionPolicy(param_dtype=ms.float16, reduce_dtype=reduce_dtype)
    seen = []
    model.mid.register_forward_pre_hook(lambda cell, args: seen.append((cell.weight.dtype, args[0].dtype)))
    mesh = mesh_of(world_size)
    fully_shard(model.up, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=ms.float32))
    (batch,) = float_batches(1)
    expected, expected_grads = gradients("value_and_grad", reference, square_loss, batch)
    loss, grads = gradients("value_and_grad", model, square_loss, own_part(batch, rank, world_size))
    assert loss.dtype == ms.float32
    assert seen[0] == (ms.float16, ms.float16)
    assert all(p.dtype == ms.float32 for p in model.trainable_params())
    np.testing.assert_allclose(mean_over_ranks(loss, world_size), expected.item(), rtol=2e-2)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == ms.float32
        np.testing.assert_allclose(full(grad), expected_grad.asnumpy(), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("reduce_dtype", [None, ms.float32], ids=str)
def test_mixed_precision_computes_in_float16_and_keeps_float32(reduce_dtype):
    run_distributed(half_precision, 2, reduce_dtype, framework="mindspore", timeout=LIMIT)


def checkpoint_round_trip(rank, world_size, path):
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size))
    whole = {name: p.full_tensor() for name, p in model.parameters_dict().items()}
    for p in model.get_parameters():
        p.set_data(p * 0)
    pointers = [p.data_ptr() for p in model.get_parameters()]
    if rank == 0:
        ms.save_checkpoint([{"name": name, "data": value} for name, value in whole.items()], path)
    mean_over_ranks(Tensor(np.zeros(1, np.float32)), world_size)  # a barrier: the file is there
    missing, unexpected = ms.load_param_into_net(model, ms.load_checkpoint(path))
    assert not missing and not unexpected
    assert pointers == [p.data_ptr() for p in model.get_parameters()]
    assert_same_parameters(model, reference, 0, 0)
    return train_beside(rank, world_size, model, reference, "SGD", float_batches(10), "value_and_grad")


def test_a_cells_own_parameter_dict_goes_out_and_in(tmp_path):
    run_distributed(checkpoint_round_trip, 4, str(tmp_path / "model.ckpt"), framework="mindspore", timeout=LIMIT)


def clip(rank, world_size, norm_type):
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size))
    (batch,) = float_batches(1)
    with enable_mindspore_backward_compact():
        square_loss(model, own_part(batch, rank, world_size)).backward()
        square_loss(reference, batch).backward()
        flat = np.concatenate([p.grad.asnumpy().reshape(-1) for p in reference.trainable_params()])
        expected = np.linalg.norm(flat, norm_type)
        norm = clip_grad_norm_(model.trainable_params(), expected / 4, norm_type)
        np.testing.assert_allclose(norm.asnumpy(), expected, rtol=1e-5)
        for p, other in zip(model.trainable_params(), reference.trainable_params(), strict=True):
            np.testing.assert_allclose(full(p.grad), other.grad.asnumpy() / 4, rtol=1e-4, atol=1e-7)
        assert float(clip_grad_norm_(model.trainable_params(), 1e9, norm_type)) == pytest.approx(expected / 4, rel=1e-4)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_sees_all_ranks_and_no_garbage_of_empty_shards(norm_type):
    run_distributed(clip, 4, norm_type, framework="mindspore", timeout=LIMIT)


def evaluates(rank, world_size):
    """A forward outside of training gives the unsharded output and leaves nothing gathered."""
    reference, model = twin(Stack)
    prefetching(shard_stack(model, mesh=mesh_of(world_size)))
    (batch,) = float_batches(1, 5)
    np.testing.assert_allclose(model(batch).asnumpy(), reference(batch).asnumpy(), rtol=1e-5, atol=1e-6)
    assert not any(state.group.is_unsharded for state in model._fsdp_states())
    return [unit.head.weight.shape for unit in (model,)]


def test_evaluation():
    assert run_distributed(evaluates, 2, framework="mindspore", timeout=LIMIT) == [[(3, 5)]] * 2
