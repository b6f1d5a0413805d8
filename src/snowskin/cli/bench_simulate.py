"""``snowskin bench simulate`` and ``conductor``: how fast a trace is replayed, and nodes chosen."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from snowskin.terms.errors import InvalidInput

if TYPE_CHECKING:
    from snowskin.sim.config import WorldConfig
    from snowskin.terms.events import Event
    from snowskin.trace.records import Trace

ADMISSION = "predicted"

PEER_SCRIPT = """
import sys
from dynamo._core import run_mocker_trace_replay
trace, block_tokens, prefill, decode = sys.argv[1], *map(int, sys.argv[2:])
def args(kind):
    return {"engine": {"block_size": block_tokens, "worker_type": kind}}
run_mocker_trace_replay(
    [trace], replay_mode="offline", router_mode="kv_router", trace_block_size=block_tokens,
    num_prefill_workers=prefill, num_decode_workers=decode,
    prefill_engine_args=args("prefill"), decode_engine_args=args("decode"),
)
"""
"""Replays a trace with NVIDIA's simulator (``ai-dynamo-runtime``, measured with 1.6.1)."""

Json = Annotated[Path | None, typer.Option(help="Write the rows to this file.")]


class SimulateRow(msgspec.Struct, frozen=True):
    """Medians over all rounds. Processor time is the measure to trust on a busy machine."""

    name: str
    requests: int
    rounds: int
    wall_s: float
    cpu_s: float
    requests_per_s: float
    """By the wall clock."""
    requests_per_cpu_s: float
    peer_ratio: float | None
    """The peer's processor time over this one's, in the same round."""


class ConductorRow(msgspec.Struct, frozen=True):
    """One recorded run, told again to a fresh Conductor. Times in seconds."""

    prefill: int
    decode: int
    requests: int
    events: int
    events_per_s: float
    decisions_per_s: float
    """By the time of the decisions alone: other events between them do not count."""
    decision_p50_s: float
    decision_p99_s: float


class _Spent(msgspec.Struct, frozen=True):
    wall_s: float
    cpu_s: float


def simulate_command(
    trace: Annotated[Path, typer.Option(help="Mooncake JSONL, Azure CSV or our own JSONL.")],
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds in which all are run in turn.")] = 3,
    peer_python: Annotated[
        str | None, typer.Option(help="Python with ai-dynamo-runtime installed: run it beside.")
    ] = None,
    json: Json = None,
) -> None:
    """Replay a trace: the simulation alone, the whole process, and a peer's whole process."""
    from snowskin.trace.formats import read_trace

    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, not {rounds}", parameter="rounds")
    read = read_trace(trace)
    config = _config(prefill, decode)
    sizes = ["--prefill", str(prefill), "--decode", str(decode)]
    own = [sys.executable, "-c", "from snowskin.cli.app import main; main()", "simulate"]
    own += ["--trace", str(trace), "--admission", ADMISSION, *sizes]
    spent: dict[str, list[_Spent]] = {"simulation alone": [], "whole process": []}
    if peer_python is not None:
        spent["peer's whole process"] = []
        peer = [peer_python, "-c", PEER_SCRIPT, str(trace), str(read.block_tokens)]
        peer += [str(prefill), str(decode)]
    for _ in range(rounds):
        # What an earlier round left behind is none of this one's cost.
        gc.collect()
        spent["simulation alone"].append(_play(read, config))
        spent["whole process"].append(_run(own))
        if peer_python is not None:
            spent["peer's whole process"].append(_run(peer))
    rows = [_row(name, len(read), spent) for name in spent]
    typer.echo(
        "                       requests   wall s    cpu s  requests/s  per cpu s"
        + ("" if peer_python is None else "  peer ×")
    )
    for row in rows:
        ratio = "" if row.peer_ratio is None else f"  {row.peer_ratio:.2f}"
        typer.echo(
            f"{row.name:20} {row.requests:10,} {row.wall_s:8.2f} {row.cpu_s:8.2f} "
            f"{row.requests_per_s:11,.0f} {row.requests_per_cpu_s:10,.0f}{ratio}"
        )
    _write(rows, json)


def conductor_command(
    trace: Annotated[Path, typer.Option(help="Its arrivals and what they share are played.")],
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 8,
    requests: Annotated[int, typer.Option(help="Only the first so many.")] = 5000,
    json: Json = None,
) -> None:
    """Decisions a second of the Conductor alone, over the events of a simulated run."""
    from snowskin.trace.formats import read_trace

    row = _tell_again(read_trace(trace).head(requests), _config(prefill, decode))
    typer.echo(
        f"{row.prefill}P+{row.decode}D, {row.requests:,} requests: "
        f"{row.decisions_per_s:,.0f} decisions/s "
        f"(p50 {row.decision_p50_s * 1e6:.0f} µs, p99 {row.decision_p99_s * 1e6:.0f} µs), "
        f"{row.events_per_s:,.0f} events/s"
    )
    _write([row], json)


def _config(prefill: int, decode: int) -> WorldConfig:
    from snowskin.cost.profile import load_profile
    from snowskin.sim.config import WorldConfig

    return WorldConfig(
        load_profile("a800_tp8"), prefill_nodes=prefill, decode_nodes=decode, admission=ADMISSION
    )


def _play(trace: Trace, config: WorldConfig) -> _Spent:
    from snowskin.sim.simulate import simulate

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    simulate(trace, config)
    return _Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _run(command: Sequence[str]) -> _Spent:
    """Run a process to its end; what the operating system says that it took."""
    began_s = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "DYN_LOG": "error"}
    )
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - began_s
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise InvalidInput(f"{command[0]} ended with status {child.returncode}")
    return _Spent(wall_s, usage.ru_utime + usage.ru_stime)


def _row(name: str, requests: int, spent: dict[str, list[_Spent]]) -> SimulateRow:
    own = spent[name]
    peer = spent.get("peer's whole process", [])
    wall_s, cpu_s = median(s.wall_s for s in own), median(s.cpu_s for s in own)
    ratios = [theirs.cpu_s / ours.cpu_s for theirs, ours in zip(peer, own, strict=False)]
    return SimulateRow(
        name,
        requests,
        len(own),
        wall_s,
        cpu_s,
        requests / wall_s,
        requests / cpu_s,
        median(ratios) if ratios else None,
    )


def _tell_again(trace: Trace, config: WorldConfig) -> ConductorRow:
    from snowskin.conductor.conductor import Conductor
    from snowskin.sim.world import World, conductor_rng
    from snowskin.terms.events import RequestArrived

    events: list[tuple[Event, float]] = []
    World(trace, config, on_event=lambda event, now_s: events.append((event, now_s))).run()
    settings = config.conductor(trace.block_tokens)
    fresh = Conductor(settings, config.profile, conductor_rng(config.seed))
    took_s: list[float] = []
    began_s = time.perf_counter()
    for event, now_s in events:
        if isinstance(event, RequestArrived):
            asked_s = time.perf_counter()
            fresh.handle(event, now_s=now_s)
            took_s.append(time.perf_counter() - asked_s)
        else:
            fresh.handle(event, now_s=now_s)
    total_s = time.perf_counter() - began_s
    took_s.sort()
    return ConductorRow(
        config.prefill_nodes,
        config.decode_nodes,
        len(took_s),
        len(events),
        len(events) / total_s,
        len(took_s) / sum(took_s),
        took_s[len(took_s) // 2],
        took_s[len(took_s) * 99 // 100],
    )


def _write(rows: Sequence[Any], file: Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
