"""Draws a result: the paper's points and ours in one figure, which lies beside the paper's own.

One thing has one colour. The paper's values are hollow marks on a dashed line, or hatched bars;
ours are filled.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from snowskin.reproduce.report import Curve, Panel, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#00798c", "#8d6a4f", "#555555")
PAPER_GREY = "#9a9a9a"
PANELS_IN_A_ROW = 3
PANEL_INCHES = 4.7
FRAME_INCHES = 0.9
"""Of a panel's width, what its labels and margins take."""
MOST_TICKS = 8
MOST_BAR_LABELS = 20
BAR_LABEL_SIZE = 7
DIGIT_INCHES = 0.6 * BAR_LABEL_SIZE / 72
LEGEND_COLUMNS = 2


def draw(result: Result, path: Path, *, title: str) -> None:
    """Write the figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(result.panels)
    columns = 2 if count == 4 else min(count, PANELS_IN_A_ROW)
    rows = math.ceil(count / columns)
    width = 7.5 if count == 1 else PANEL_INCHES * columns
    figure = Figure(figsize=(width, 4.1 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{result.report.item}: {title}", fontsize="large", fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False)
    for index, panel in enumerate(result.panels):
        _draw_panel(grid[index // columns][index % columns], panel)
    for index in range(count, rows * columns):
        grid[index // columns][index % columns].set_axis_off()
    # Matplotlib writes its version into the file; without it one seed gives the same picture.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_title(panel.title, fontsize="medium")
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(visible=True, axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    groups = list(dict.fromkeys(curve.group or curve.label for curve in panel.curves))
    colours = {
        group: PAPER_GREY if group == "paper" else COLOURS[index % len(COLOURS)]
        for index, group in enumerate(name for name in groups if name != "paper")
    } | ({"paper": PAPER_GREY} if "paper" in groups else {})
    if panel.bars:
        _draw_bars(axes, panel, colours)
    else:
        places = _places(panel)
        for curve in panel.curves:
            x = (
                [float(places.index(str(at))) for at in curve.x]
                if places
                else [float(at) for at in curve.x]
            )
            _draw_line(axes, curve, x, colours[curve.group or curve.label], dense=panel.steps)
        if places:
            _name_places(axes, places)
    if panel.log_x:
        axes.set_xscale("log")
        _plain_ticks(axes, panel)
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if panel.line_y is not None:
        axes.axhline(panel.line_y, color="black", linestyle=":", linewidth=1)
    if len(panel.curves) > 1:
        # Below the axes, since nothing is drawn there that it could cover.
        axes.legend(
            fontsize="small",
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncols=LEGEND_COLUMNS,
        )


def _plain_ticks(axes: Axes, panel: Panel) -> None:
    """Numbers as people write them; at the points themselves where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    values = sorted({float(x) for curve in panel.curves for x in curve.x})
    if len(values) <= MOST_TICKS:
        axes.set_xticks(values)
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8)


def _tick(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _places(panel: Panel) -> list[str]:
    """What stands along a named axis, in order; empty if the axis is one of numbers."""
    found = dict.fromkeys(x for curve in panel.curves for x in curve.x)
    return [x for x in found if isinstance(x, str)]


def _name_places(axes: Axes, places: list[str]) -> None:
    crowded = sum(len(place) for place in places) > 36
    axes.set_xticks(range(len(places)), places, fontsize=7.5 if crowded else 10)


def _draw_line(axes: Axes, curve: Curve, x: list[float], colour: str, *, dense: bool) -> None:
    axes.plot(
        x,
        [math.nan if value is None else value for value in curve.y],
        label=curve.label,
        color=colour,
        linestyle="--" if curve.is_paper else "-",
        marker="" if dense else ("o" if curve.is_paper else "s"),
        markerfacecolor="white" if curve.is_paper else colour,
        markersize=6 if curve.is_paper else 4,
        linewidth=1.4,
        zorder=3 if curve.is_paper else 2,
    )


def _draw_bars(axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    places = _places(panel)
    width = 0.8 / len(panel.curves)
    is_labelled = len(places) * len(panel.curves) <= MOST_BAR_LABELS
    lengths = [len(_short(y)) for curve in panel.curves for y in curve.y if y is not None]
    bar_inches = (PANEL_INCHES - FRAME_INCHES) * width / len(places)
    is_upright = max(lengths, default=0) * DIGIT_INCHES > bar_inches
    for index, curve in enumerate(panel.curves):
        offset = (index - (len(panel.curves) - 1) / 2) * width
        values = [
            (places.index(str(x)) + offset, y) for x, y in zip(curve.x, curve.y, strict=True)
            if y is not None
        ]  # fmt: skip
        colour = colours[curve.group or curve.label]
        bars = axes.bar(
            [at for at, _ in values],
            [value for _, value in values],
            width * 0.94,
            label=curve.label,
            facecolor="white" if curve.is_paper else colour,
            edgecolor=colour,
            hatch="////" if curve.is_paper else None,
        )
        if is_labelled:
            labels = [_short(value) for _, value in values]
            rotation = 90 if is_upright else 0
            axes.bar_label(bars, labels, fontsize=BAR_LABEL_SIZE, padding=2, rotation=rotation)
    _name_places(axes, places)
    axes.margins(y=0.16 if is_labelled and is_upright else 0.08)


def _short(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
