"""A worker's side of torch: a fresh gloo group for each job."""

import datetime

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.worker import Job


def prepare() -> None:
    torch.set_num_threads(1)


def start_process_group(job: Job) -> None:
    timeout = datetime.timedelta(seconds=job.group_timeout)
    store = dist.FileStore(job.store_path, job.world_size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)


def reset_global_state() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    # The cache holds output specs with the mesh of a process group that is gone; an equal new mesh would hit it.
    _clear_sharding_prop_cache()


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
