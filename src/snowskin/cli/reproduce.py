"""``snowskin reproduce``: the papers' tables and figures, ours beside theirs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snowskin.cli.threads import keep_blas_to_one_thread
from snowskin.terms.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from snowskin.reproduce.items import Item
    from snowskin.reproduce.report import Report

GOOD_ERROR = 0.1
POOR_ERROR = 0.5
"""Errors up to the first are shown in green, beyond the second in red."""


def reproduce(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[ITEM]...", help="Names; see --list.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every table and figure.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List what there is.")] = False,
    out: Annotated[Path, typer.Option(help="Write NAME.json and NAME.png here.")] = Path(
        "reproduction"
    ),
    jobs: Annotated[int, typer.Option(help="Items at once.")] = 1,
    requests: Annotated[
        int | None,
        typer.Option(help="Only the first so many requests of each workload: a quick look."),
    ] = None,
) -> None:
    """Reproduce the papers' tables and figures with the scheduler that serves.

    Each prints paper | ours | error, and writes a JSON report and a picture; summary.md holds
    them all.
    """
    keep_blas_to_one_thread()
    from rich.console import Console

    from snowskin.reproduce.items import ITEMS, items_named

    console = Console()
    if listing:
        width = max(map(len, ITEMS))
        for item in ITEMS.values():
            console.print(f"{item.name:{width}}  {item.title}", highlight=False)
        return
    if every == bool(items):
        raise InvalidInput("name items, or give --all (see --list)", parameter="item")
    if requests is not None and requests < 2:
        raise InvalidInput(f"requests must be at least 2, not {requests}", parameter="requests")
    _run(
        items_named(list(ITEMS) if every else items or []),
        out, jobs=jobs, requests=requests, console=console,
    )  # fmt: skip


def _run(
    wanted: list[Item], out: Path, *, jobs: int, requests: int | None, console: Console
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from snowskin.reproduce.running import run_items
    from snowskin.reproduce.summary import summary_page
    from snowskin.reproduce.workloads import Scale

    reports: list[Report] = []
    began_s = time.perf_counter()
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("items", total=len(wanted))
        for item, report in run_items(wanted, folder=out, scale=Scale(requests), jobs=jobs):
            _show(item, report, console)
            reports.append(report)
            progress.advance(task)
    (out / "summary.md").write_text(summary_page(reports), encoding="utf-8")
    took_s = time.perf_counter() - began_s
    items = "1 item" if len(wanted) == 1 else f"{len(wanted)} items"
    console.print(f"{items} in {took_s:.1f} s, written to {out}/", highlight=False)


def _show(item: Item, report: Report, console: Console) -> None:
    from rich.table import Table

    from snowskin.reproduce.summary import figure

    table = Table(title=f"{item.name}: {item.title}", title_justify="left", title_style="bold")
    table.add_column("")
    for head in ("paper", "ours", "error"):
        table.add_column(head, justify="right")
    for each in report.rows:
        table.add_row(each.name, figure(each.paper), figure(each.ours), _error(each.relative_error))
    console.print(table)
    console.print(f"Workload: {report.workload}.", highlight=False)
    console.print(f"Definition: {report.definition}.", highlight=False)
    for text in report.assumptions:
        console.print(f"Assumption: {text}.", style="dim", highlight=False)
    console.print()


def _error(error: float | None) -> str:
    if error is None:
        return ""
    size = abs(error)
    colour = "green" if size <= GOOD_ERROR else "red" if size > POOR_ERROR else "yellow"
    return f"[{colour}]{error:+.1%}[/]"
