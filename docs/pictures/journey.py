"""Draws docs/pictures/journey.png: one request's way through a cluster."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SKIN, CORE, POOL, FLOW = "#2b2d42", "#f4f1ea", "#e8a87c", "#8fb8de", "#c44536"


def box(axes, x, y, width, height, title, text, colour):
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=colour, edgecolor=INK, linewidth=1.2,
        )
    )
    axes.text(x + width / 2, y + height - 0.28, title, ha="center", va="top",
              fontsize=11, weight="bold", color=INK)
    axes.text(x + width / 2, y + height - 0.68, text, ha="center", va="top",
              fontsize=8.5, color=INK, linespacing=1.35)


def arrow(axes, start, end, label, where, *, colour=INK, bend=0.0, style="-|>"):
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=14, linewidth=1.5,
                        color=colour, connectionstyle=f"arc3,rad={bend}")
    )
    axes.text(*where, label, fontsize=8.5, color=colour, ha="center", va="center",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})


figure, axes = plt.subplots(figsize=(10, 5.6), dpi=160)
axes.set_xlim(0, 12.4)
axes.set_ylim(0, 6.9)
axes.axis("off")

box(axes, 0.2, 4.6, 2.5, 1.9, "Client", "any OpenAI client", "white")
box(axes, 4.4, 4.6, 3.6, 1.9, "Front", "OpenAI API · tokenizer\nConductor: whose cache has the\nprefix, whose queue is short?", SKIN)
box(axes, 0.6, 1.2, 4.3, 2.2, "Prefill node", "reuses the longest prefix\ncomputes the rest, layer by layer", CORE)
box(axes, 7.5, 1.2, 4.3, 2.2, "Decode node", "continuous batching\nwrites new blocks back", CORE)
for x in (0.9, 7.8):
    box(axes, x, 0.25, 3.7, 1.35, "DRAM segment", "KV blocks, served by its Messenger", POOL)

arrow(axes, (2.75, 5.8), (4.35, 5.8), "1 prompt", (3.55, 6.05))
arrow(axes, (4.35, 5.1), (2.75, 5.1), "6 tokens", (3.55, 4.85), colour=FLOW)
arrow(axes, (5.0, 4.55), (3.0, 3.45), "2 prefill here", (3.2, 4.2))
arrow(axes, (7.1, 4.55), (9.2, 3.45), "3 decode there", (9.2, 4.2))
arrow(axes, (4.65, 1.15), (7.75, 1.15), "4 KV, while it\nis computed", (6.2, 1.55), colour=FLOW)
arrow(axes, (7.75, 0.8), (4.65, 0.8), "the next turn fetches\nwhat was generated", (6.2, 0.4), colour="#3d6f9e")
arrow(axes, (4.3, 3.45), (6.1, 4.55), "5 first token", (6.15, 3.85), colour=FLOW)

figure.savefig(Path(__file__).with_suffix(".png"), bbox_inches="tight", facecolor="white")
