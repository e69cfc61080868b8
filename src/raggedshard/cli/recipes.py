"""What ``raggedshard train`` trains, said without a framework: sizes that few numbers of ranks divide."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from raggedshard.cli.data import BYTE_VOCABULARY, Corpus, byte_corpus, word_corpus

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Recipe:
    """A model's text, and what each rank trains on in a step: ``rows_per_rank`` rows of ``context`` tokens."""

    corpus: Callable[[], Corpus]
    context: int
    rows_per_rank: int


RECIPES = {
    "gpt": Recipe(byte_corpus, context=64, rows_per_rank=4),
    "gpt2": Recipe(lambda: word_corpus(GPT2_VOCABULARY), context=32, rows_per_rank=2),
}


@dataclass(frozen=True)
class GPTConfig:
    """Odd on purpose: 257, 105, 315 and 421 rows divide by no even number of ranks."""

    vocabulary: int = BYTE_VOCABULARY
    context: int = 64
    layers: int = 4
    heads: int = 7
    width: int = 105
    mlp_width: int = 421


INITIAL_STD = 0.02
"""Of every weight matrix, as in GPT-2."""


def initial_weights(config: GPTConfig, seed: int) -> dict[str, np.ndarray]:
    """The GPT's parameters by name, float32: the same on every framework, so that they can train alike.

    Matrices are drawn from a normal distribution, biases are 0 and the weights of norms 1.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in _shapes(config):
        if len(shape) == 2:
            weights[name] = generator.normal(0.0, INITIAL_STD, shape).astype(np.float32)
        else:
            weights[name] = np.full(shape, float(name.endswith("norm.weight")), np.float32)
    return weights


def _shapes(config: GPTConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, mlp_width = config.width, config.mlp_width
    block = {
        "attn_norm.weight": (width,),
        "attn_norm.bias": (width,),
        "qkv.weight": (3 * width, width),
        "attn_out.weight": (width, width),
        "attn_out.bias": (width,),
        "mlp_norm.weight": (width,),
        "mlp_norm.bias": (width,),
        "mlp_up.weight": (mlp_width, width),
        "mlp_up.bias": (mlp_width,),
        "mlp_down.weight": (width, mlp_width),
        "mlp_down.bias": (width,),
    }
    yield "embedding.weight", (config.vocabulary, width)
    yield "positions.weight", (config.context, width)
    for layer in range(config.layers):
        yield from ((f"blocks.{layer}.{name}", shape) for name, shape in block.items())
    yield from {"norm.weight": (width,), "norm.bias": (width,)}.items()
