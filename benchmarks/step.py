"""A training step of raggedshard beside torch's own fully_shard: time, collectives, bytes, peak memory.

    torchrun --nproc-per-node 4 benchmarks/step.py --width 767

Steps of the two alternate in one run, so that a noisy machine disturbs both alike; the minimum and the median of the
ratios are what to read. Memory is what one step allocates on top of what lives between steps, from torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

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


def timed(run: Run, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    run.step(x)
    return time.perf_counter() - start


def peak_bytes(run: Run, x: torch.Tensor) -> int:
    """The most that a step has allocated at once, above what was allocated when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step(x)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    live = peak = 0
    for event in memory:
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=767, help="odd widths are uneven on 2 and 4 ranks")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="rows per rank")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {
        "torch": Run(torch_fully_shard, mesh, options.width, options.blocks),
        "raggedshard": Run(raggedshard_fully_shard, mesh, options.width, options.blocks),
    }
    x = torch.randn(options.batch, options.width)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(options.steps + 2):
        for name, run in runs.items():
            seconds = timed(run, x)
            if step >= 2:  # the first ones allocate optimizer state and warm the caches
                times[name].append(seconds)
    peaks = {name: peak_bytes(run, x) for name, run in runs.items()}
    if dist.get_rank() == 0:
        report(times, peaks, sum(p.numel() for p in runs["torch"].model.parameters()))
    dist.destroy_process_group()


def report(times: dict[str, list[float]], peaks: dict[str, int], numel: int) -> None:
    print(f"{numel:,} parameters of 4 bytes on {dist.get_world_size()} ranks")
    for name, seconds in times.items():
        print(
            f"{name:12} step min {min(seconds) * 1e3:7.1f} ms  median {statistics.median(seconds) * 1e3:7.1f} ms"
            f"  peak {peaks[name] / 2**20:7.1f} MiB"
        )
    ratios = [ours / theirs for ours, theirs in zip(times["raggedshard"], times["torch"], strict=True)]
    print(
        f"raggedshard / torch: time min {min(ratios):.2f} median {statistics.median(ratios):.2f},"
        f" peak {peaks['raggedshard'] / peaks['torch']:.2f}"
    )


if __name__ == "__main__":
    main()
