"""What an item gives: rows of the paper's value beside ours, and the figure to lay beside its own.

Everything here is plain data. Nothing is drawn or printed, so that an item can be computed in
another process and tested without a file.
"""

from __future__ import annotations

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One quantity."""

    name: str
    """Ends in its unit where it has one."""
    paper: float | None
    """None: the paper prints no value for it."""
    ours: float | None
    """None: we have nothing of the kind, and say why in the assumptions."""
    relative_error: float | None
    """ours / paper − 1; None where there is nothing to compare."""


class Report(msgspec.Struct, frozen=True):
    """What is written as ``NAME.json``: nothing volatile, one seed gives the same bytes."""

    item: str
    rows: tuple[Row, ...]
    workload: str
    definition: str
    assumptions: tuple[str, ...]


class Curve(msgspec.Struct, frozen=True):
    """Points of one line, or the bars of one series."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    group: str = ""
    """The paper's and our curve of one thing have one group, and so one colour."""
    is_paper: bool = False


class Panel(msgspec.Struct, frozen=True):
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    bars: bool = False
    log_x: bool = False
    log_y: bool = False
    steps: bool = False
    """A dense curve over time: no markers."""
    line_y: float | None = None
    """A bound worth a dotted line, for example an SLO."""


class Result(msgspec.Struct, frozen=True):
    """A computed item."""

    report: Report
    panels: tuple[Panel, ...]


def row(name: str, paper: float | None, ours: float | None) -> Row:
    """A row with its error; values are cut to six digits, for the rest is noise in a diff."""
    kept = _six_digits(ours)
    error = kept / paper - 1 if paper and kept is not None else None
    return Row(name, _six_digits(paper), kept, _six_digits(error))


def _six_digits(value: float | None) -> float | None:
    if value is None:
        return None
    cut = float(f"{value:.6g}")
    return int(cut) if isinstance(value, int) else cut


def report_json(report: Report) -> bytes:
    """The bytes of ``NAME.json``."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
