"""All reports of a run on one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from snowskin.reproduce.items import ITEMS
from snowskin.reproduce.report import Report

NEAR = 0.1
"""An error up to which a value counts as met."""


def summary_table(reports: Sequence[Report]) -> str:
    """One line for each report: how many values the paper has, and how near ours come."""
    lines = [
        "| item | what | values compared | within 10 % | median error | greatest error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for report in _ordered(reports):
        errors = [
            abs(each.relative_error) for each in report.rows if each.relative_error is not None
        ]
        name = f"`{report.item}`"
        cells = [name, ITEMS[report.item].title, str(len(errors))]
        if errors:
            near = sum(error <= NEAR for error in errors)
            cells += [str(near), f"{median(errors):.1%}", f"{max(errors):.1%}"]
        else:
            cells += ["–", "–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary_page(reports: Sequence[Report]) -> str:
    """The summary and every row of every report."""
    parts = ["# Reproduction\n", summary_table(reports)]
    for report in _ordered(reports):
        parts.append(f"## {report.item}: {ITEMS[report.item].title}\n")
        parts.append(f"Workload: {report.workload}.\n\nDefinition: {report.definition}.\n")
        parts += [f"- {text}." for text in report.assumptions]
        lines = ["", "| | paper | ours | error |", "|---|---:|---:|---:|"]
        for each in report.rows:
            error = "" if each.relative_error is None else f"{each.relative_error:+.1%}"
            lines.append(f"| {each.name} | {figure(each.paper)} | {figure(each.ours)} | {error} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def figure(value: float | None) -> str:
    """A value as a reader wants it: four digits, counts in full."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _ordered(reports: Sequence[Report]) -> list[Report]:
    order = list(ITEMS)
    return sorted(reports, key=lambda report: order.index(report.item))
