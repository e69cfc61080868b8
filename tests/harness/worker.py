"""The process of one rank: waits for jobs, runs each in a fresh process group, sends back how it ended."""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@dataclass(frozen=True)
class Job:
    """One rank's part of a distributed run. ``call`` is the pickled (fn, args, kwargs), so that a module which cannot
    be imported fails as the rank's exception and not as a broken pipe."""

    call: bytes
    rank: int
    world_size: int
    store_path: str
    group_timeout: float
    import_path: list[str]
    warning_filters: list[tuple]


def serve(jobs: Connection, log_path: str, stack_path: str) -> None:
    """A worker's main loop; returns when the parent closes ``jobs``.

    What the rank prints goes to ``log_path``. On SIGUSR1 the stacks of all threads go to ``stack_path``, even when the
    main thread is stuck in C++.
    """
    _end_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=open(stack_path, "w"), all_threads=True)  # noqa: SIM115
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # torch's own objects need no scan by the collection after each job
    while True:
        try:
            job = pickle.loads(jobs.recv_bytes())
        except EOFError:
            return
        kind, payload = _run(job)
        sys.stdout.flush()
        jobs.send_bytes(pickle.dumps((kind, payload)))
        if kind == "raised":
            # As in a real job: the process ends, its connections close, and the other ranks notice.
            os._exit(1)
        jobs.recv_bytes()  # every rank has returned: none can see this one's connections close in mid-collective
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_parent() -> None:
    """A killed test session must not leave a worker spinning."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(job: Job) -> tuple[str, Any]:
    """("returned", pickled value) or ("raised", (one line, traceback))."""
    try:
        sys.path[:] = job.import_path
        fn, args, kwargs = pickle.loads(job.call)
        with _same_warning_filters(job.warning_filters):
            _start_process_group(job)
            _reset_global_state()
            return "returned", pickle.dumps(fn(job.rank, job.world_size, *args, **kwargs))
    except BaseException as error:
        one_line = traceback.format_exception_only(type(error), error)[-1].strip()
        return "raised", (one_line, traceback.format_exc())


@contextlib.contextmanager
def _same_warning_filters(filters: list[tuple]) -> Iterator[None]:
    """What is an error in the test's own process is one here."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(
                action, getattr(message, "pattern", ""), category, getattr(module, "pattern", ""), line
            )
        yield


def _start_process_group(job: Job) -> None:
    timeout = datetime.timedelta(seconds=job.group_timeout)
    store = dist.FileStore(job.store_path, job.world_size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)


def _reset_global_state() -> None:
    """What an earlier job on this process may have left behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    # The cache holds output specs with the mesh of a process group that is gone; an equal new mesh would hit it.
    _clear_sharding_prop_cache()
