"""The command line: ``snowskin …``. Each command's heavy imports wait until it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import snowskin
from snowskin.cli import bench, explain, profile, reproduce, serve, simulate, store, trace
from snowskin.terms.errors import SnowskinError

app = typer.Typer(
    name="snowskin",
    help="Mooncake's KVCache-centric disaggregated LLM serving: serve, simulate, reproduce.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("profile")(profile.profile)
app.command("explain")(explain.explain)
app.command("simulate")(simulate.simulate)
app.command("cache-curve")(simulate.cache_curve)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(trace.app, name="trace")
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snowskin {snowskin.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: errors of ours become one clear line, and exit status 2."""
    try:
        app()
    except SnowskinError as error:
        typer.secho(f"snowskin: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
