"""``state_dict`` and ``load_state_dict`` of a unit: always the sharded Parameters, whatever the values come as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raggedshard.fully_shard.state import HSDPState

__all__ = ["attach_state_dict_hooks"]


def attach_state_dict_hooks(modules: Sequence[nn.Module], state: HSDPState) -> None:
    """Reshard before values go out or come in, cut full values to shards, and restore the storage afterwards."""
    group: Any = state.group

    def before_save(module: nn.Module, *_: Any) -> None:
        state.reshard()

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        state.reshard()
        paths = {child: name for name, child in module.named_modules()}
        for p in group.params:
            for slot in p.slots:
                if slot.module not in paths:
                    continue
                path = paths[slot.module]
                key = f"{prefix}{path}.{slot.name}" if path else f"{prefix}{slot.name}"
                value: Any = state_dict.get(key)
                if isinstance(value, torch.Tensor) and value.shape == p.sharded_param.shape:
                    state_dict[key] = p.shard_value(value)

    def after_load(module: nn.Module, _: Any) -> None:
        group.reset_sharded_params()

    for module in modules:
        module.register_state_dict_pre_hook(before_save)
        module.register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(after_load)
