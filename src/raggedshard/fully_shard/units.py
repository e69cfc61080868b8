"""Which module belongs to which unit, and what everything is called: one walk over modules for both backends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from raggedshard.fully_shard.data_parallel import DataParallelRoles, check_post_forward_ranks
from raggedshard.fully_shard.param import Slot, UnitParam
from raggedshard.fully_shard.state import Engine, HSDPState, RunContext

__all__ = [
    "ModuleTree",
    "begin_run",
    "make_params",
    "named_modules",
    "own_modules",
]


P = TypeVar("P", bound=UnitParam[Any])


class ModuleTree(Protocol):
    """How a framework's modules hang together."""

    kind: str
    """What the framework calls a module."""

    def is_module(self, value: Any) -> bool: ...

    def has_forward(self, module: Any) -> bool: ...

    def children(self, module: Any) -> Iterable[tuple[str, Any]]: ...

    def parameters(self, module: Any) -> Iterable[tuple[str, Any]]:
        """A module's own parameters, without its children's."""
        ...

    def state_of(self, module: Any) -> HSDPState | None:
        """The unit that starts at the module."""
        ...


def check_modules(modules: Sequence[Any], tree: ModuleTree) -> None:
    """Check that a unit can be made of some modules.

    Raises:
        ValueError: there are none, or one is no module, a container without forward, or a unit already.
    """
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        name = type(module).__name__
        if not tree.is_module(module):
            raise ValueError(f"fully_shard takes an {tree.kind} or a list of them, got {name}")
        if not tree.has_forward(module):
            raise ValueError(
                f"fully_shard cannot hook {name}, a container without forward; apply it to each of "
                "its modules, or to the module that runs them"
            )
        if tree.state_of(module) is not None:
            raise ValueError(f"fully_shard was applied to this {name} already")


def collect_slots(modules: Sequence[Any], ignored: Iterable[Any], tree: ModuleTree) -> list[tuple[Any, list[Slot]]]:
    """Every parameter that is not in another unit, with all its places; tied ones stand once."""
    found: dict[int, tuple[Any, list[Slot]]] = {}
    left_out = {id(param) for param in ignored}
    for path, module in own_modules(modules, tree):
        for name, param in tree.parameters(module):
            if id(param) not in left_out:
                found.setdefault(id(param), (param, []))[1].append(Slot(module, name, path))
    return list(found.values())


def own_modules(modules: Sequence[Any], tree: ModuleTree) -> Iterator[tuple[str, Any]]:
    """``(path, module)`` of a unit, without those of the units inside it; each module once."""
    seen: set[int] = set()
    for index, root in enumerate(modules):
        yield from _walk(root, f"{index}." if len(modules) > 1 else "", seen, tree, enter_units=False)


def make_params(
    modules: Sequence[Any],
    tree: ModuleTree,
    dp_mesh: DataParallelRoles,
    reshard_after_forward: bool | int | None,
    ignored: Iterable[Any] | None,
    sharded_as: Callable[[Any], Any],
    make: Callable[[Any, list[Slot]], P],
) -> list[P]:
    """Check all that ``fully_shard`` was given, then shard a unit's parameters: a call that raises changes nothing.

    Args:
        make: makes a backend's `UnitParam` of a parameter and its places, and raises where it cannot be sharded.

    Raises:
        ValueError, NotImplementedError: as `check_modules`, `check_ties`, `check_post_forward_ranks` and ``make``.
    """
    check_modules(modules, tree)
    check_post_forward_ranks(reshard_after_forward, dp_mesh)
    slots = collect_slots(modules, ignored or (), tree)
    check_ties(modules, slots, sharded_as)
    params = [make(param, places) for param, places in slots]
    for (param, _), sharded in zip(slots, params, strict=True):
        sharded.shard(param)
    claim(modules, slots)
    return params


def named_modules(module: Any, tree: ModuleTree) -> Iterator[tuple[str, Any]]:
    """``(name, module)`` of a module and all below it, units included; each module once."""
    return ((path.rstrip("."), child) for path, child in _walk(module, "", set(), tree, enter_units=True))


def _walk(module: Any, path: str, seen: set[int], tree: ModuleTree, enter_units: bool) -> Iterator[tuple[str, Any]]:
    if id(module) in seen or (not enter_units and tree.state_of(module) is not None):
        return
    seen.add(id(module))
    yield path, module
    for name, child in tree.children(module):
        yield from _walk(child, f"{path}{name}.", seen, tree, enter_units)


_CLAIMED: dict[int, tuple[weakref.ref[Any], str]] = {}
"""Original parameters that a unit took and their names there, by id: one that is still alive may be tied."""


def claim(modules: Sequence[Any], slots: Iterable[tuple[Any, list[Slot]]]) -> None:
    """Note that the unit of ``modules`` took these parameters."""
    for param, places in slots:
        _CLAIMED[id(param)] = (weakref.ref(param), f"'{places[0].full_name}' of {type(modules[0]).__name__}")


def check_ties(
    modules: Sequence[Any], slots: Iterable[tuple[Any, list[Slot]]], sharded_as: Callable[[Any], Any]
) -> None:
    """Check that no parameter is another unit's too: it would silently come apart.

    Args:
        sharded_as: parameter -> its placements if ``fully_shard`` made it, else ``None``.

    Raises:
        ValueError: one is.
    """
    for key in [key for key, (ref, _) in _CLAIMED.items() if ref() is None]:
        del _CLAIMED[key]
    for param, places in slots:
        what = f"parameter '{places[0].full_name}' of shape {tuple(param.shape)} in {type(modules[0]).__name__}"
        ref, owner = _CLAIMED.get(id(param), (None, None))
        if ref is not None and ref() is param:
            raise ValueError(
                f"{what} is tied to {owner}, another unit. Tied parameters must be in one unit: leave both to a "
                "common parent, or pass both modules in one list, fully_shard([module_a, module_b])"
            )
        if sharded_as(param) is not None:
            raise ValueError(
                f"{what} is sharded already, as {sharded_as(param)}, by a unit further up; apply fully_shard "
                "bottom-up, to children before their parents"
            )


def begin_run(root: HSDPState, modules: Sequence[Any], tree: ModuleTree, engine: Engine) -> None:
    """At the first forward: the outermost unit becomes the root, and units and parameters get their full names.

    Args:
        root: the unit that runs first.
        modules: its modules.

    Raises:
        RuntimeError: a parameter has no values yet.
    """
    paths = {id(child): (name, child) for module in modules for name, child in named_modules(module, tree)}
    states: dict[HSDPState, str] = {}
    for name, child in paths.values():
        state = tree.state_of(child)
        if state is not None:
            states.setdefault(state, name)
    names = list(states.values())
    groups: list[Any] = []
    for number, (state, name) in enumerate(states.items()):
        state.name = name
        if state.group is not None:
            group: Any = state.group
            group.unit, group.unit_names = number, names
            groups.append(group)
    for group in groups:
        for p in group.params:
            p.name = f"{paths[id(p.slots[0].module)][0]}.{p.slots[0].name}".lstrip(".")
    _check_materialised([p for group in groups for p in group.params])
    for group in groups:
        group.reset_sharded_params()
    RunContext(root, list(states), engine)


def _check_materialised(params: Iterable[Any]) -> None:
    meta = [p.name for p in params if p.is_meta]
    if meta:
        raise RuntimeError(
            f"parameters {meta} are still on the meta device. Materialise them before the first forward: "
            "module.to_empty(device=...) and initialise their values, or load_state_dict(..., assign=True)"
        )
