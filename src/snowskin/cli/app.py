"""The command line: ``snowskin …``. Each command's heavy imports wait until it runs."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

import snowskin
from snowskin.cli import bench, explain, profile, reproduce, serve, simulate, store, trace
from snowskin.cli.compiled import refuse_stale_modules
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
    """The entry point: what a user can mend becomes one clear line, and exit status 2."""
    try:
        refuse_stale_modules()
        app()
    except SnowskinError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "snowskin":
            raise
        _fail(f"this command needs {error.name}: pip install 'snowskin[serve]'")
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    typer.secho(f"snowskin: {message}", fg=typer.colors.RED, err=True)
    sys.exit(2)
