"""A trace in one picture: lengths, arrivals and the popularity of blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from snowskin.trace.describe import TraceSummary, arrivals_per_bin, block_uses
from snowskin.trace.records import Trace


def draw_trace(trace: Trace, summary: TraceSummary, path: Path) -> None:
    """Write a PNG with four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    for axes, values, title in (
        (panels[0][0], trace.prompt_tokens, f"prompt, mean {summary.prompt_tokens.mean:,.0f}"),
        (panels[0][1], trace.output_tokens, f"output, mean {summary.output_tokens.mean:,.0f}"),
    ):
        top = max(float(values.max()), 2.0)
        axes.hist(np.maximum(values, 1), bins=np.geomspace(1, top, 60).tolist())
        axes.set(xscale="log", xlabel="tokens", ylabel="requests", title=title)
    starts_s, rates = arrivals_per_bin(trace)
    panels[1][0].plot(starts_s, rates, drawstyle="steps-post")
    panels[1][0].set(
        xlabel="seconds",
        ylabel="requests/s",
        title=f"arrivals, mean {summary.rate_per_s:.2f}/s",
        ylim=(0, None),
    )
    uses = block_uses(trace)
    if trace.sharing_known and len(uses):
        panels[1][1].plot(np.arange(1, len(uses) + 1), uses)
        panels[1][1].set(xscale="log", yscale="log")
    hit = summary.hit_ratio_blocks
    shared = "sharing unknown" if hit is None else f"hit ratio {hit:.3f} of blocks, no limit"
    panels[1][1].set(xlabel="block, by popularity", ylabel="uses", title=shared)
    figure.suptitle(f"{trace.name}: {summary.requests:,} requests")
    figure.savefig(path, dpi=120)
