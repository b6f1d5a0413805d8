"""``snowskin simulate`` and ``snowskin cache-curve``."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from snowskin.cli.threads import keep_blas_to_one_thread
from snowskin.terms.errors import InvalidInput

if TYPE_CHECKING:
    from snowskin.sim.config import WorldConfig
    from snowskin.sim.simulate import Outcome
    from snowskin.trace.records import Trace

SHOWN = (
    "requests", "completed", "rejected", "failed", "effective_ratio", "goodput_requests_per_s",
    "ttft_mean_s", "ttft_p90_s", "tbt_mean_s", "tbt_p90_s", "hit_ratio", "prefill_busy_s",
    "decode_busy_s", "mean_batch", "transfer_bytes", "fetches", "span_s",
)  # fmt: skip
NAMES_WIDTH = max(map(len, SHOWN)) + 4
"""Of the first column, with its frame."""
SYSTEMS = ("mooncake", "vllm", "vllm-prefix-caching", "vllm-chunked-prefill")
SAMPLES = 240
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))


def simulate(
    trace: Annotated[Path, typer.Option(help="Mooncake JSONL, Azure CSV or our own JSONL.")],
    hardware: Annotated[str, typer.Option(help="A cost profile's name or file.")] = "a800_tp8",
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 8,
    system: Annotated[
        str,
        typer.Option(
            help="mooncake, or rivals of prefill + decode coupled instances: vllm, "
            "vllm-prefix-caching, vllm-chunked-prefill."
        ),
    ] = "mooncake",
    policy: Annotated[
        str, typer.Option(help="kvcache-centric, cache-aware, load-balance or random.")
    ] = "kvcache-centric",
    admission: Annotated[str, typer.Option(help="none, baseline, early or predicted.")] = "none",
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(help="Seconds between tokens.")] = 0.1,
    speed: Annotated[float, typer.Option(help="Replay so many times faster.")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    dram_gb: Annotated[float, typer.Option(help="DRAM a node lends to the pool, GB.")] = 1000.0,
    blocks: Annotated[int | None, typer.Option(help="DRAM blocks a node, not --dram-gb.")] = None,
    eviction: Annotated[str, typer.Option(help="lru, lfu or length-aware.")] = "lru",
    threshold: Annotated[
        float | None, typer.Option(help="Algorithm 1's kvcache_balancing_threshold.")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="NODE@SECOND+RESTART_S, e.g. prefill-0@60+30: it dies, and is back later, empty."
        ),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="NODE@SECOND+DURATION_S*FACTOR, e.g. decode-0@60+30*0.1: its network runs at so "
            "much of its rate."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="One seed, one outcome.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Test every law after each event.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="SETTING=FIRST..LAST or SETTING=A,B,C: a run for each value, side by side, e.g. "
            "prefill=4..12, speed=1,1.5,2 or policy=random,cache-aware. Not with --plots."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs of a sweep at once.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the summary here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write pictures into this folder.")] = None,
) -> None:
    """Replay a trace on a simulated cluster under the real Conductor."""
    keep_blas_to_one_thread()
    from snowskin.cost.profile import load_profile
    from snowskin.sim.config import WorldConfig
    from snowskin.sim.simulate import without_collector
    from snowskin.trace.formats import read_trace

    if system not in SYSTEMS:
        raise InvalidInput(f"--system {system}: give {', '.join(SYSTEMS)}", parameter="--system")
    _check_folder(json)
    began_s = time.perf_counter()
    with without_collector():
        read = read_trace(trace)
    read = read.sped_up(speed) if requests is None else read.head(requests).sped_up(speed)
    profile = load_profile(hardware)
    if not dram_gb > 0:
        raise InvalidInput(f"--dram-gb {dram_gb:g}: give more than 0", parameter="--dram-gb")
    if system != "mooncake":
        _refuse(
            f"--system {system}",
            {
                "--sweep": sweep,
                "--kill": kill,
                "--slow": slow,
                "--plots": plots,
                "--check": check,
                "--blocks": blocks,
                "--threshold": threshold,
                "--admission": admission != "none",
            },
        )
        from snowskin.sim.coupled import CoupledConfig, simulate_coupled

        rival = CoupledConfig(
            profile,
            system=system,
            instances=prefill + decode,
            ttft_slo_s=ttft_slo,
            tbt_slo_s=tbt_slo,
            seed=seed,
        )
        summary, _ = simulate_coupled(read, rival)
        _show([summary], took_s=time.perf_counter() - began_s)
        if json is not None:
            _write(json, summary | {"speed": speed})
        return
    config = WorldConfig(
        profile,
        prefill_nodes=prefill,
        decode_nodes=decode,
        policy=policy,
        admission=admission,
        ttft_slo_s=ttft_slo,
        tbt_slo_s=tbt_slo,
        balancing_threshold=threshold,
        blocks=blocks,
        dram_bytes=dram_gb * 1e9,
        eviction=eviction,
        faults=tuple(_faults(kill or [], slow or [])),
        seed=seed,
    )
    if sweep is not None:
        _refuse("--sweep", {"--plots": plots, "--check": check})
        _sweep(read, config, sweep, jobs=jobs, json=json)
        return
    with without_collector():
        outcome = _run(read, config, check=check, samples=SAMPLES if plots else 0)
        # The process is about to end: no collection needs to walk through the simulated world.
        gc.freeze()
    took_s = time.perf_counter() - began_s
    _show([outcome.summary], took_s=took_s)
    if json is not None:
        _write(json, outcome.summary | {"speed": speed})
    if plots is not None:
        from snowskin.sim.pictures import draw_outcome

        draw_outcome(outcome, plots)


def cache_curve(
    trace: Annotated[Path, typer.Option(help="A trace that tells what is shared.")],
    policy: Annotated[
        str, typer.Option(help="Any of lru,lfu,length-aware, and the bound belady.")
    ] = "lru",
    blocks: Annotated[str, typer.Option(help="Cache sizes, e.g. 1000,10000,inf.")] = (
        "1000,3000,10000,30000,50000,100000,inf"
    ),
    json: Annotated[Path | None, typer.Option(help="Write the points here.")] = None,
) -> None:
    """Hit ratio of one shared cache against its size, with the store's own eviction code."""
    keep_blas_to_one_thread()
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from snowskin.sim import cache_curve as curve
    from snowskin.trace.formats import read_trace

    _check_folder(json)
    read = read_trace(trace)
    sizes = [_size(text) for text in blocks.split(",")]
    policies = [name.strip() for name in policy.split(",")]
    points = curve.cache_curve(read, policies, sizes)
    table = Table("blocks", *policies, title=f"{escape(read.name)}: hit ratio")
    for row, size in enumerate(sizes):
        ratios = [points[column * len(sizes) + row].hit_ratio for column in range(len(policies))]
        table.add_row("inf" if size is None else f"{size:,}", *[f"{x:.4f}" for x in ratios])
    console = Console()
    console.print(table)
    console.print(f"{curve.DEFINITION[0].upper()}{curve.DEFINITION[1:]}.", highlight=False)
    if json is not None:
        rows = [msgspec.to_builtins(point) for point in points]
        _write(json, {"trace": read.name, "definition": curve.DEFINITION, "points": rows})


def _size(text: str) -> int | None:
    text = text.strip()
    if text in ("inf", "∞"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InvalidInput(f"a cache size is a count or inf, not {text!r}", parameter="blocks")
    return int(text)


def _refuse(kind: str, options: dict[str, object]) -> None:
    """What a kind of run does not do must not seem to have been heeded."""
    for name, value in options.items():
        if value:
            raise InvalidInput(f"{name} does not go with {kind}", parameter=name)


def _run(trace: Trace, config: WorldConfig, *, check: bool, samples: int) -> Outcome:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from snowskin.sim.simulate import simulate as play

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("requests", total=len(trace))
        return play(
            trace,
            config,
            check=check,
            samples=samples,
            on_progress=lambda count: progress.update(task, completed=count),
        )


def _sweep(trace: Trace, config: WorldConfig, sweep: str, *, jobs: int, json: Path | None) -> None:
    from snowskin.sim.sweep import parse_sweep, run_sweep

    began_s = time.perf_counter()
    axis = parse_sweep(sweep)
    summaries = run_sweep(trace, config, axis, jobs=jobs)
    _show(summaries, took_s=time.perf_counter() - began_s, axis=axis.name)
    if json is not None:
        _write(json, {"sweep": axis.name, "values": axis.values, "runs": summaries})


def _show(summaries: list[dict[str, Any]], *, took_s: float, axis: str | None = None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    first = summaries[0]
    if axis is not None:
        title = f"{first['trace']} on {first['hardware']}, by {axis}"
    elif first["system"] == "mooncake":
        title = (
            f"{first['trace']}: {first['prefill']}P+{first['decode']}D {first['hardware']}, "
            f"{first['policy']}, admission {first['admission']}"
        )
    else:
        title = f"{first['trace']}: {first['instances']} × {first['system']} on {first['hardware']}"
    heads = ["value"] if axis is None else [f"{axis} {summary[axis]}" for summary in summaries]
    columns = [[figure(name, summary.get(name)) for name in SHOWN] for summary in summaries]
    console = Console()
    for few in _side_by_side(heads, columns, console.width):
        table = Table("measure", title=escape(title))
        for head in heads[few]:
            table.add_column(head, justify="right", no_wrap=True)
        for name, *values in zip(SHOWN, *columns[few], strict=True):
            table.add_row(name, *values)
        console.print(table)
    if axis not in ("ttft_slo", "tbt_slo"):
        console.print(
            f"Effective: TTFT within {first['ttft_slo_s']:g} s and TBT within "
            f"{first['tbt_slo_s']:g} s. TBT: mean of the longest 10 % of a request's intervals.",
            highlight=False,
        )
    if any(summary.get("failed") for summary in summaries):
        console.print(
            "Failed: a node died, or a prompt outgrew --dram-gb or --blocks.",
            highlight=False,
        )
    console.print(f"Simulated in {took_s:.2f} s.", highlight=False)


def _side_by_side(heads: list[str], columns: list[list[str]], width: int) -> list[slice]:
    """The columns of each table: as many as go beside the measures' names, and at least one."""
    tables: list[slice] = []
    first, used = 0, 0
    for at, (head, column) in enumerate(zip(heads, columns, strict=True)):
        needs = max(map(len, (head, *column))) + 3
        if at > first and used + needs > width:
            tables.append(slice(first, at))
            first, used = at, 0
        used += needs + (NAMES_WIDTH if at == first else 0)
    return [*tables, slice(first, len(heads))]


def figure(name: str, value: float | None) -> str:
    """A measure as a reader likes it, with the unit that the end of its name tells."""
    if value is None:
        return "–"
    if isinstance(value, int) and not name.endswith("_bytes"):
        return f"{value:,}"
    if name.endswith("_bytes"):
        return next(
            (f"{value / size:,.1f} {unit}" for size, unit in BYTE_UNITS if value >= size),
            f"{value:,.0f} B",
        )
    if name.endswith("_per_s"):
        return f"{value:.3f} /s"
    if name.endswith("_s"):
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:,.2f} s"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    return f"{value:,.2f}"


def _check_folder(path: Path | None) -> None:
    """Refuse before a long run what could not be written after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidInput(f"there is no folder {path.parent} to write {path.name} into; make it")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def _faults(kill: list[str], slow: list[str]) -> list[Any]:
    from snowskin.sim.config import LinkSlows, NodeDies
    from snowskin.terms.ids import NodeId

    faults: list[NodeDies | LinkSlows] = []
    for text in (*kill, *slow):
        is_slow = text in slow
        try:
            node, times = text.split("@")
            at_s, rest = times.split("+")
            if is_slow:
                duration_s, factor = rest.split("*")
                faults.append(
                    LinkSlows(NodeId(node), float(at_s), float(duration_s), float(factor))
                )
            else:
                faults.append(NodeDies(NodeId(node), float(at_s), float(rest)))
        except ValueError:
            shape = "NODE@SECOND+DURATION_S*FACTOR" if is_slow else "NODE@SECOND+RESTART_S"
            raise InvalidInput(
                f"expected {shape}, got {text!r}", parameter="slow" if is_slow else "kill"
            ) from None
    return faults
