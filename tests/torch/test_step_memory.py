"""A step holds no more memory than one of torch's own fully_shard (the requirement's check list). Needs Linux."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "step.py"


@pytest.mark.parametrize(("world_size", "width"), [(2, 512), (3, 511)])
def test_a_step_holds_no_more_than_one_of_torchs_fully_shard(world_size, width):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    ran = subprocess.run(
        [*torchrun, BENCHMARK, "--memory", f"--width={width}", "--steps=3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    median = re.search(r"raggedshard / torch: .* median ([\d.]+)", ran.stdout)
    assert median is not None, ran.stdout
    # 8 MiB a unit, 60 MiB a step: two more of a unit's buffers would be a fifth more.
    assert float(median.group(1)) <= 1.05, ran.stdout
