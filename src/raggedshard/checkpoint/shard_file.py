"""One safetensors file of boxes: header, sizes, memory map.

    | 8 bytes: header length | header, JSON | data of each chunk, row-major |

Written here and not by the safetensors package, because that takes all the data at once and knows no bfloat16 without
torch. Where each box stands in its tensor is in the header as torch.distributed.checkpoint's Hugging Face storage
classes write it (``DCP_SHARDING_INFO``), with the global shape added.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.geometry import Box

__all__ = ["ITEM_SIZES", "Chunk", "StoredChunk", "file_size", "map_chunk", "read_header", "write_file"]

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes per element by the dtype's name in the file."""

SHARDING_INFO = "DCP_SHARDING_INFO"
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # the safetensors package's own limit


class Chunk(NamedTuple):
    """A box of a tensor, as a file states it; ``shape`` is the tensor's, ``None`` in files of other writers."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEM_SIZES[self.dtype]


class StoredChunk(NamedTuple):
    """A chunk and the byte in its file at which its data starts."""

    chunk: Chunk
    start: int


def _in_file_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Widest elements first, as the safetensors package does: every array is aligned."""
    return sorted(chunks, key=lambda chunk: (-ITEM_SIZES[chunk.dtype], chunk.key))


def _encode_header(chunks: Sequence[Chunk]) -> bytes:
    info = {
        chunk.key: {"saved_offsets": list(chunk.box.offsets), "global_shape": list(chunk.shape or ())}
        for chunk in chunks
    }
    # "format" is what Hugging Face transformers asks of a file before it reads it.
    header: dict[str, Any] = {_METADATA: {SHARDING_INFO: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}}
    position = 0
    for chunk in chunks:
        header[chunk.key] = {
            "dtype": chunk.dtype,
            "shape": list(chunk.box.sizes),
            "data_offsets": [position, position + chunk.nbytes],
        }
        position += chunk.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_size(chunks: Iterable[Chunk]) -> int:
    """Bytes of the file that `write_file` makes of these chunks."""
    ordered = _in_file_order(chunks)
    return len(_encode_header(ordered)) + sum(chunk.nbytes for chunk in ordered)


def write_file(path: Path, chunks: Iterable[Chunk], data_of: Callable[[Chunk], Any]) -> None:
    """Write the chunks one after the other and force them to disk.

    Args:
        data_of: the bytes of a chunk, row-major, as anything with the buffer protocol. Not asked for empty chunks.

    Raises:
        CheckpointError: a chunk's data has not the size of its box.
        OSError: the file cannot be written.
    """
    ordered = _in_file_order(chunks)
    with open(path, "wb") as file:
        file.write(_encode_header(ordered))
        for chunk in ordered:
            if chunk.nbytes == 0:
                continue
            data = memoryview(data_of(chunk)).cast("B")
            if data.nbytes != chunk.nbytes:
                raise CheckpointError(
                    f"{path}: key '{chunk.key}': {data.nbytes} bytes for box {tuple(chunk.box)} of {chunk.dtype}"
                )
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> list[StoredChunk]:
    """The chunks of a safetensors file, whoever wrote it.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: truncated, or no safetensors file: {size} bytes, header of {length}")
            header = json.loads(file.read(length))
        return _parse_header(path, header, data_start=8 + length, size=size)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the header is damaged: {type(error).__name__}: {error}") from error


def _parse_header(path: Path, header: Mapping[str, Any], data_start: int, size: int) -> list[StoredChunk]:
    info = json.loads(header.get(_METADATA, {}).get(SHARDING_INFO, "{}"))
    stored = []
    for key, entry in header.items():
        if key == _METADATA:
            continue
        sizes, dtype = tuple(entry["shape"]), entry["dtype"]
        if dtype not in ITEM_SIZES:
            raise CheckpointError(f"{path}: key '{key}' has dtype {dtype}, which this version does not know")
        place = info.get(key, {})
        shape = tuple(place["global_shape"]) if "global_shape" in place else None
        chunk = Chunk(key, dtype, shape, Box(tuple(place.get("saved_offsets", (0,) * len(sizes))), sizes))
        start, stop = entry["data_offsets"]
        if stop - start != math.prod(sizes) * ITEM_SIZES[dtype] or start < 0:
            raise CheckpointError(f"{path}: key '{key}' has {stop - start} bytes for {dtype} of shape {sizes}")
        if data_start + stop > size:
            raise CheckpointError(f"{path}: truncated: key '{key}' ends at byte {data_start + stop} of {size}")
        stored.append(StoredChunk(chunk, data_start + start))
    return stored


def map_chunk(path: Path, stored: StoredChunk) -> np.ndarray:
    """A chunk's elements in the shape of its box, as ints of its item size, memory-mapped: read when touched.

    Writes to the array stay in memory, never in the file.
    """
    chunk = stored.chunk
    integer = np.dtype(f"<i{ITEM_SIZES[chunk.dtype]}")
    if chunk.nbytes == 0:
        return np.empty(chunk.box.sizes, integer)
    raw = np.memmap(path, np.uint8, mode="c", offset=stored.start, shape=(chunk.nbytes,))
    return np.require(raw.view(integer).reshape(chunk.box.sizes), requirements="A")
