"""Ranks that save and load in threads, holding numpy arrays: checkpoints without any framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from raggedshard.checkpoint import TensorLayout, load_tensors, save_tensors
from raggedshard.placements import RaggedShard

UNITS = (2, 2, 2, 1)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def row_layout(key: str = "w", rows: int = 7, units: tuple[int, ...] = (2, 2, 2, 1), columns: int = 8) -> TensorLayout:
    return TensorLayout(
        key, "F32", (rows, columns), (len(units),), tuple(range(len(units))), (RaggedShard((0,), units),)
    )


def row_parts(units: tuple[int, ...], columns: int = 8) -> list[np.ndarray]:
    return np.split(numbered((sum(units), columns)), np.cumsum(units)[:-1])


class ThreadRanks:
    """One of several ranks that run in the threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[bytes]) -> None:
        self.rank, self.size, self._barrier, self._box = rank, size, barrier, box

    def exchange(self, message: bytes) -> list[bytes]:
        self._box[self.rank] = message
        self._barrier.wait()
        messages = list(self._box)
        self._barrier.wait()
        return messages


def on_ranks(size: int, function: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What each rank returned, or the exception that it raised."""
    barrier, box = threading.Barrier(size, timeout=20), [b""] * size

    def run(rank: int) -> Any:
        try:
            return function(ThreadRanks(rank, size, barrier, box))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def _part(local: np.ndarray, box: Any) -> np.ndarray:
    return local[(..., *(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)))]


def save(path: Path, held: Sequence[tuple[TensorLayout, Sequence[np.ndarray]]], values: Any = None) -> list[Any]:
    """Save tensors of which ``held`` gives the local array of each rank."""
    layouts = [layout for layout, _ in held]
    size = len(held[0][1])

    def one(ranks: ThreadRanks) -> None:
        locals_ = {layout.key: arrays[ranks.rank] for layout, arrays in held}
        save_tensors(
            path,
            layouts,
            values or {},
            lambda layout, piece: np.ascontiguousarray(_part(locals_[layout.key], piece.local)).reshape(-1),
            ranks,
        )

    return on_ranks(size, one)


def load(path: Path, held: Sequence[tuple[TensorLayout, Sequence[np.ndarray]]], keys: Sequence[str] = ()) -> list[Any]:
    """Load into the local arrays of each rank; returns the values that each rank got, or its exception."""
    layouts = [layout for layout, _ in held]
    size = len(held[0][1])

    def one(ranks: ThreadRanks) -> dict[str, Any]:
        locals_ = {layout.key: arrays[ranks.rank] for layout, arrays in held}

        def store(layout: TensorLayout, piece: Any, box: Any, elements: np.ndarray) -> None:
            view = _part(locals_[layout.key], piece.local)
            whole = view.reshape(piece.box.sizes).copy()  # a reshape of a strided view need not be a view
            inner = tuple(
                slice(o - start, o - start + s)
                for o, s, start in zip(box.offsets, box.sizes, piece.box.offsets, strict=True)
            )
            whole[(..., *inner)] = elements.view(whole.dtype)
            view[...] = whole.reshape(view.shape)

        return load_tensors(path, layouts, keys, store, ranks)

    return on_ranks(size, one)
