"""A nested state as flat keys: tensors on one side, JSON values on the other.

    {"model": {"w": T}, "optim": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}}

    tensors   model.w
    values    optim.groups.0.lr, optim.groups.0.betas

Keys are made as torch.distributed.checkpoint makes them, so that both name a tensor alike: dicts are always entered,
lists where they hold a tensor or a dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FlatState", "decode_value", "encode_value", "flatten_state"]


@dataclass
class FlatState:
    """The leaves of a nested state by key.

    places: for each value the container that holds it and its key there, so that a load can replace it.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def set_value(self, key: str, value: Any) -> None:
        container, place = self.places[key]
        container[place] = value


def flatten_state(state: Mapping[str, Any], is_tensor: Callable[[Any], bool]) -> FlatState:
    """The leaves of ``state``.

    Raises:
        TypeError: ``state`` is no dict, or a tensor stands in a tuple, where a load could not replace its neighbours.
        ValueError: two leaves have the same key.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a checkpoint's state is a dict of tensors and values, got {type(state).__name__}")
    flat = FlatState()
    for container, place, path, leaf in _leaves(state, "", is_tensor):
        if path in flat.tensors or path in flat.values:
            raise ValueError(f"key '{path}' stands for two entries of the state")
        if is_tensor(leaf):
            flat.tensors[path] = leaf
        else:
            flat.values[path] = leaf
            flat.places[path] = (container, place)
    return flat


def _leaves(container: Any, prefix: str, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[Any, Any, str, Any]]:
    for place, entry in container.items() if isinstance(container, Mapping) else enumerate(container):
        path = f"{prefix}{place}"
        if isinstance(entry, tuple) and _is_entered(entry, is_tensor):
            raise TypeError(f"key '{path}': a tuple that holds tensors or dicts cannot be loaded into; make it a list")
        if isinstance(entry, Mapping | list) and len(entry) and _is_entered(entry, is_tensor):
            yield from _leaves(entry, f"{path}.", is_tensor)
        else:
            yield container, place, path, entry


def _is_entered(entry: Any, is_tensor: Callable[[Any], bool]) -> bool:
    if isinstance(entry, Mapping):
        return True
    return isinstance(entry, list | tuple) and any(is_tensor(item) or _is_entered(item, is_tensor) for item in entry)


def encode_value(key: str, value: Any) -> Any:
    """A value as strict JSON: tuples and the floats that JSON lacks are tagged.

    Raises:
        TypeError: neither None, bool, int, float, str nor a list or tuple of these, nor an empty dict.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [encode_value(key, item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode_value(key, item) for item in value]}
    if isinstance(value, Mapping) and not value:
        return {}
    raise TypeError(
        f"key '{key}': a checkpoint holds tensors, None, bool, int, float, str, lists, tuples and dicts, "
        f"got {type(value).__name__}"
    )


def decode_value(value: Any) -> Any:
    """The value that `encode_value` made JSON of."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        return tuple(decode_value(item) for item in value["tuple"]) if value else {}
    return value
