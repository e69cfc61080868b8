"""Parameters that divide cost nothing for padding: allocations, copies and zeros are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import run_distributed
from raggedshard.torch import fully_shard
from training import mesh_of
from units import Unit, group_of, local_of, sharded_unit


class Count(TorchDispatchMode):
    """Bytes of new storage, bytes copied and bytes zeroed by the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.copied = self.zeroed = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg]) if torch.is_tensor(x)]
        known = {x.untyped_storage()._cdata for x in tensors}
        result: Any = func(*args, **(kwargs or {}))
        self.operations += 1
        results = result if isinstance(result, list | tuple) else [result]
        for x in results:
            if torch.is_tensor(x) and not isinstance(x, DTensor) and x.untyped_storage()._cdata not in known:
                self.allocated += x.untyped_storage().nbytes()
        first = args[0] if args and isinstance(args[0], list | tuple) else list(args[:1])
        written = sum(x.nbytes for x in first if torch.is_tensor(x))
        if name in ("copy_", "_foreach_copy_"):
            self.copied += written
        if name == "clone":
            self.copied += results[0].nbytes
        if name in ("zero_", "_foreach_zero_"):
            self.zeroed += written
        if name in ("zeros", "zeros_like", "new_zeros", "constant_pad_nd", "cat", "_chunk_cat"):
            self.zeroed += results[0].nbytes
        return result


def count_costs(rank, world_size, rows):
    """Storage, copies and zeros of a unit of a (rows, 8) and a (rows,) parameter, by phase."""
    model, params = sharded_unit(world_size, (rows, 8), (rows,))
    group = group_of(model)
    model().backward()  # lazy initialisation, and the storages that stay
    counts = {}

    def run(phase: str, *steps: Any) -> None:
        with Count() as count:
            for step in steps:
                step()
        counts[phase] = (count.allocated, count.copied, count.zeroed)

    run("reset", group.reset_sharded_params)
    run("gather", group.unshard, group.wait_for_unshard)
    for p in params:
        p.unsharded_param.grad = torch.ones_like(p.unsharded_param)
        p.sharded_param.grad = None
    run("copy in", group.take_unsharded_grads, lambda: group.start_reduce(True))
    group.finish_reduce()
    group.reshard()
    shared = [
        p._sharded_param_data.data_ptr() == local_of(p).data_ptr()
        and p._sharded_param_data.untyped_storage().nbytes() == local_of(p).nbytes
        for p in params
    ]
    return counts, shared


def test_even_parameters_allocate_copy_and_zero_nothing_for_padding():
    full_bytes, shard_bytes = 8 * 9 * 8, 2 * 9 * 8
    for counts, shared in run_distributed(count_costs, 4, 8):
        assert shared == [True, True]
        assert counts["reset"] == (0, 0, 0)
        # One buffer of headers and shards; copied: the own shard in, the parameters out, the 4 headers to be read.
        assert counts["gather"] == (4 * (8 + shard_bytes) + 32, shard_bytes + full_bytes + 32, 0)
        allocated, copied, zeroed = counts["copy in"]
        front = copied - full_bytes  # code and flags, the same few elements for every rank
        assert zeroed == 0 and 0 < front <= 4 * 24 * 8
        assert allocated <= 2 * (full_bytes + front) + 2 * front  # what is sent and what is received


def test_uneven_parameters_zero_their_padding_and_nothing_else():
    full_bytes, row_bytes = 7 * 9 * 8, 9 * 8
    for rank, (counts, shared) in enumerate(run_distributed(count_costs, 4, 7)):
        assert shared == [rank < 3, rank < 3]
        assert counts["reset"] == (0, 0, row_bytes if rank == 3 else 0)
        assert counts["gather"] == (4 * (8 + 2 * row_bytes) + 32, 2 * row_bytes + full_bytes + 32, 0)
        assert counts["copy in"][2] == row_bytes  # the second row of rank 3's chunk


def init_costs(rank, world_size, rows):
    """Bytes allocated, copied and zeroed to make the sharded parameter."""
    model = Unit((rows, 8))
    mesh = mesh_of(world_size)
    fully_shard(Unit((rows, 8)), mesh=mesh)  # whatever is made once per mesh
    with Count() as count:
        fully_shard(model, mesh=mesh)
    return count.allocated, count.copied, count.zeroed


def test_an_even_parameter_is_sharded_by_one_allocation_and_one_copy():
    assert run_distributed(init_costs, 4, 8) == [(128, 128, 0)] * 4
    assert run_distributed(init_costs, 4, 7) == [(128, 128, 128)] * 3 + [(128, 64, 128)]


def use_even(rank, world_size):
    _, (p,) = sharded_unit(world_size, (8, 2))
    assert p._sharded_param_data.data_ptr() == local_of(p).data_ptr()
    assert torch.equal(p._sharded_param_data, local_of(p).view(-1))
    with torch.no_grad():
        p.sharded_param.add_(1)
    assert p.all_gather_inputs[0].tolist() == [4 * rank + i for i in range(2, 6)]


def test_an_even_parameters_storage_is_the_shard_itself():
    run_distributed(use_even, 4)
