"""Start-up by MindSpore's own launcher."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

SECONDS = 240


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment() -> dict[str, str]:
    """msrun starts the first ``python`` on the path, which must be this one, and imports as this process does."""
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in started} | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "3",
    }


def run(command: list[str], directory: Path) -> tuple[int, str]:
    """Exit code, that of SIGKILL after too long, and output. The workers end with the launcher, however it ends."""
    with open(directory / "msrun.log", "w") as log:
        process = psutil.Popen(command, cwd=directory, env=environment(), stdout=log, stderr=log)
        try:
            process.wait(SECONDS)
        except psutil.TimeoutExpired:
            print(f"killed after {SECONDS} s")
        finally:
            if process.is_running():
                for each in [*process.children(recursive=True), process]:  # the workers are in sessions of their own
                    each.kill()
    logs = sorted(directory.glob("**/*.log"))
    return process.wait(), "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


@pytest.mark.timeout(SECONDS + 30)
def test_processes_that_msrun_starts_train_together(tmp_path):
    options = ["--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True"]
    launcher = str(Path(sys.executable).parent / "msrun")
    script = str(Path(__file__).with_name("msrun_training.py"))
    code, logs = run([launcher, *options, f"--log_dir={tmp_path / 'logs'}", script, str(tmp_path)], tmp_path)
    assert code == 0, logs
    (world_size, *losses), other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert world_size == 2 and [world_size, *losses] == other
    assert losses[1] < losses[0]
