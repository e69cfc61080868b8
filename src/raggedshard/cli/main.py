"""The ``raggedshard`` command. Nothing here imports a framework before a command needs it."""

import typer

from raggedshard.cli.train import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(train)


@app.callback()
def _describe() -> None:
    """Fully sharded data parallel training for parameters of any size."""
