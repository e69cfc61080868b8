"""``raggedshard train``: a small GPT, fully sharded over processes, beside the same model unsharded.

The command starts its own processes. Under torchrun it is one of the processes that torchrun started:

    torchrun --nproc-per-node 4 -m raggedshard.cli.train --model gpt
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from raggedshard.cli.comparison import Options

DEFAULT_WORLD_SIZE = 4


def train(
    model: Annotated[
        Literal["gpt", "gpt2"],
        typer.Option(help="gpt: bytes, odd widths. gpt2: transformers' GPT-2 with its 50257 rows, narrow and shallow."),
    ] = "gpt",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.  [default: 100, gpt2: 12]")] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Processes to shard over.  [default: {DEFAULT_WORLD_SIZE}; torchrun's under torchrun]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the batches.")] = 0,
    reference_seed: Annotated[
        int | None,
        typer.Option(help="Other initial weights for the unsharded model: shows that the comparison can fail."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for loss.png; made if missing.")] = Path("out"),
) -> None:
    """Train a small GPT fully sharded and unsharded on the same batches, and compare.

    Prints where the rows of each uneven parameter lie, the losses of both models, and how far apart they end. The exit
    code is 0 if they agree within float32 rounding, 1 if they do not.
    """
    import torch.distributed as dist

    from raggedshard.cli.comparison import Options

    options = Options(
        model, steps or {"gpt": 100, "gpt2": 12}[model], seed, seed if reference_seed is None else reference_seed
    )
    out.mkdir(parents=True, exist_ok=True)
    if dist.is_torchelastic_launched():
        started = int(os.environ["WORLD_SIZE"])
        if world_size not in (None, started):
            raise typer.BadParameter(f"torchrun started {started} processes; leave --world-size out")
        _leave(0 if _run_rank("env://", int(os.environ["RANK"]), started, options, out) else 1)
    equal = _run_all_ranks(world_size or DEFAULT_WORLD_SIZE, options, out)
    raise typer.Exit(0 if equal else 1)


def _run_all_ranks(world_size: int, options: Options, out: Path) -> bool:
    """Start one process per rank and wait for them; True if the models ended equal."""
    import torch.multiprocessing as mp

    print(f"Starting {world_size} processes ...", flush=True)
    verdicts = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="raggedshard-") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        mp.spawn(_spawned, args=(rendezvous, world_size, options, out, verdicts), nprocs=world_size)
    return verdicts.get()


def _spawned(
    rank: int, rendezvous: str, world_size: int, options: Options, out: Path, verdicts: SimpleQueue[bool]
) -> None:
    equal = _run_rank(rendezvous, rank, world_size, options, out)
    if rank == 0:
        verdicts.put(equal)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End a rank's process at once.

    On a busy machine a thread of gloo's may still let go of the last collective while the interpreter shuts down, which
    ends in "terminate called without an active exception" and exit code -6 (torch 2.13; with torch's own fully_shard
    too, once in 24 runs).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_rank(rendezvous: str, rank: int, world_size: int, options: Options, out: Path) -> bool:
    """Train and, on rank 0, report. True on every rank if the models ended equal."""
    import torch
    import torch.distributed as dist

    from raggedshard.cli import report
    from raggedshard.cli.comparison import SideBySide

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    reporter = report.Reporter(out) if rank == 0 else report.Silence()
    both = SideBySide(options)
    reporter.before(both)
    for number in reporter.track(range(options.steps), both.comparison):
        both.step(number)
    both.compare_parameters()
    reporter.after(both.comparison)
    verdict = [rank == 0 and both.comparison.equal]
    dist.broadcast_object_list(verdict, src=0)
    dist.destroy_process_group()
    return verdict[0]


if __name__ == "__main__":
    typer.run(train)
