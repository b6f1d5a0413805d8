"""``snowskin profile``: how fast this machine runs a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from snowskin.terms.errors import InvalidInput

LEAST_BUDGET_S = 1.0
"""In less there is no point of every kind to fit through."""


def profile(
    model: Annotated[str, typer.Option(help="A Hugging Face model folder, or smollm2.")] = (
        "smollm2"
    ),
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0,
    transport: Annotated[str, typer.Option(help="How KV travels: auto, shm or tcp.")] = "auto",
    budget: Annotated[float, typer.Option(help="Seconds to measure for, about.")] = 12.0,
    out: Annotated[
        Path | None, typer.Option(help="Write here as well, e.g. for snowskin simulate.")
    ] = None,
) -> None:
    """Measure prefill, decode and transfer of a model on this machine, fit costs, save them.

    `snowskin serve` uses what is saved, and measures by itself at its first start.
    """
    from snowskin.cluster.config import YIELDING_THREADS, ServeConfig

    if not budget >= LEAST_BUDGET_S:
        raise InvalidInput(
            f"--budget {budget:g}: give at least {LEAST_BUDGET_S:g} s", parameter="--budget"
        )
    if out is not None and not out.parent.is_dir():
        raise InvalidInput(f"--out {out}: there is no folder {out.parent}", parameter="--out")
    # Before torch is imported: its OpenMP reads the environment when it is loaded.
    for name, value in YIELDING_THREADS.items():
        os.environ.setdefault(name, value)
    config = ServeConfig(
        model=model, dtype=dtype, device=device, threads=threads, transport=transport
    )
    from snowskin.cluster.profiling import measure_and_save

    measure_and_save(config, budget_s=budget, out=out)
