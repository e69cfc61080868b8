"""What ``raggedshard train`` shows: tables and a progress display on the terminal, the loss curves as a PNG."""

import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from raggedshard.cli.comparison import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    Comparison,
    ParameterLayout,
    SideBySide,
    Tolerance,
)

WIDTH_WITHOUT_TERMINAL = 120
LOSS_ROWS = 12
SECONDS_BETWEEN_LINES = 10


class Silence:
    """The reporter of every rank but 0."""

    def before(self, both: SideBySide) -> None:
        pass

    def track(self, numbers: Iterable[int], comparison: Comparison) -> Iterator[int]:
        yield from numbers

    def after(self, comparison: Comparison) -> None:
        pass


class Reporter(Silence):
    """Prints a run to the terminal and draws ``loss.png`` into ``out``."""

    def __init__(self, out: Path):
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_WITHOUT_TERMINAL
        self.out = out

    def before(self, both: SideBySide) -> None:
        """What is about to be trained, and where the rows lie."""
        layouts, ranks = both.comparison.layouts, both.backend.world_size
        elements = sum(math.prod(layout.shape) for layout in layouts)
        tokens = both.recipe.rows_per_rank * ranks * both.recipe.context
        steps = f"{both.options.steps} step{'s' if both.options.steps > 1 else ''}"
        self.console.print(
            f"[bold]{both.options.model}[/bold] on {both.backend.title}: {elements:,} float32 parameters, AdamW, "
            f"{steps} of {tokens:,} tokens of Python's standard library.\n"
            f"Trained twice on the same batches: [cyan]sharded[/cyan] over {ranks} processes, and "
            f"[magenta]unsharded[/magenta] in one.\n"
        )
        uneven = [layout for layout in layouts if layout.uneven]
        if uneven:
            self.console.print(_layout_table(uneven, ranks))
            placement = re.sub(r"\w+=", "", uneven[0].placements)
            self.console.print(f"In full, the placement of {uneven[0].name} is [bold]{placement}[/].")
        self.console.print(
            f"{len(uneven)} of {len(layouts)} parameters do not divide by {ranks}. Padding exists only inside "
            "collectives; optimizer and checkpoints see the true rows.\n"
        )

    def track(self, numbers: Iterable[int], comparison: Comparison) -> Iterator[int]:
        """Yield the numbers of the steps, with a bar on a terminal and a line now and then in a file."""
        follow = self._with_bar if self.console.is_terminal else self._with_lines
        yield from follow(list(numbers), comparison)

    def _with_bar(self, numbers: list[int], comparison: Comparison) -> Iterator[int]:
        columns = (
            "training",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("training", total=len(numbers), loss="")
            for number in numbers:
                yield number
                progress.update(task, advance=1, loss=_latest_losses(comparison))

    def _with_lines(self, numbers: list[int], comparison: Comparison) -> Iterator[int]:
        last = time.monotonic()
        for number in numbers:
            yield number
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                self.console.print(f"step {number + 1} of {len(numbers)}, {_latest_losses(comparison)}")
                last = time.monotonic()

    def after(self, comparison: Comparison) -> None:
        """Losses, the picture and the verdict."""
        self.console.print(_loss_table(comparison))
        self.console.print(_difference_table(comparison))
        self._draw(comparison)
        if comparison.equal:
            self.console.print("[bold green]Equal[/]: sharded and unsharded training agree within float32 rounding.")
        else:
            self.console.print("[bold red]Different[/]: sharded and unsharded training do not agree.")

    def _draw(self, comparison: Comparison) -> None:
        path = self.out / "loss.png"
        try:
            draw_losses(comparison, path)
        except ModuleNotFoundError as error:
            self.console.print(f"No picture: {error}. Install raggedshard\\[plot].")
        else:
            self.console.print(f"Loss curves: {path.resolve()}", soft_wrap=True)


def _latest_losses(comparison: Comparison) -> str:
    sharded, unsharded = comparison.sharded_losses[-1], comparison.unsharded_losses[-1]
    return f"loss [cyan]{sharded:.4f}[/] and [magenta]{unsharded:.4f}[/]"


def _table(title: str, **options: Any) -> Table:
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    return Table(title=title, title_justify="left", title_style="bold", **look, **options)


def _layout_table(layouts: list[ParameterLayout], ranks: int) -> Table:
    table = _table(f"Parameters whose rows do not divide by {ranks}", show_footer=True)
    total = sum(sum(layout.padding_bytes) for layout in layouts)
    table.add_column("parameter", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("placement", no_wrap=True)
    table.add_column("rows of\neach rank", justify="right", no_wrap=True)
    table.add_column("its padding,\nbytes", "all together", justify="right")
    table.add_column("of all\nranks", f"{total:,}", justify="right", no_wrap=True)
    for layout, count in _alike(layouts):
        padding = layout.padding_bytes
        table.add_row(
            layout.name,
            str(layout.shape),
            layout.placements.partition("(")[0],
            " ".join(str(rows) for rows in layout.rows),
            " ".join(f"{size:,}" for size in padding),
            f"{count} x {sum(padding):,}" if count > 1 else f"{sum(padding):,}",
        )
    return table


def _alike(layouts: list[ParameterLayout]) -> Iterator[tuple[ParameterLayout, int]]:
    """One line for the same parameter of every block: ``blocks.0.norm.bias``, ... become ``blocks.0-3.norm.bias``."""
    number = re.compile(r"(?<=\.)\d+(?=\.)")
    groups: dict[tuple, list[ParameterLayout]] = {}
    for layout in layouts:
        key = (number.sub("{}", layout.name), layout.shape, layout.placements, layout.rows)
        groups.setdefault(key, []).append(layout)
    for (pattern, *_), members in groups.items():
        first, last = members[0], members[-1]
        numbers = zip(number.findall(first.name), number.findall(last.name), strict=True)
        ranges = [low if low == high else f"{low}-{high}" for low, high in numbers]
        yield replace(first, name=pattern.format(*ranges)), len(members)


def _loss_table(comparison: Comparison) -> Table:
    table = _table("Loss, nats per token")
    table.add_column("step", justify="right")
    table.add_column("sharded", justify="right", style="cyan")
    table.add_column("unsharded", justify="right", style="magenta")
    table.add_column("difference", justify="right")
    steps = len(comparison.sharded_losses)
    for number in sorted({round(row * (steps - 1) / (LOSS_ROWS - 1)) for row in range(LOSS_ROWS)}):
        sharded, unsharded = comparison.sharded_losses[number], comparison.unsharded_losses[number]
        table.add_row(str(number + 1), f"{sharded:.6f}", f"{unsharded:.6f}", f"{abs(sharded - unsharded):.1e}")
    return table


def _difference_table(comparison: Comparison) -> Table:
    table = _table("Sharded against unsharded")
    table.add_column("compared", overflow="fold")
    table.add_column("largest difference", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("used of that", justify="right")
    worst = comparison.worst_parameter
    rows: list[tuple[str, float, Tolerance, float]] = [
        ("loss of every step", max(comparison.loss_differences), LOSS_TOLERANCE, comparison.loss_tolerance_used),
        (f"parameters at the end, worst {worst.name}", worst.largest, PARAMETER_TOLERANCE, worst.tolerance_used),
    ]
    for what, difference, tolerance, used in rows:
        allowed = f"{tolerance.atol:.0e} + {tolerance.rtol:.0e} x value"
        share = f"[green]{used:.1%}[/]" if used <= 1 else f"[red]{used:,.1f} times[/]"
        table.add_row(what, f"{difference:.1e}", allowed, share)
    return table


def draw_losses(comparison: Comparison, path: Path) -> None:
    """Write the two loss curves and their difference as a PNG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(comparison.sharded_losses) + 1)
    losses.plot(steps, comparison.unsharded_losses, color="#c678b4", linewidth=5, alpha=0.5, label="unsharded")
    losses.plot(steps, comparison.sharded_losses, color="#0b7285", linewidth=1.5, label="sharded")
    losses.set_ylabel("loss, nats per token")
    losses.legend()
    allowed = [LOSS_TOLERANCE.atol + LOSS_TOLERANCE.rtol * abs(loss) for loss in comparison.unsharded_losses]
    differences.plot(steps, allowed, color="#c92a2a", linestyle="--", label="allowed")
    differences.plot(steps, comparison.loss_differences, color="#0b7285", label="difference")
    differences.set_yscale("symlog", linthresh=1e-8)
    differences.set_ylabel("difference")
    differences.set_xlabel("step")
    differences.legend(loc="center right")
    figure.savefig(path, dpi=120)
