"""Full values into sharded tensors: what ``torch.distributed.checkpoint.state_dict`` needs to know of our layouts.

``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``full_state_dict=True`` cut full tensors by functions of
``torch.distributed._state_dict_utils`` that offer a tensor class no say: one refuses placements that torch does not
know, the other takes them for one box at offset 0, which is silently wrong. Both are looked up by name there, so both
are wrapped here, once, when this module is imported; tensors and placements that torch knows go through to torch.
Needed on torch 2.12 to 2.15; it can go when torch asks the tensor for its own part, as its checkpoints do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from raggedshard.platform.torch.distribute import distribute_tensor
from raggedshard.platform.torch.dtensor import ShardedDTensor, wrap_local
from raggedshard.platform.torch.shards import has_ragged, local_of, part_of

__all__: list[str] = []


def _fill(tensor: ShardedDTensor, full: torch.Tensor) -> ShardedDTensor:
    """This rank's part of ``full`` in ``tensor``, or in a new tensor of its layout if it is on meta."""
    part = part_of(full.detach(), tensor.device_mesh, tensor.placements)
    if tensor.is_meta:
        return wrap_local(part, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    local_of(tensor).detach().copy_(part)
    return tensor


def _wrap_distribute_tensors(original: Any) -> Any:
    @functools.wraps(original)
    def distribute_tensors(local_state_dict: dict[str, Any], keys: Sequence[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local_state_dict.get(key)  # (the sharded tensor, the full one) where torch has to cut
            if isinstance(pair, tuple) and isinstance(pair[0], ShardedDTensor):
                local_state_dict[key] = _fill(*pair)
        original(local_state_dict, keys, *args, **kwargs)

    return distribute_tensors


def _wrap_distribute_tensor(original: Any) -> Any:
    @functools.wraps(original)
    def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], **kwargs: Any) -> Any:
        function = distribute_tensor if has_ragged(placements) else original
        return function(tensor, mesh, placements, **kwargs)

    return distribute


_state_dict_utils._distribute_tensors = _wrap_distribute_tensors(_state_dict_utils._distribute_tensors)
_state_dict_utils.distribute_tensor = _wrap_distribute_tensor(_state_dict_utils.distribute_tensor)
