"""The index of a checkpoint: one JSON file that names every file, tensor, chunk and value.

    model.safetensors.index.json
    {"metadata": {"total_size": ..., "raggedshard": {"version": 1, "files": ..., "tensors": ..., "values": ...}},
     "weight_map": {key: file, or the list of its files}}

The outer names are Hugging Face's. A checkpoint of another writer (a Hugging Face model, torch's
``HuggingFaceStorageWriter``) has no ``raggedshard`` part or no index at all; the headers of its files stand in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.checkpoint.shard_file import Chunk, file_size, read_header
from raggedshard.geometry import Box

__all__ = ["INDEX_NAME", "CheckpointIndex", "TensorEntry", "read_index", "write_index"]

INDEX_NAME = "model.safetensors.index.json"
_VERSION = 1
_OWN = "raggedshard"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and its chunks: ``files[i]`` holds ``boxes[i]``."""

    dtype: str
    shape: tuple[int, ...]
    files: tuple[str, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds.

    Args:
        files: size in bytes of each file.
        tensors: by key.
        values: encoded JSON values by key.
        is_own: written by this library, and so complete; else put together from the files that are there.
    """

    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    is_own: bool = True

    @classmethod
    def of_files(
        cls, files: Mapping[str, Sequence[Chunk]], values: Mapping[str, Any], sizes: Mapping[str, int] | None = None
    ) -> CheckpointIndex:
        """The index of files that hold these chunks.

        sizes: of files of another writer; those that `write_file` makes by default.
        """
        found: dict[str, list[tuple[str, Chunk]]] = {}
        for file, chunks in files.items():
            for chunk in chunks:
                found.setdefault(chunk.key, []).append((file, chunk))
        own_sizes = sizes or {file: file_size(chunks) for file, chunks in files.items()}
        return cls(own_sizes, {key: _entry(key, places) for key, places in found.items()}, values, sizes is None)

    @cached_property
    def chunks_by_file(self) -> dict[str, dict[str, Chunk]]:
        """The chunks in each file by key."""
        found: dict[str, dict[str, Chunk]] = {file: {} for file in self.files}
        for key, entry in self.tensors.items():
            for file, box in zip(entry.files, entry.boxes, strict=True):
                found.setdefault(file, {})[key] = Chunk(key, entry.dtype, entry.shape, box)
        return found

    def to_json(self) -> dict[str, Any]:
        tensors = {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": [
                    {"file": file, "offsets": box.offsets, "sizes": box.sizes}
                    for file, box in zip(entry.files, entry.boxes, strict=True)
                ],
            }
            for key, entry in sorted(self.tensors.items())
        }
        own = {"version": _VERSION, "files": dict(self.files), "tensors": tensors, "values": dict(self.values)}
        weight_map = {
            key: entry.files[0] if len(entry.files) == 1 else list(entry.files)
            for key, entry in sorted(self.tensors.items())
        }
        return {"metadata": {"total_size": sum(self.files.values()), _OWN: own}, "weight_map": weight_map}


def _entry(key: str, places: Sequence[tuple[str, Chunk]]) -> TensorEntry:
    """Files of another writer need not state a tensor's shape: then it ends where its last chunk does."""
    first = places[0][1]
    boxes = tuple(chunk.box for _, chunk in places)
    for file, chunk in places:
        if chunk.dtype != first.dtype or len(chunk.box.sizes) != len(first.box.sizes) or chunk.shape != first.shape:
            raise CheckpointError(
                f"{file}: key '{key}' is {chunk.dtype} of shape {chunk.shape}, but {first.dtype} of shape "
                f"{first.shape} in {places[0][0]}"
            )
    ends = (tuple(o + s for o, s in zip(box.offsets, box.sizes, strict=True)) for box in boxes)
    shape = first.shape if first.shape is not None else tuple(map(max, zip(*ends, strict=True)))
    return TensorEntry(first.dtype, shape, tuple(file for file, _ in places), boxes)


def write_index(directory: Path, index: CheckpointIndex) -> None:
    """Write the index and force it to disk."""
    with open(directory / INDEX_NAME, "w", encoding="utf-8") as file:
        json.dump(index.to_json(), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def read_index(directory: Path) -> CheckpointIndex:
    """The index of a checkpoint, whoever wrote it.

    Raises:
        CheckpointError: there is no checkpoint, its index is missing or damaged, or it names files that are missing.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no checkpoint")
    path = directory / INDEX_NAME
    content: Any = {}
    try:
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
        own = content.get("metadata", {}).get(_OWN)
        if own is not None:
            return _parse(path, own)
        weight_map = content.get("weight_map", {})
        names = sorted(set(weight_map.values())) or sorted(p.name for p in directory.glob("*.safetensors"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the index is damaged: {type(error).__name__}: {error}") from error
    return _index_of_headers(directory, names)


def _parse(path: Path, own: Mapping[str, Any]) -> CheckpointIndex:
    if own["version"] != _VERSION:
        raise CheckpointError(f"{path}: format version {own['version']}; this version reads {_VERSION}")
    tensors = {
        key: TensorEntry(
            entry["dtype"],
            tuple(entry["shape"]),
            tuple(chunk["file"] for chunk in entry["chunks"]),
            tuple(Box(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in entry["chunks"]),
        )
        for key, entry in own["tensors"].items()
    }
    return CheckpointIndex(own["files"], tensors, own["values"])


def _index_of_headers(directory: Path, names: Iterable[str]) -> CheckpointIndex:
    headers = {name: [stored.chunk for stored in read_header(directory / name)] for name in names}
    if not headers:
        raise CheckpointError(f"{directory}: there is no checkpoint: it holds no safetensors file")
    for name, chunks in headers.items():
        if any(chunk.shape is not None for chunk in chunks):
            # Only this library states global shapes, and it writes an index: without it keys may be missing unseen.
            raise CheckpointError(f"{directory / INDEX_NAME}: the file is missing; {name} needs it")
    return CheckpointIndex.of_files(headers, {}, {name: (directory / name).stat().st_size for name in headers})
