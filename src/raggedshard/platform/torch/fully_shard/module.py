"""A sharded module: its state, its lazy initialisation and the methods that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from raggedshard.fully_shard.methods import FSDPMethods
from raggedshard.fully_shard.state import HSDPState
from raggedshard.fully_shard.units import begin_run
from raggedshard.platform.torch.fully_shard.hooks import TorchEngine
from raggedshard.platform.torch.fully_shard.param_group import HSDPParamGroup

__all__ = ["TREE", "FSDPModule", "TorchState", "lazy_init", "mix_in", "state_of"]

_STATE = "_raggedshard_state"


class TorchState(HSDPState):
    """`HSDPState` of torch modules."""

    group: HSDPParamGroup | None


def state_of(module: nn.Module) -> TorchState | None:
    """The state of a module that `fully_shard` was applied to."""
    return module.__dict__.get(_STATE)


class _TorchTree:
    """The `ModuleTree` of torch."""

    kind = "nn.Module"

    def is_module(self, value: Any) -> bool:
        return isinstance(value, nn.Module)

    def has_forward(self, module: nn.Module) -> bool:
        return type(module).forward is not nn.Module.forward

    def children(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return module.named_children()

    def parameters(self, module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in module._parameters.items() if param is not None]

    def state_of(self, module: nn.Module) -> TorchState | None:
        return state_of(module)


TREE = _TorchTree()


def lazy_init(state: TorchState) -> None:
    """At the first forward of the outermost unit."""
    if state.context is None:
        begin_run(state, state.modules, TREE, TorchEngine())


def mix_in(module: nn.Module, state: TorchState) -> None:
    cls = type(module)
    module.__dict__[_STATE] = state
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


# The mixin goes in front of a module's own class; only a type checker needs to know that it is one.
_Module = nn.Module if TYPE_CHECKING else object


class FSDPModule(FSDPMethods, _Module):
    """The methods that a sharded module has on top of its own; mixed in by `fully_shard`."""

    def _fsdp_state(self) -> TorchState:
        state = state_of(self)
        assert state is not None
        return state

    def _fsdp_states(self, recurse: bool = True) -> Iterator[TorchState]:
        modules = self.modules() if recurse else [self]
        return iter(dict.fromkeys(s for s in map(state_of, modules) if s is not None))

    def _fsdp_begin(self) -> None:
        lazy_init(self._fsdp_state())

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty``, ``cpu`` and dtype casts act on the sharded parameters and rebuild their storage."""
        state = self._fsdp_state()
        state.reshard()
        result = super()._apply(*args, **kwargs)
        if state.group is not None:
            state.group.reset_sharded_params()
        return result
