"""Starting up, groups and collectives on MindSpore: one small interface over MCCL (CPU) and HCCL (Ascend).

                    Ascend                       CPU
    all_gather      all_gather_into_tensor       all_gather
    reduce_scatter  reduce_scatter_tensor        all_reduce, then the rank's slice
    all_reduce      all_reduce                   all_reduce; float64 and uint8: all_gather, then a local reduction

`enable_gloo` replaces what stands in the column of the CPU by torch's gloo.

MCCL mixes up what ranks send when they disagree about what they do next: an all-gather meets an all-reduce, or two
sizes meet, and some ranks get garbage without an error. `agree` makes them compare first.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.communication import GlobalComm, create_group, init

from raggedshard.platform.mindspore.gloo import Gloo
from raggedshard.platform.mindspore.private import init_with_store, no_grad

__all__ = [
    "Group",
    "agree",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "enable_gloo",
    "get_rank",
    "get_world_size",
    "group_of",
    "init_process_group",
    "is_initialized",
    "reduce_scatter",
]


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate.

    Args:
        name: the communicator's name; empty for a group of one, which needs none.
        ranks: global ranks, ascending.
        rank: this process's place among them.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.ranks)


# ---- starting up


def init_process_group(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout: datetime.timedelta = datetime.timedelta(minutes=5),
) -> None:
    """Join the other processes. Does nothing when they are joined already.

    Under ``msrun`` its own environment is used. Otherwise the arguments, or else ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` (default 127.0.0.1) and ``MASTER_PORT``, the names that torch uses. Without any of these the
    process is alone.

    Args:
        timeout: of a collective.

    Raises:
        ValueError: there are several processes and no port to meet at.
    """
    if is_initialized():
        return
    if "MS_ROLE" in os.environ and rank is None:
        init()
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    if world_size == 1:
        return
    port = master_port if master_port is not None else os.environ.get("MASTER_PORT")
    if port is None:
        raise ValueError(f"init_process_group: {world_size} processes, but no MASTER_PORT to meet at is set or given")
    host = socket.gethostbyname(master_addr or os.environ.get("MASTER_ADDR", "127.0.0.1"))  # TCPStore takes no names
    store = dist.TCPStore(host, int(port), world_size, rank == 0, timeout)
    # The public init_process_group takes HCCL only.
    init_with_store(backend=None, timeout=timeout, world_size=world_size, rank=rank, store=store)


_gloo: Gloo | None = None


def enable_gloo(*, timeout: datetime.timedelta = datetime.timedelta(minutes=5)) -> None:
    """From now on, let torch's gloo carry this package's collectives, on the same memory; on a CPU only. Collective.

    It is several times as fast as MindSpore's own collectives there. Does nothing when the process is alone.

    Args:
        timeout: of a collective.

    Raises:
        ModuleNotFoundError: torch is not installed.
        RuntimeError: the processes are not on CPUs.
    """
    global _gloo
    init_process_group()
    if not is_initialized():
        return
    if not _on_cpu():
        raise RuntimeError(f"enable_gloo() is for CPUs, and the processes were joined by {GlobalComm.BACKEND}")
    _gloo = Gloo(get_rank(), get_world_size(), timeout)


def is_initialized() -> bool:
    return bool(GlobalComm.INITED)


def get_rank() -> int:
    """This process's global rank; 0 when it is alone."""
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    """The number of processes; 1 when this one is alone."""
    return dist.get_world_size() if is_initialized() else 1


@functools.cache
def group_of(ranks: tuple[int, ...]) -> Group:
    """The group of some global ranks, this process among them; made once. Each rank makes only its own groups.

    Args:
        ranks: ascending.
    """
    rank = ranks.index(get_rank())
    if len(ranks) == 1:
        return Group("", ranks, 0)
    if ranks == tuple(range(get_world_size())):
        return Group(GlobalComm.WORLD_COMM_GROUP, ranks, rank)
    digest = hashlib.sha1(",".join(map(str, ranks)).encode()).hexdigest()[:16]  # names of long groups stay short
    name = f"raggedshard_{digest}"
    create_group(name, list(ranks))
    return Group(name, ranks, rank)


# ---- collectives


def _on_cpu() -> bool:
    return GlobalComm.BACKEND == "mccl"


@no_grad()
def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Every rank's tensor, in group order.

    Args:
        tensor: contiguous; of one shape and dtype on all ranks.
    """
    if group.size == 1:
        return [tensor]
    if tensor.size == 0:
        return [mint.empty(tensor.shape, dtype=tensor.dtype) for _ in group.ranks]
    if tensor.dtype == ms.bool_:
        return [part.astype(ms.bool_) for part in all_gather(tensor.astype(ms.uint8), group)]
    if _gloo is not None:
        return _gloo.all_gather(tensor, group)
    if _on_cpu():
        parts = [mint.empty(tensor.shape, dtype=tensor.dtype) for _ in group.ranks]
        dist.all_gather(parts, tensor, group=group.name)
        return parts
    output = mint.empty((group.size, *tensor.shape), dtype=tensor.dtype)
    dist.all_gather_into_tensor(output, tensor, group=group.name)
    return list(mint.unbind(output, 0))


@no_grad()
def reduce_scatter(chunks: Tensor, group: Group) -> Tensor:
    """The sum over ranks of the chunk that is this rank's.

    Args:
        chunks: 1-D, one equal chunk per rank in group order.

    Returns:
        A new 1-D tensor of one chunk.
    """
    if group.size == 1 or chunks.size == 0:
        return chunks[: chunks.size // group.size].copy()
    length = chunks.size // group.size
    if _gloo is not None:
        return _gloo.reduce_scatter(chunks, group)
    if _on_cpu():
        return all_reduce(chunks, group)[group.rank * length : (group.rank + 1) * length].copy()
    output = mint.empty((length,), dtype=chunks.dtype)
    dist.reduce_scatter_tensor(output, chunks, group=group.name)
    return output


_LOCAL_REDUCTIONS: dict[str, Any] = {"sum": ops.add, "max": ops.maximum, "min": ops.minimum}
_NOT_IN_MCCL = (ms.float64, ms.uint8)


@no_grad()
def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """A new tensor: ``tensor`` reduced over the group by ``"sum"``, ``"max"`` or ``"min"``."""
    if group.size == 1 or tensor.size == 0:
        return tensor.copy()
    if tensor.dtype == ms.bool_:
        return all_reduce(tensor.astype(ms.int32), group, op).astype(ms.bool_)
    if _on_cpu() and _gloo is None and tensor.dtype in _NOT_IN_MCCL:
        return functools.reduce(_LOCAL_REDUCTIONS[op], all_gather(tensor.copy(), group))
    # In place, and silently nothing on a view: a copy is none.
    result = tensor.copy()
    if _gloo is not None:
        _gloo.all_reduce(result, op, group)
    else:
        dist.all_reduce(result, op=op, group=group.name)
    return result


@no_grad()
def broadcast(tensor: Tensor, source: int, group: Group) -> Tensor:
    """A new tensor: that of the rank at place ``source`` of the group."""
    result = tensor.copy()
    if group.size == 1 or tensor.size == 0:
        return result
    if _gloo is not None:
        _gloo.broadcast(result, group.ranks[source], group)
    else:
        dist.broadcast(result, src=group.ranks[source], group=group.name)
    return result


def barrier(group: Group) -> None:
    """Wait until all ranks of the group are here."""
    agree((0,), group)


def agree(numbers: Sequence[int], group: Group) -> list[tuple[int, ...]]:
    """Every rank's ``numbers`` (as many on all ranks, each of 63 bits), in group order; waits for them.

    Every call sends one message of the same kind, so ranks that ask different questions still get the answers.
    """
    if group.size == 1:
        return [tuple(numbers)]
    own = Tensor(np.array([*numbers, *[0] * (_AGREE_NUMBERS - len(numbers))], np.int64))
    return [tuple(part.asnumpy().tolist()[: len(numbers)]) for part in all_gather(own, group)]


_AGREE_NUMBERS = 4
