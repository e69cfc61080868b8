"""The process of one rank: waits for jobs, runs each in a process group, sends back how it ended."""

import contextlib
import faulthandler
import gc
import importlib
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
from typing import Any, Protocol, cast

import numpy as np


@dataclass(frozen=True)
class Job:
    """One rank's part of a distributed run. ``call`` is the pickled (fn, args, kwargs), so that a module which cannot
    be imported fails as the rank's exception and not as a broken pipe."""

    call: bytes
    rank: int
    world_size: int
    store_path: str
    port: int
    group_timeout: float
    import_path: list[str]
    warning_filters: list[tuple]


class Framework(Protocol):
    """What a worker does with a framework: the modules ``harness.torch_worker`` and ``harness.mindspore_worker``."""

    def prepare(self) -> None:
        """Once per process."""

    def start_process_group(self, job: Job) -> None: ...

    def reset_global_state(self) -> None:
        """Undo what an earlier job on this process may have left behind."""

    def stop_process_group(self) -> None: ...


def serve(jobs: Connection, log_path: str, stack_path: str, framework_name: str) -> None:
    """A worker's main loop; returns when the parent closes ``jobs``.

    What the rank prints goes to ``log_path``. On SIGUSR1 the stacks of all threads go to ``stack_path``, even when the
    main thread is stuck in C++.
    """
    _end_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=open(stack_path, "w"), all_threads=True)  # noqa: SIM115
    framework = cast(Framework, importlib.import_module(f"harness.{framework_name}_worker"))
    framework.prepare()
    gc.collect()
    gc.freeze()  # the framework's own objects need no scan by the collection after each job
    while True:
        try:
            job = pickle.loads(jobs.recv_bytes())
        except EOFError:
            return
        kind, payload = _run(job, framework)
        sys.stdout.flush()
        jobs.send_bytes(pickle.dumps((kind, payload)))
        if kind == "raised":
            # As in a real job: the process ends, its connections close, and the other ranks notice.
            os._exit(1)
        jobs.recv_bytes()  # every rank has returned: none can see this one's connections close in mid-collective
        gc.collect()
        framework.stop_process_group()


def _end_with_parent() -> None:
    """A killed test session must not leave a worker spinning."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(job: Job, framework: Framework) -> tuple[str, Any]:
    """("returned", pickled value) or ("raised", (one line, traceback))."""
    try:
        sys.path[:] = job.import_path
        fn, args, kwargs = pickle.loads(job.call)
        with _same_warning_filters(job.warning_filters):
            framework.start_process_group(job)
            random.seed(0)
            np.random.seed(0)
            framework.reset_global_state()
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
