"""A worker's side of MindSpore: a process joins one MCCL group for good, which a process cannot do twice."""

import datetime

import mindspore as ms

from harness.worker import Job
from raggedshard.platform.mindspore.collectives import init_process_group
from raggedshard.platform.mindspore.private import executor


def prepare() -> None:
    ms.set_device("CPU")
    ms.runtime.dispatch_threads_num(1)
    ms.set_context(runtime_num_threads=1)
    # The threads that pass operators on wait by spinning: on two cores, four ranks would wait for each other's.
    ms.runtime.launch_blocking()


def start_process_group(job: Job) -> None:
    init_process_group(
        rank=job.rank,
        world_size=job.world_size,
        master_addr="127.0.0.1",
        master_port=job.port,
        timeout=datetime.timedelta(seconds=job.group_timeout),
    )


def reset_global_state() -> None:
    ms.set_seed(0)
    executor.set_grad_flag(False)
    executor.set_enable_grad(True)


def stop_process_group() -> None:
    executor.sync()
