"""Which rule an operation on a `ShardedDTensor` takes.

element-wise, foreach, fused optimizers   on the local tensors                       `elementwise`
copies and factories                      on the local tensor, layout kept           `factories`
reductions over all elements              locally, then one value per rank           `reductions`
random                                    drawn for the whole tensor                 `gathered`
views that move elements                  gathered; writes go through to the base    `gathered`
all else with a ragged placement          gathered                                   `gathered`
all else without one                      torch's own DTensor
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import increment_version

from raggedshard.platform.torch import elementwise, factories, gathered, reductions
from raggedshard.platform.torch.dtensor import ShardedDTensor

__all__ = ["dispatch"]

Rule = Callable[[Any, tuple, dict], Any]

_FUSED = ("_fused_adam", "_fused_adamw", "_fused_adagrad", "_fused_sgd")


def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func``, an operator overload, on arguments of which at least one is a `ShardedDTensor`."""
    if torch.is_inference_mode_enabled() and gathered.is_view(func) and not args[0].is_inference():
        with torch.inference_mode(False):  # a view of a normal tensor is a normal tensor in inference mode too
            return rule_of(func)(func, args, kwargs)
    result = rule_of(func)(func, args, kwargs)
    if elementwise.written_arguments(func):
        _note_writes(elementwise.written_tensors(func, args, kwargs))
    return result


@cache
def rule_of(func: Any) -> Rule:
    """The rule for an operator overload; the same on all ranks whatever they hold."""
    name = func._schema.name.removeprefix("aten::")
    rule = factories.RULES.get(name) or reductions.RULES.get((name, func._overloadname)) or gathered.RULES.get(name)
    if rule is not None:
        return rule
    if torch.Tag.nondeterministic_seeded in func.tags:
        return gathered.run_random
    if name.rstrip("_") in _FUSED or name.startswith("_foreach_"):
        return _foreach if _is_elementwise_list(name) else gathered.run_gathered
    if elementwise.is_elementwise(func):
        return _elementwise
    if torch.Tag.inplace_view in func.tags:
        return gathered.run_inplace_view
    if gathered.is_view(func):
        return gathered.run_view
    return gathered.run_gathered


def _note_writes(written: list[torch.Tensor]) -> None:
    """Count the writes, which torch does not do below autograd, and pass on those to gathered views."""
    sharded = [tensor for tensor in written if isinstance(tensor, ShardedDTensor)]
    increment_version([t._local_tensor for t in sharded if not t._local_tensor.is_inference()])
    for tensor in sharded:
        if tensor._gathered is not None:
            tensor._gathered.write_through()


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    result = elementwise.run_elementwise(func, args, kwargs)
    return gathered.run_gathered(func, args, kwargs) if result is NotImplemented else result


def _foreach(func: Any, args: tuple, kwargs: dict) -> Any:
    result = elementwise.run_foreach(func, args, kwargs)
    return gathered.run_gathered(func, args, kwargs) if result is NotImplemented else result


def _is_elementwise_list(name: str) -> bool:
    if name.rstrip("_") in _FUSED:
        return True
    return elementwise.is_elementwise_name(name.removeprefix("_foreach_").rstrip("_"))
