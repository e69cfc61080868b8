"""The multi-process harness: values come back in rank order, and no way of failing is silent or endless."""

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import DistributedError, run_distributed, run_ranks, world_sizes


def sums_ranks(rank: int, world_size: int, offset: int = 0) -> tuple[int, int]:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return rank, int(total)


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def raises_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        print("rows do not fit")
        raise ValueError(f"bad rows on {rank}")
    dist.barrier()


def hangs_on(rank: int, world_size: int, bad_rank: int) -> None:
    while rank == bad_rank:
        time.sleep(0.05)


def dies_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        os._exit(7)
    dist.barrier()


def skips_collective_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank != bad_rank:
        dist.barrier()
    else:
        time.sleep(8)


def returns_what_cannot_be_pickled(rank: int, world_size: int) -> object:
    return lambda: rank


def leaves_state_behind(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(5)


def reads_state(rank: int, world_size: int) -> tuple[torch.dtype, bool, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item()


def warns(rank: int, world_size: int) -> None:
    warnings.warn("deprecated rows", DeprecationWarning, stacklevel=1)


def tensor_of_rank(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((2,), rank, dtype=torch.float64)


@world_sizes(1, 2, 3, 4)
def test_values_come_back_in_rank_order(world_size: int):
    expected_sum = {1: 10, 2: 21, 3: 33, 4: 46}[world_size]
    values = run_distributed(sums_ranks, world_size, offset=10)
    assert values == [(rank, expected_sum) for rank in range(world_size)]


def test_more_ranks_than_the_usual_four():
    assert run_distributed(sums_ranks, 6) == [(rank, 15) for rank in range(6)]


def test_tensors_can_be_returned():
    values = run_distributed(tensor_of_rank, 2)
    assert [value.tolist() for value in values] == [[0.0, 0.0], [1.0, 1.0]]
    assert values[0].dtype == torch.float64


def test_processes_are_reused_and_a_call_is_cheap():
    first = run_distributed(process_id, 4)
    start = time.monotonic()
    assert run_distributed(process_id, 4) == first
    assert time.monotonic() - start < 2.0  # a new process with torch takes longer
    assert os.getpid() not in first


def test_state_of_one_call_does_not_reach_the_next():
    before = run_distributed(reads_state, 2)
    run_distributed(leaves_state_behind, 2)
    assert run_distributed(reads_state, 2) == before
    assert before[0][:2] == (torch.float32, True)


def test_a_rank_that_raises_is_named_first_with_its_traceback():
    with pytest.raises(DistributedError) as caught:
        run_distributed(raises_on, 3, 1)
    message = str(caught.value)
    assert message.startswith("raises_on failed, first on rank 1 of 3 (ValueError: bad rows on 1)")
    assert message.index("--- rank 1 raised") < message.index("--- rank 0 ")
    assert 'raise ValueError(f"bad rows on {rank}")' in message
    assert "last output:\nrows do not fit" in message


def test_the_pool_works_again_after_a_failure():
    before = run_distributed(process_id, 3)
    with pytest.raises(DistributedError):
        run_distributed(raises_on, 3, 0)
    assert not set(run_distributed(process_id, 3)) & set(before)


def test_a_rank_that_hangs_is_killed_at_the_timeout_and_its_stack_is_shown():
    start = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        run_distributed(hangs_on, 2, 1, timeout=3)
    assert 3 <= time.monotonic() - start < 15
    assert [outcome.kind for outcome in caught.value.outcomes] == ["returned", "hung"]
    assert "in hangs_on" in caught.value.outcomes[1].report
    assert Path(__file__).name in caught.value.outcomes[1].report


def test_a_rank_that_dies_ends_the_others_with_an_error():
    outcomes = run_ranks(dies_on, 3, 2, timeout=40, group_timeout=20)
    assert [outcome.kind for outcome in outcomes] == ["raised", "raised", "died"]
    assert "exit code 7" in outcomes[2].report
    assert max(outcome.seconds for outcome in outcomes) < 35


def test_a_rank_that_skips_a_collective_times_out_on_the_others():
    outcomes = run_ranks(skips_collective_on, 2, 1, timeout=25, group_timeout=2)
    assert [outcome.kind for outcome in outcomes] == ["raised", "returned"]
    assert 1.5 < outcomes[0].seconds < outcomes[1].seconds


def test_a_value_that_cannot_be_pickled_is_that_ranks_error():
    outcomes = run_ranks(returns_what_cannot_be_pickled, 2)
    assert [outcome.kind for outcome in outcomes] == ["raised", "raised"]
    assert "pickle" in outcomes[0].error


def test_a_warning_on_a_rank_is_an_error_as_in_the_test_itself():
    outcomes = run_ranks(warns, 1)
    assert outcomes[0].error == "DeprecationWarning: deprecated rows"


@pytest.mark.filterwarnings("ignore:deprecated rows")
def test_a_warning_that_the_test_ignores_is_ignored_on_the_ranks():
    assert run_distributed(warns, 1) == [None]
