"""A directory that is replaced as a whole: what stands under its name is always complete.

    path                        the checkpoint
    .NAME.saving-TOKEN          a save that has not ended; whatever stands there is worth nothing
    .NAME.previous              the checkpoint before, for the moment between the two renames of a replacement

No file system call that every system has replaces a directory that is not empty. So a replacement renames the old one
away and the new one in; a crash between the two leaves the old one under ``.previous``, where `find` looks too.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.checkpoint.index import INDEX_NAME

__all__ = ["commit", "find", "start"]


def start(path: Path) -> str:
    """Clean up after saves that were interrupted and make a new, empty directory beside ``path``.

    Returns:
        Its name.

    Raises:
        CheckpointError: something else than a checkpoint stands there, which a replacement would delete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_foreign_files(path)
    previous = _previous(path)
    if previous.exists():
        if path.exists():
            shutil.rmtree(previous)
        else:
            os.rename(previous, path)
    for stale in path.parent.iterdir():
        if stale.name.startswith(_saving_prefix(path)):
            shutil.rmtree(stale)
    name = _saving_prefix(path) + uuid.uuid4().hex
    (path.parent / name).mkdir()
    return name


def commit(temporary: Path, path: Path) -> None:
    """Put a complete directory, whose files are on disk, in the place of ``path``."""
    _sync_directory(temporary)
    previous = _previous(path)
    if path.exists():
        os.rename(path, previous)
    os.rename(temporary, path)
    _sync_directory(path.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _refuse_foreign_files(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory: save to another path")
    others = sorted(p.name for p in path.iterdir() if p.suffix != ".safetensors" and p.name != INDEX_NAME)
    if others:
        raise CheckpointError(
            f"{path} holds {others[0]}, which is no part of a checkpoint and would be deleted: save to a directory "
            "of its own"
        )


def find(path: Path) -> Path:
    """Where the checkpoint of that name is to be read: ``path``, or the one before if a save died on the last step."""
    return _previous(path) if not path.exists() and _previous(path).exists() else path


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _saving_prefix(path: Path) -> str:
    return f".{path.name}.saving-"


def _sync_directory(path: Path) -> None:
    """Force a directory's entries to disk, where the system can open directories."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
