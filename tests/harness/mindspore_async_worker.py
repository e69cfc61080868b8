"""A worker's side of MindSpore as it is by default: operators wait in queues for other threads to run them."""

import mindspore as ms

from harness.mindspore_worker import reset_global_state, start_process_group, stop_process_group

__all__ = ["prepare", "reset_global_state", "start_process_group", "stop_process_group"]


def prepare() -> None:
    ms.set_device("CPU")
    ms.runtime.dispatch_threads_num(1)
    ms.set_context(runtime_num_threads=1)
