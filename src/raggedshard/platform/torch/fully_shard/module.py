"""A sharded module: its state, its lazy initialisation and the methods that users call on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from raggedshard.fully_shard.state import HSDPState, RunContext
from raggedshard.platform.torch.fully_shard.hooks import TorchEngine
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh
from raggedshard.platform.torch.fully_shard.param_group import HSDPParamGroup

__all__ = [
    "FSDPModule",
    "TorchState",
    "UnshardHandle",
    "check_reshard_after_forward",
    "lazy_init",
    "mix_in",
    "state_of",
]

_STATE = "_raggedshard_state"


class TorchState(HSDPState):
    """`HSDPState` with the torch objects that belong to it."""

    group: HSDPParamGroup | None

    def __init__(
        self, modules: tuple[nn.Module, ...], group: HSDPParamGroup | None, reshard_after_forward: bool | int | None
    ) -> None:
        super().__init__(group, reshard_after_forward)
        self.modules = modules

    def set_reshard_after_forward(self, value: bool | int | None) -> None:
        self.reshard_after_forward = value
        if self.group is not None:
            self.group.post_forward_group = _post_forward_group(value, self.group.dp_mesh)


def state_of(module: nn.Module) -> TorchState | None:
    """The state of a module that `fully_shard` was applied to."""
    return module.__dict__.get(_STATE)


def _post_forward_group(value: bool | int | None, dp_mesh: DataParallelMesh) -> dist.ProcessGroup | None:
    """The smaller group that gathers before backward when ``reshard_after_forward`` is an int."""
    check_reshard_after_forward(value, dp_mesh)
    if value is None or isinstance(value, bool) or value == dp_mesh.shard_world_size:
        return None
    return _subgroup(dp_mesh, value)


def check_reshard_after_forward(value: bool | int | None, dp_mesh: DataParallelMesh) -> None:
    """Raise ValueError for an int that is no number of ranks to reshard to."""
    world_size = dp_mesh.shard_world_size
    if value is not None and not isinstance(value, bool) and (not 1 <= value <= world_size or world_size % value):
        raise ValueError(
            f"reshard_after_forward={value} must divide the {world_size} ranks of mesh dim {dp_mesh.shard_dim_name}; "
            "give a divisor, True or False"
        )


_SUBGROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _subgroup(dp_mesh: DataParallelMesh, size: int) -> dist.ProcessGroup:
    """Groups of ``size`` neighbours along the shard dim, made once per mesh."""
    groups = _SUBGROUPS.setdefault(dp_mesh.shard_group, {})
    if size not in groups:
        rows = dp_mesh.mesh.mesh.view(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows)
        assert isinstance(group, dist.ProcessGroup)
        groups[size] = group
    return groups[size]


def lazy_init(state: TorchState, module: nn.Module) -> None:
    """At the first forward: the outermost unit becomes the root, and all units and parameters get their full names."""
    if state.context is not None:
        return
    states: dict[TorchState, str] = {}
    for root in state.modules:
        for name, child in root.named_modules():
            child_state = state_of(child)
            if child_state is not None:
                states.setdefault(child_state, name)
    names = list(states.values())
    for number, (child_state, name) in enumerate(states.items()):
        child_state.name = name
        if child_state.group is not None:
            child_state.group.unit, child_state.group.unit_names = number, names
    _name_parameters(state)
    _check_materialised(states)
    for child_state in states:
        if child_state.group is not None:
            child_state.group.reset_sharded_params()
    RunContext(state, list(states), TorchEngine())


def _name_parameters(root: TorchState) -> None:
    paths = {child: name for module in root.modules for name, child in module.named_modules()}
    for module in paths:
        child_state = state_of(module)
        for p in child_state.group.params if child_state is not None and child_state.group is not None else ():
            slot = p.slots[0]
            p.name = f"{paths[slot.module]}.{slot.name}".lstrip(".")


def _check_materialised(states: Iterable[TorchState]) -> None:
    meta = [p.name for s in states if s.group is not None for p in s.group.params if p.sharded_param.is_meta]
    if meta:
        raise RuntimeError(
            f"parameters {meta} are still on the meta device. Materialise them before the first forward: "
            "module.to_empty(device=...) and initialise their values, or load_state_dict(..., assign=True)"
        )


def mix_in(module: nn.Module, state: TorchState) -> None:
    cls = type(module)
    module.__dict__[_STATE] = state
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: HSDPState) -> None:
        self._state: HSDPState | None = state

    def wait(self) -> None:
        """Finish the all-gather: the module's parameters are the unsharded ones afterwards."""
        if self._state is not None and self._state.group is not None:
            self._state.group.wait_for_unshard()
        self._state = None


# The mixin goes in front of a module's own class; only a type checker needs to know that it is one.
_Module = nn.Module if TYPE_CHECKING else object


class FSDPModule(_Module):
    """The methods that a sharded module has on top of its own; mixed in by `fully_shard`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A container that makes another of its own class (a slice of nn.Sequential) makes an unsharded one.
        original: Any = cls.__mro__[2]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def _fsdp_state(self) -> TorchState:
        state = state_of(self)
        assert state is not None
        return state

    def _fsdp_states(self, recurse: bool = True) -> Iterator[TorchState]:
        modules = self.modules() if recurse else [self]
        return iter(dict.fromkeys(s for s in map(state_of, modules) if s is not None))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units inside it).

        Returns:
            With ``async_op`` a handle whose ``wait()`` finishes the gather, else ``None``.
        """
        state = self._fsdp_state()
        if state.context is None:
            lazy_init(state, self)
        state.unshard(async_op=async_op)
        return UnshardHandle(state) if async_op else None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and put the sharded ones back."""
        self._fsdp_state().reshard()

    def set_forward_prefetch_modules(self, modules: list[FSDPModule]) -> None:
        """Units to start gathering while this one's forward runs, in that order."""
        self._fsdp_state().forward_prefetch = [_require_unit(m)._fsdp_state() for m in modules]

    def set_backward_prefetch_modules(self, modules: list[FSDPModule]) -> None:
        """Units to start gathering while this one's backward runs, instead of the one that ran before it."""
        self._fsdp_state().backward_prefetch = [_require_unit(m)._fsdp_state() for m in modules]

    set_modules_to_forward_prefetch = set_forward_prefetch_modules
    set_modules_to_backward_prefetch = set_backward_prefetch_modules

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False`` keeps gradients unreduced on each rank, for accumulation without communication."""
        for state in self._fsdp_states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: ``False`` reduces over the shard dim only and keeps the rest for a later backward."""
        for state in self._fsdp_states(recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """``False`` tells that another backward of the same forward follows."""
        for state in self._fsdp_states():
            if state.context is None:
                lazy_init(self._fsdp_state(), self)
            assert state.context is not None
            state.context.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `fully_shard`'s argument of that name."""
        for state in self._fsdp_states(recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """``False`` keeps parameters unsharded after backward, e.g. between the steps of an accumulation."""
        for state in self._fsdp_states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this unit by ``factor`` instead of the number of data-parallel ranks."""
        group = self._fsdp_state().group
        if group is not None:
            group.gradient_divide_factor = factor

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``to_empty``, ``cpu`` and dtype casts act on the sharded parameters and rebuild their storage."""
        state = self._fsdp_state()
        state.reshard()
        result = super()._apply(*args, **kwargs)
        if state.group is not None:
            state.group.reset_sharded_params()
        return result


def _require_unit(module: Any) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"prefetch takes modules that fully_shard was applied to, got {type(module).__name__}")
    return module
