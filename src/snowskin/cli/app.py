"""The command line: ``snowskin …``."""

from __future__ import annotations

import typer

app = typer.Typer(name="snowskin", no_args_is_help=True)


def main() -> None:
    """The entry point of the ``snowskin`` command."""
    app()
