"""Pictures of a simulation, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from snowskin.sim.simulate import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_outcome(outcome: Outcome, folder: Path) -> list[Path]:
    """Write ``latency.png``, ``load.png``, ``hits.png`` and ``replicas.png``; gives their paths.

    The last three need a timeline (``simulate(..., samples=200)``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_draw_latency(outcome, folder / "latency.png")]
    timeline = outcome.timeline
    if timeline is None:
        return drawn
    hours = timeline.times_s

    figure, axes = _panel(outcome, "load of both pools")
    axes.plot(hours, timeline.prefill_load, label="prefill: queued and running")
    axes.plot(hours, timeline.decode_load, label="decode: running and waiting")
    axes.set(xlabel="seconds", ylabel="requests per node", ylim=(0, None))
    axes.legend()
    drawn.append(_save(figure, folder / "load.png"))

    figure, axes = _panel(outcome, "prompt tokens reused so far")
    axes.plot(hours, timeline.hit_ratio)
    axes.set(xlabel="seconds", ylabel="hit ratio", ylim=(0, 1))
    drawn.append(_save(figure, folder / "hits.png"))

    figure, axes = _panel(outcome, "replicas of the most used blocks")
    for rank, counts in enumerate(zip(*timeline.replicas, strict=True)):
        axes.plot(hours, counts, label=f"chain #{rank + 1}", drawstyle="steps-post")
    axes.set(xlabel="seconds", ylabel="nodes that hold it", ylim=(0, None))
    axes.legend(fontsize="small")
    drawn.append(_save(figure, folder / "replicas.png"))
    return drawn


def _panel(outcome: Outcome, title: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(f"{_what(outcome.summary)}\n{title}", fontsize="medium")
    return figure, axes


def _what(summary: dict[str, Any]) -> str:
    return (
        f"{summary['trace']}: {summary['prefill']}P+{summary['decode']}D {summary['hardware']}, "
        f"{summary['policy']}, admission {summary['admission']}"
    )


def _draw_latency(outcome: Outcome, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_what(outcome.summary), fontsize="medium")
    left, right = figure.subplots(1, 2)
    for axes, name, slo_s, values in (
        (
            left,
            "TTFT",
            outcome.summary["ttft_slo_s"],
            [record.ttft_s for record in outcome.records if record.ttft_s is not None],
        ),
        (
            right,
            "TBT (mean of longest 10 %)",
            outcome.summary["tbt_slo_s"],
            [record.tbt_s for record in outcome.records if record.tbt_s is not None],
        ),
    ):
        ordered = np.sort(np.array(values))
        axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
        axes.axvline(slo_s, color="grey", linestyle=":", label="SLO")
        axes.set(xlabel=f"{name}, seconds", ylabel="share of requests", ylim=(0, 1))
        if name == "TTFT":
            axes.set_xscale("log")
        elif len(ordered):
            axes.set_xlim(0, 1.2 * max(slo_s, float(np.quantile(ordered, 0.99))))
        axes.legend(loc="lower right")
    return _save(figure, path)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
