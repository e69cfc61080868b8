"""Runs a test's function on several ranks at once: real processes, a real gloo process group.

    from harness import run_distributed, world_sizes

    def sums_ranks(rank, world_size):
        total = torch.tensor(rank)
        dist.all_reduce(total)
        return total.item()

    @world_sizes(1, 2, 3, 4)
    def test_all_reduce_sums_over_every_rank(world_size):
        assert run_distributed(sums_ranks, world_size) == [sum(range(world_size))] * world_size

The processes live as long as the test session, so that a call costs a rendezvous and not an import of torch.
The function, its arguments and what it returns cross a pipe by pickle: the function stands at a module's top level.
"""

from collections.abc import Callable

import pytest

from harness.outcome import DistributedError, RankOutcome
from harness.pool import run_distributed, run_ranks

__all__ = ["DistributedError", "RankOutcome", "run_distributed", "run_ranks", "world_sizes"]


def world_sizes(*sizes: int) -> Callable:
    """Decorator: run a test once for each of ``sizes`` (1, 2, 3, 4 when none is given), passed as ``world_size``."""
    return pytest.mark.parametrize("world_size", sizes or (1, 2, 3, 4))
