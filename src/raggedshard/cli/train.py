"""``raggedshard train``: a small GPT, fully sharded over processes, beside the same model unsharded.

The command starts its own processes. Under a framework's launcher it is one of the processes that this started:

    torchrun --nproc-per-node 4 -m raggedshard.cli.train
    msrun --worker_num 4 --local_worker_num 4 --join True python -m raggedshard.cli.train --backend mindspore
"""

import functools
from pathlib import Path
from typing import Annotated, Literal

import typer

from raggedshard.cli.backend import Backend, BackendName, start_of
from raggedshard.cli.comparison import Options, SideBySide
from raggedshard.cli.report import Reporter, Silence

DEFAULT_WORLD_SIZE = 4
DEFAULT_STEPS = {("torch", "gpt"): 100, ("torch", "gpt2"): 12, ("mindspore", "gpt"): 40}


def train(
    backend: Annotated[BackendName, typer.Option(help="The framework that trains.")] = "torch",
    model: Annotated[
        Literal["gpt", "gpt2"],
        typer.Option(
            help="gpt: bytes, odd widths. gpt2: transformers' GPT-2 with its 50257 rows, narrow, shallow; torch only."
        ),
    ] = "gpt",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Optimizer steps. Default: 100; of gpt2 12; of MindSpore, which is slower, 40."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Processes to shard over. Default: {DEFAULT_WORLD_SIZE}, or those of torchrun or msrun."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and of the batches.")] = 0,
    reference_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Other initial weights for the unsharded model: shows that the comparison can fail."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for loss.png; made if missing.")] = Path("out"),
) -> None:
    """Train a small GPT fully sharded and unsharded on the same batches, and compare.

    Prints where the rows of each uneven parameter lie, the losses of both models,
    and how far apart they end.

    The exit code is 0 if they agree within float32 rounding, 1 if they do not.
    """
    if (backend, model) not in DEFAULT_STEPS:
        raise typer.BadParameter(f"--model {model} trains on PyTorch only, not with --backend {backend}")
    options = Options(
        model,
        steps or DEFAULT_STEPS[backend, model],
        seed,
        seed if reference_seed is None else reference_seed,
    )
    start = start_of(backend)
    launched = start.launched_processes()
    if launched is not None and world_size not in (None, launched):
        raise typer.BadParameter(f"{start.LAUNCHER} started {launched} processes; leave --world-size out")
    out.mkdir(parents=True, exist_ok=True)
    job = functools.partial(_train_on_rank, options, out)
    if launched is not None:
        start.leave(0 if job(start.join()) else 1)
    world_size = world_size or DEFAULT_WORLD_SIZE
    print(f"Starting {world_size} processes ...", flush=True)
    raise typer.Exit(0 if start.run_ranks(world_size, job) else 1)


def _train_on_rank(options: Options, out: Path, backend: Backend) -> bool:
    """Train and, on rank 0, report. True on every rank if the models ended equal."""
    reporter = Reporter(out) if backend.rank == 0 else Silence()
    both = SideBySide(options, backend)
    reporter.before(both)
    for number in reporter.track(range(options.steps), both.comparison):
        both.step(number)
    both.compare_parameters()
    reporter.after(both.comparison)
    return both.agree_on_verdict()


if __name__ == "__main__":
    typer.run(train)
