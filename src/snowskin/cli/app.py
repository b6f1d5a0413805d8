"""The command line: ``snowskin …``. A command's module is imported when the command is named."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, NoReturn

import typer

import snowskin
from snowskin.cli.compiled import refuse_stale_modules
from snowskin.terms.errors import SnowskinError

COMMANDS = {
    "serve": "serve",
    "profile": "profile",
    "explain": "explain",
    "simulate": "simulate",
    "cache-curve": "simulate",
    "reproduce": "reproduce",
    "trace": "trace",
    "store": "store",
    "bench": "bench",
}
"""Every command, and the module of ``cli`` that has it: as ``app``, or a function of its name."""


def make_app(only: str | None = None) -> typer.Typer:
    """The command line.

    Args:
        only: the one command that is wanted, since to load them all takes longer than many a run;
            None: all.
    """
    app = typer.Typer(
        name="snowskin",
        help="Mooncake's KVCache-centric disaggregated LLM serving: serve, simulate, reproduce.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, module_name in COMMANDS.items():
        if only is None or name == only:
            module = import_module(f"snowskin.cli.{module_name}")
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name)
            else:
                app.command(name)(getattr(module, name.replace("-", "_")))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snowskin {snowskin.__version__}")
        raise typer.Exit


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
        named = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        make_app(named if named in COMMANDS else None)()
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
