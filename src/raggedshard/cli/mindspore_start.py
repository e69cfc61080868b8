"""Processes of ``raggedshard train`` on MindSpore: msrun's, or its own. The command's process imports no framework."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import NoReturn

from raggedshard.cli.backend import Backend

LAUNCHER = "msrun"


def launched_processes() -> int | None:
    # msrun runs the command in a scheduler too, which `join` never leaves.
    return int(os.environ["MS_WORKER_NUM"]) if "MS_ROLE" in os.environ else None


def join() -> Backend:
    # Read at the import: MindSpore warns about much that nobody who runs a demo can change.
    os.environ.setdefault("GLOG_v", "3")
    from raggedshard.cli.mindspore_training import MindSporeBackend

    return MindSporeBackend()


def leave(code: int) -> NoReturn:
    sys.exit(code)


def run_ranks(world_size: int, job: Callable[[Backend], bool]) -> bool:
    context = multiprocessing.get_context("spawn")
    results, all_done, port = context.SimpleQueue(), context.Barrier(world_size), _free_port()
    ranks = [
        context.Process(target=_run_rank, args=(rank, all_done, port, job, results), name=f"rank {rank}")
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        _wait_for_all(ranks)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return results.get()


def _wait_for_all(ranks: list[SpawnProcess]) -> None:
    """Until every rank has ended. Raises RuntimeError as soon as one fails: the others may wait for it for ever."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(
                    f"{process.name} ended with exit code {process.exitcode}; the other ranks were stopped"
                )


def _run_rank(
    rank: int, all_done: Barrier, port: int, job: Callable[[Backend], bool], results: SimpleQueue[bool]
) -> None:
    _end_with_parent()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(all_done.parties), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        result = job(join())
    except BaseException:
        traceback.print_exc()
        _end(1)
    if rank == 0:
        results.put(result)
    all_done.wait()  # the end of a process closes connections that another rank may still read from
    _end(0)


def _end(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown, during which MindSpore logs its connections' ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """A command that is killed must not leave ranks running."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
