"""The session's worker processes, and the two calls that run a function on them."""

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.outcome import DistributedError, RankOutcome

GRACE_SECONDS = 3.0
"""How long the other ranks of ``run_distributed`` may go on once one has failed."""

STACK_SECONDS = 2.0
"""How long a stuck worker gets to write its stacks."""


PRELOADED = {
    "torch": ["torch", "torch.distributed.tensor", "torch._dynamo", "pytest"],
    "mindspore": ["mindspore", "mindspore.mint.distributed", "mindspore.experimental.optim", "pytest"],
}
"""What the server that forks a framework's workers imports first."""


def run_distributed(
    fn: Callable,
    world_size: int,
    *args: Any,
    framework: str = "torch",
    timeout: float = 60,
    group_timeout: float = 30,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank and return the values in rank order.

    framework: ``torch`` or ``mindspore``, whose process group the ranks are in; ``mindspore_async`` for MindSpore with
        its queues of operators, which takes ten times as long.
    timeout: seconds for the whole call; group_timeout: seconds for one collective.
    Raises DistributedError with every failed rank's traceback or stacks when a rank raises, dies or hangs.
    """
    outcomes = _run(fn, world_size, args, kwargs, framework, timeout, group_timeout, grace=GRACE_SECONDS)
    if any(outcome.failed for outcome in outcomes):
        raise DistributedError(fn.__qualname__, outcomes)
    return [outcome.value for outcome in outcomes]


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    framework: str = "torch",
    timeout: float = 60,
    group_timeout: float = 30,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Like ``run_distributed``, but a failing rank is a result: how each rank ended, in rank order.

    A failure stops no other rank before ``timeout``: a test can show that each one ends by itself, and when.
    For an error that every rank is to raise, ``pytest.raises`` inside ``fn`` is simpler and keeps the processes.
    """
    return _run(fn, world_size, args, kwargs, framework, timeout, group_timeout, grace=timeout)


class _Worker:
    """One process and this side of its pipe."""

    def __init__(self, context: Any, directory: Path, number: int, framework: str):
        self._log_path = directory / f"worker{number}.log"
        self._stack_path = directory / f"worker{number}.stacks"
        self.pipe, far_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(far_end, str(self._log_path), str(self._stack_path), framework), daemon=True
        )
        self.process.start()
        far_end.close()

    def stacks(self) -> str:
        """The stacks of all threads of the running process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        size = -1
        # Complete once it has grown and then stays equal.
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, size = size, self._stack_path.stat().st_size
            if 0 < size == last:
                break
        return self._stack_path.read_text()

    def output(self) -> str:
        """The last lines that the process printed, with a heading; empty if it printed nothing."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-30:]
        return "\n".join(["last output:", *lines]) if lines else ""

    def forget_output(self) -> None:
        if self._log_path.exists():
            os.truncate(self._log_path, 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Pool:
    """Workers for ranks 0, 1, ...; made when first needed, all replaced after a failure."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._directory = tempfile.TemporaryDirectory(prefix="raggedshard-tests-")
        self._context = multiprocessing.get_context("forkserver")
        # One server forks the workers of all pools. It imports what the session has, and no framework that it lacks.
        names = [name for framework, names in PRELOADED.items() if framework in sys.modules for name in names]
        self._context.set_forkserver_preload(names)
        self._workers: list[_Worker] = []
        self._made = 0
        self._runs = 0

    def workers(self, count: int) -> list[_Worker]:
        if not self._workers:
            _prepare_environment()
        while len(self._workers) < count:
            self._workers.append(_Worker(self._context, Path(self._directory.name), self._made, self._framework))
            self._made += 1
        return self._workers[:count]

    def new_store_path(self) -> str:
        self._runs += 1
        return str(Path(self._directory.name) / f"store{self._runs}")

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()


_pools: dict[tuple[str, int], _Pool] = {}


def _session_pool(framework: str, world_size: int) -> _Pool:
    # A MindSpore process stays in its first process group, so each world size has workers of its own.
    key = (framework, world_size if framework.startswith("mindspore") else 0)
    if key not in _pools:
        _pools[key] = _Pool(framework)
        atexit.register(_pools[key].close)
    return _pools[key]


def _prepare_environment() -> None:
    """Read once, by the server that forks the workers: two cores and four ranks leave one thread to each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOG_v"] = "4"  # noqa: SIM112  MindSpore warns about much that no test can change
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name need not resolve


def _serve(jobs: Connection, log_path: str, stack_path: str, framework: str) -> None:
    # Here and not above: the test process needs none of it.
    from harness.worker import serve

    serve(jobs, log_path, stack_path, framework)


def _run(
    fn: Callable,
    world_size: int,
    args: tuple,
    kwargs: dict,
    framework: str,
    timeout: float,
    group_timeout: float,
    grace: float,
) -> list[RankOutcome]:
    pool = _session_pool(framework, world_size)
    try:
        workers = pool.workers(world_size)
        _send_jobs(pool, workers, pickle.dumps((fn, args, kwargs)), group_timeout)
        outcomes = _collect(workers, timeout, grace)
    except BaseException:  # pytest-timeout or ^C: what the workers are in the middle of is unknown
        pool.kill()
        raise
    if any(outcome.failed for outcome in outcomes):
        pool.kill()
    else:
        for worker in workers:
            worker.pipe.send_bytes(b"all ranks have returned")
    return outcomes


def _send_jobs(pool: _Pool, workers: list[_Worker], call: bytes, group_timeout: float) -> None:
    from harness.worker import Job

    store_path = pool.new_store_path()
    port = _free_port()
    filters = list(warnings.filters)
    for rank, worker in enumerate(workers):
        worker.forget_output()
        job = Job(call, rank, len(workers), store_path, port, group_timeout, sys.path, filters)
        worker.pipe.send_bytes(pickle.dumps(job))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _collect(workers: list[_Worker], timeout: float, grace: float) -> list[RankOutcome]:
    """Wait until every rank has ended, the timeout is over, or the grace after the first failure is."""
    start = time.monotonic()
    deadline = start + timeout
    waiting = {worker.pipe: (rank, worker) for rank, worker in enumerate(workers)}
    outcomes: dict[int, RankOutcome] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank, worker = waiting.pop(pipe)  # type: ignore[arg-type]
            outcomes[rank] = _end_of(rank, worker, time.monotonic() - start)
            if outcomes[rank].failed:
                deadline = min(deadline, time.monotonic() + grace)
    for rank, worker in waiting.values():
        report = "\n".join(filter(None, [worker.stacks(), worker.output()]))
        outcomes[rank] = RankOutcome(rank, "hung", time.monotonic() - start, report=report)
    return [outcomes[rank] for rank in range(len(workers))]


def _end_of(rank: int, worker: _Worker, seconds: float) -> RankOutcome:
    try:
        kind, payload = pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.join()
        report = f"exit code {worker.process.exitcode}\n{worker.output()}"
        return RankOutcome(rank, "died", seconds, report=report)
    if kind == "returned":
        return RankOutcome(rank, "returned", seconds, value=pickle.loads(payload))
    one_line, trace = payload
    report = "\n".join(filter(None, [trace, worker.output()]))
    return RankOutcome(rank, "raised", seconds, error=one_line, report=report)
