"""A save that is killed at any point leaves a whole checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from checkpoints import UNITS, load, numbered, row_layout, row_parts, save
from raggedshard.checkpoint import TensorLayout

KILLED = """
import os, shutil, sys, pathlib
import numpy as np
sys.path[:0] = {path!r}
from checkpoints import UNITS, row_layout, row_parts, save

left = {calls}

def dying(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(17)
        return function(*args, **kwargs)
    return call

for module, name in [(os, "rename"), (os, "fsync"), (os, "open"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
                     (shutil, "rmtree")]:
    setattr(module, name, dying(getattr(module, name)))
outcomes = save(pathlib.Path({target!r}), [(row_layout(), [2 * part for part in row_parts(UNITS)])], {{"step": 2}})
assert outcomes == [None] * 4, outcomes
"""


def run_killed_save(target: Path, calls: int) -> bool:
    """Save twice the numbers and die at the file system call after ``calls``; whether it died."""
    script = KILLED.format(path=[p for p in sys.path if p], calls=calls, target=str(target))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode in (0, 17), ended.stderr
    return ended.returncode == 17


def loaded(path: Path) -> tuple[float, dict]:
    """What a checkpoint's numbers are multiples of, and its values."""
    arrays = [np.zeros((7, 8), np.float32)]
    outcomes = load(path, [(TensorLayout("w", "F32", (7, 8)), arrays)], ["step"])
    assert isinstance(outcomes[0], dict), outcomes[0]
    factor = float(arrays[0][0, 0])
    np.testing.assert_array_equal(arrays[0], factor * numbered((7, 8)))
    return factor, outcomes[0]


def test_a_save_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "c"
    old, new = (1.0, {"step": 1}), (2.0, {"step": 2})
    ends = []
    for calls in range(100):
        save(path, [(row_layout(), row_parts(UNITS))], {"step": 1})
        assert [p.name for p in tmp_path.iterdir()] == ["c"]  # the save cleaned up after the one that was killed
        died = run_killed_save(path, calls)
        ends.append(loaded(path))
        assert ends[-1] in (old, new)
        if not died:
            break
    assert not died
    assert len(ends) > 12
    # the old one up to some call, the new one from there on
    assert ends == sorted(ends, key=lambda end: end[0])
    assert ends[0] == old
    assert ends[-1] == new


def test_the_first_save_killed_at_any_call_leaves_nothing_or_all(tmp_path):
    for calls in (0, 3, 6, 7, 8):
        path = tmp_path / f"c{calls}"
        run_killed_save(path, calls)
        if path.exists():
            assert loaded(path) == (2.0, {"step": 2})
        else:
            errors = load(path, [(TensorLayout("w", "F32", (7, 8)), [np.zeros((7, 8), np.float32)])], ["step"])
            assert "there is no checkpoint" in str(errors[0])
