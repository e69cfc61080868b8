"""Saving: every rank writes the pieces that it owns, rank 0 the index, and the whole appears at once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raggedshard.checkpoint import directory
from raggedshard.checkpoint.agreement import Ranks, agree, on_first_rank
from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.checkpoint.index import CheckpointIndex, write_index
from raggedshard.checkpoint.layout import TensorLayout, files_of
from raggedshard.checkpoint.shard_file import Chunk, write_file
from raggedshard.checkpoint.state import encode_value
from raggedshard.cuts import Piece

__all__ = ["save_tensors"]


def save_tensors(
    path: Path,
    layouts: Sequence[TensorLayout],
    values: Mapping[str, Any],
    data_of: Callable[[TensorLayout, Piece], Any],
    ranks: Ranks,
) -> None:
    """Write a checkpoint in the place of ``path``. Collective.

    Args:
        path: a directory on storage that all ranks share; replaced as a whole if it is a checkpoint already.
        layouts: every tensor of the state, alike on all ranks but for the ranks of its mesh.
        values: the state's values by key; rank 0's are saved.
        data_of: the bytes of a piece that this rank holds, row-major, in host memory.
        ranks: all of them.

    Raises:
        CheckpointError: ranks disagree about the state, something else stands at ``path``, or another rank failed.
        TypeError: a value that a checkpoint cannot hold.
        OSError: a file cannot be written.
    """
    path = path.absolute()
    encoded = agree(ranks, lambda: {key: encode_value(key, value) for key, value in values.items()})
    _check_same_state(layouts, values, ranks)
    layouts = _common_layouts(layouts, ranks)
    temporary = path.parent / on_first_rank(ranks, lambda: directory.start(path))
    try:
        agree(ranks, lambda: _write_own_files(temporary, layouts, data_of, ranks.rank))
        on_first_rank(ranks, lambda: _finish(temporary, path, layouts, encoded, ranks.size))
    except Exception:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # the next save cleans up what this cannot
        raise


def _write_own_files(
    temporary: Path, layouts: Sequence[TensorLayout], data_of: Callable[[TensorLayout, Piece], Any], rank: int
) -> None:
    for name, pieces in files_of(layouts, rank).items():
        by_key = {layout.key: (layout, piece) for layout, piece in pieces}
        write_file(temporary / name, _chunks(pieces), lambda chunk, by_key=by_key: data_of(*by_key[chunk.key]))


def _finish(
    temporary: Path, path: Path, layouts: Sequence[TensorLayout], values: Mapping[str, Any], world_size: int
) -> str:
    files = {name: _chunks(pieces) for rank in range(world_size) for name, pieces in files_of(layouts, rank).items()}
    index = CheckpointIndex.of_files(files, values)
    for name, size in index.files.items():
        file = temporary / name
        if not file.exists() or file.stat().st_size != size:
            raise CheckpointError(f"{file} is not what its rank wrote: save to storage that all ranks share")
    write_index(temporary, index)
    directory.commit(temporary, path)
    return ""


def _chunks(pieces: Sequence[tuple[TensorLayout, Piece]]) -> list[Chunk]:
    return [Chunk(layout.key, layout.dtype, layout.shape, piece.box) for layout, piece in pieces]


def _check_same_state(layouts: Sequence[TensorLayout], values: Mapping[str, Any], ranks: Ranks) -> None:
    """Files are planned by arithmetic on each rank, so all must see the same tensors, in the same order.

    Which ranks a mesh has may differ: a tensor on one dim of a larger mesh is on another slice of it on each rank.
    """
    listing = [repr(replace(layout, mesh_ranks=())) for layout in layouts] + [f"value '{key}'" for key in values]
    digests = ranks.exchange(hashlib.sha256("\n".join(listing).encode()).digest())
    if len(set(digests)) == 1:
        return
    listings = [json.loads(message) for message in ranks.exchange(json.dumps(listing).encode())]
    other = next(rank for rank, theirs in enumerate(listings) if theirs != listings[0])
    longest = max(len(listings[0]), len(listings[other]))
    padded = [entries + ["nothing"] * (longest - len(entries)) for entries in (listings[0], listings[other])]
    first, second = next((a, b) for a, b in zip(*padded, strict=True) if a != b)
    raise CheckpointError(f"the ranks' states differ: rank 0 has {first}, rank {other} has {second}")


def _common_layouts(layouts: Sequence[TensorLayout], ranks: Ranks) -> list[TensorLayout]:
    """The layouts with meshes that are equal on all ranks: slices of a larger mesh are replicas, one of them writes.

    (dp 2, tp 2), a tensor on dp only: ranks 0 and 2 hold it together, and 1 and 3 once more. Tensor number 0 is
    written by the slice (0, 2), number 1 by (1, 3).
    """
    meshes = list(dict.fromkeys(layout.mesh_ranks for layout in layouts))
    message = [meshes, [meshes.index(layout.mesh_ranks) for layout in layouts]]
    seen = [json.loads(theirs) for theirs in ranks.exchange(json.dumps(message).encode())]
    common = []
    for number, layout in enumerate(layouts):
        slices = sorted({tuple(their_meshes[mesh_of[number]]) for their_meshes, mesh_of in seen})
        common.append(replace(layout, mesh_ranks=slices[number % len(slices)]))
    return common
