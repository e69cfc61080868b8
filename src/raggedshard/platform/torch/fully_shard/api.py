"""`fully_shard` and the class that it mixes into modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raggedshard.fully_shard.policies import MixedPrecisionPolicy, OffloadPolicy
from raggedshard.platform.torch.dtensor import ShardedDTensor
from raggedshard.platform.torch.fully_shard.hooks import attach_hooks
from raggedshard.platform.torch.fully_shard.mesh import DataParallelMesh, default_mesh
from raggedshard.platform.torch.fully_shard.module import (
    FSDPModule,
    TorchState,
    check_reshard_after_forward,
    lazy_init,
    mix_in,
    state_of,
)
from raggedshard.platform.torch.fully_shard.param import HSDPParamV2, ParamSlot
from raggedshard.platform.torch.fully_shard.param_group import HSDPParamGroup
from raggedshard.platform.torch.fully_shard.state_dict import attach_state_dict_hooks

__all__ = ["fully_shard"]


ShardPlacementFn = Callable[[nn.Parameter], Any]
"""Parameter -> ``None`` (dim 0), a ``Shard`` or a ``RaggedShard``."""


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: Any = ...,
    offload_policy: Any = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[FSDPModule]: ...
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over the ranks of a mesh, whatever their sizes.

    Apply it bottom-up: each call makes a unit of the parameters that no earlier call took, and a unit's parameters
    are gathered for its forward and backward only.

    Args:
        module: the module, or a list of modules that make one unit.
        mesh: 1-D to shard (FSDP), 2-D ``(replicate, shard)`` for HSDP; ``None`` for all ranks in one shard dim.
        reshard_after_forward: ``True`` frees the parameters between forward and backward, ``False`` keeps them, an
            int keeps a shard for groups of so many neighbouring ranks; ``None`` means ``True``, ``False`` for the root.
        shard_placement_fn: parameter -> ``None`` (dim 0), ``Shard(dim)``, or a ``RaggedShard`` with one's own units.
        mp_policy: dtypes of computation and reduction; this package's or torch's class.
        offload_policy: `CPUOffloadPolicy` keeps shards in host memory.
        ignored_params: parameters to leave alone.

    Returns:
        The same module; it is an `FSDPModule` now, and its parameters are DTensors of their logical shapes, with
        ``Shard(0)`` where dim 0 divides by the ranks and `RaggedShard` or `RaggedStridedShard` where it does not.

    Raises:
        ValueError: the module is a container without forward or sharded already; the mesh is not 1-D or 2-D; a
            parameter is a scalar, is tied to one of another unit, or its requested placement does not fit.
        NotImplementedError: ``shard_placement_fn`` asks for a dim other than 0 that does not divide.
    """
    modules = tuple(module) if isinstance(module, list | tuple) else (module,)
    _check_modules(modules)
    dp_mesh = DataParallelMesh(mesh if mesh is not None else default_mesh())
    check_reshard_after_forward(reshard_after_forward, dp_mesh)
    slots = _collect_slots(modules, ignored_params or set())
    _check_ties(modules, slots)
    params = [
        HSDPParamV2(
            name=names[0],
            param=param,
            slots=[slot for slot, _ in zip(places, names, strict=True)],
            dp_mesh=dp_mesh,
            shard_placement_fn=shard_placement_fn,
            param_dtype=mp_policy.param_dtype,
            reduce_dtype=mp_policy.reduce_dtype,
            offload_policy=offload_policy,
        )
        for param, (places, names) in slots.items()
    ]
    # Every check has passed: a call that raises leaves the module as it was.
    for param, sharded in zip(slots, params, strict=True):
        sharded.shard(param)
    for param, (_, names) in slots.items():
        _CLAIMED[id(param)] = (weakref.ref(param), f"'{names[0]}' of {type(modules[0]).__name__}")
    _move_buffers(modules, dp_mesh.device)
    group = HSDPParamGroup(params, dp_mesh) if params else None
    state = TorchState(modules, group, reshard_after_forward)
    if group is not None:
        group.accumulate_in_reduce_dtype = mp_policy.reduce_dtype is not None
    state.set_reshard_after_forward(reshard_after_forward)
    attach_hooks(modules, state, mp_policy, lambda m: lazy_init(state, m))
    for m in modules:
        mix_in(m, state)
    if group is not None:
        attach_state_dict_hooks(modules, state)
    return module


def _check_modules(modules: tuple[nn.Module, ...]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard takes an nn.Module or a list of them, got {type(module).__name__}")
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard cannot hook {type(module).__name__}, a container without forward; apply it to each of "
                "its modules, or to the module that runs them"
            )
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was applied to this {type(module).__name__} already")


def _collect_slots(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[list[ParamSlot], list[str]]]:
    """Every parameter that is not in another unit, with all its places and their names; ties within share a key."""
    found: dict[nn.Parameter, tuple[list[ParamSlot], list[str]]] = {}
    seen: set[nn.Module] = set()
    for index, root in enumerate(modules):
        prefix = f"{index}." if len(modules) > 1 else ""
        for path, module in _own_modules(root, prefix, seen):
            for name, param in module._parameters.items():
                if param is None or param in ignored:
                    continue
                places, names = found.setdefault(param, ([], []))
                places.append(ParamSlot(module, name))
                names.append(path + name)
    return found


def _own_modules(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, without those of the units inside it."""
    if module in seen or state_of(module) is not None:
        return
    seen.add(module)
    yield path, module
    for name, child in module.named_children():
        yield from _own_modules(child, f"{path}{name}.", seen)


_CLAIMED: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
"""Original parameters that a unit took and their names there, by id: one that is still alive may be tied."""


def _check_ties(modules: tuple[nn.Module, ...], slots: dict[nn.Parameter, tuple[list[ParamSlot], list[str]]]) -> None:
    """A parameter that another unit took and that is still somewhere else would silently come apart."""
    for key in [key for key, (ref, _) in _CLAIMED.items() if ref() is None]:
        del _CLAIMED[key]
    for param, (_, names) in slots.items():
        what = f"parameter '{names[0]}' of shape {tuple(param.shape)} in {type(modules[0]).__name__}"
        ref, owner = _CLAIMED.get(id(param), (None, None))
        if ref is not None and ref() is param:
            raise ValueError(
                f"{what} is tied to {owner}, another unit. Tied parameters must be in one unit: leave both to a "
                "common parent, or pass both modules in one list, fully_shard([module_a, module_b])"
            )
        if isinstance(param, ShardedDTensor):
            raise ValueError(
                f"{what} is sharded already, as {param.placements}, by a unit further up; apply fully_shard bottom-up, "
                "to children before their parents"
            )


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for root in modules:
        for _, module in _own_modules(root, "", set()):
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
