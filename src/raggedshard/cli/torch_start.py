"""Processes of ``raggedshard train`` on PyTorch: torchrun's, or its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import NoReturn

import torch.distributed as dist
import torch.multiprocessing as mp

from raggedshard.cli.backend import Backend
from raggedshard.cli.torch_training import TorchBackend

LAUNCHER = "torchrun"


def launched_processes() -> int | None:
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else None


def join() -> Backend:
    return TorchBackend("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def leave(code: int) -> NoReturn:
    """End a rank's process at once.

    On a busy machine a thread of gloo's may still let go of the last collective while the interpreter shuts down, which
    ends in "terminate called without an active exception" and exit code -6 (torch 2.13; with torch's own fully_shard
    too, once in 24 runs).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(world_size: int, job: Callable[[Backend], bool]) -> bool:
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="raggedshard-") as folder:
        mp.spawn(_run_rank, args=(f"file://{folder}/rendezvous", world_size, job, results), nprocs=world_size)
    return results.get()


def _run_rank(
    rank: int, rendezvous: str, world_size: int, job: Callable[[Backend], bool], results: SimpleQueue[bool]
) -> None:
    result = job(TorchBackend(rendezvous, rank, world_size))
    if rank == 0:
        results.put(result)
    leave(0)
