"""A training step of raggedshard beside torch's own fully_shard: time, or the most memory that it holds.

    torchrun --nproc-per-node 4 benchmarks/step.py --width 767
    torchrun --nproc-per-node 4 benchmarks/step.py --width 767 --memory

Steps of the two alternate in one run, so that a noisy machine disturbs both alike; the minimum and the median of the
ratios are what to read. Memory is what rank 0 holds at most on top of what lives between steps.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from raggedshard.torch import fully_shard as raggedshard_fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Run:
    """A sharded model and its optimizer."""

    def __init__(self, fully_shard: Callable, mesh: DeviceMesh, width: int, blocks: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block(width) for _ in range(blocks)])
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def step(self, x: torch.Tensor) -> float:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def seconds(run: Run, x: torch.Tensor) -> float:
    start = time.perf_counter()
    run.step(x)
    return time.perf_counter() - start


def peak_bytes(run: Run, x: torch.Tensor) -> int:
    """The most memory that the process held during a step, above what it held when the step began (Linux).

    What the kernel counts, and not torch's profiler: gloo's threads allocate and free too, which no profiler sees.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status_bytes("VmRSS")
    run.step(x)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def return_freed_memory() -> None:
    """From now on, glibc maps each tensor by itself and unmaps it when it is freed, so that the kernel sees it go."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    ctypes.CDLL(None).mallopt(mmap_threshold, 65536)


def measured(
    runs: dict[str, Run], x: torch.Tensor, steps: int, measure: Callable[[Run, torch.Tensor], float], unit: float
) -> dict[str, list[float]]:
    """Each step in units; the first two, which allocate optimizer state and warm the caches, are left out."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + 2):
        for name, run in runs.items():
            dist.barrier()
            value = measure(run, x)
            if step >= 2:
                values[name].append(value / unit)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=767, help="odd widths are uneven on 2 and 4 ranks")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="rows per rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="memory instead of time")
    options = parser.parse_args()
    if options.memory:
        return_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {
        "torch": Run(torch_fully_shard, mesh, options.width, options.blocks),
        "raggedshard": Run(raggedshard_fully_shard, mesh, options.width, options.blocks),
    }
    x = torch.randn(options.batch, options.width)
    measure, unit, what = (peak_bytes, 2**20, "peak of a step, MiB") if options.memory else (seconds, 1e-3, "step, ms")
    values = measured(runs, x, options.steps, measure, unit)
    if dist.get_rank() == 0:
        numel = sum(p.numel() for p in runs["torch"].model.parameters())
        print(f"{numel:,} parameters of 4 bytes on {dist.get_world_size()} ranks")
        report(values, what)
    dist.destroy_process_group()


def report(measured: dict[str, list[float]], what: str) -> None:
    for name, values in measured.items():
        print(f"{name:12} {what}: min {min(values):7.1f}  median {statistics.median(values):7.1f}")
    ratios = [ours / theirs for ours, theirs in zip(measured["raggedshard"], measured["torch"], strict=True)]
    print(f"raggedshard / torch: min {min(ratios):.2f} median {statistics.median(ratios):.2f} max {max(ratios):.2f}")


if __name__ == "__main__":
    main()
