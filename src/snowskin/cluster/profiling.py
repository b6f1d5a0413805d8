"""Measures a model on this machine and fits the cost profile that the Conductor predicts with."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from snowskin.cluster.config import ServeConfig
from snowskin.cluster.parts import segment_layout
from snowskin.cluster.prepare import prepare_model, profile_path
from snowskin.cost.costs import LinkCost
from snowskin.cost.fit import fit_decode, fit_prefill
from snowskin.cost.profile import FitError, Profile, save_profile
from snowskin.engine.default_model import make_cache_folder
from snowskin.engine.model import Model, ModelInfo
from snowskin.engine.probe import ProbeLimits, ProbeResult, probe
from snowskin.engine.telling import telling
from snowskin.store.blocks import BlockStore
from snowskin.terms.ids import NodeId
from snowskin.transfer.engine import BlockPull, TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess

LINK_BLOCKS = (1, 4, 16, 64)
"""Sizes of the pulls that the link is measured by."""
LINK_REPEATS = 5
LINK_TIMEOUT_S = 30.0
NOISY_RATIO = 0.3
"""A worst error beyond it says more of the machine's other work than of the model."""
SLOWEST_LATENCY_S = 1e-6
"""A fitted latency below this is noise; the wire is never free."""


def measure_and_save(config: ServeConfig, *, budget_s: float, out: Path | None) -> Profile:
    """Measure, fit, tell, and keep the profile where ``serve`` finds it.

    Args:
        budget_s: about how long to measure.
        out: a second place for the profile, e.g. for ``snowskin simulate --hardware``.

    Raises:
        InvalidInput: no such model, or a place that cannot be written.
    """
    console = Console(stderr=True)
    make_cache_folder("profiles")
    info = prepare_model(config)
    with telling(console) as say:
        say(f"Measuring {info.name} for about {budget_s:g} s")
        profile = _measure(config, info, budget_s=budget_s)
    path = profile_path(info, threads=config.engine_threads, transport=config.transport)
    for target in (path, out):
        if target is not None:
            save_profile(profile, target)
            console.print(f"saved {target}", soft_wrap=True, highlight=False)
    _tell(profile, console)
    _warn_if_noisy(profile, console)
    return profile


def measure_model(config: ServeConfig, info: ModelInfo, *, budget_s: float) -> ProbeResult:
    """Time prefills and decode steps of a model in this process, for about ``budget_s``."""
    import torch

    torch.set_num_threads(config.engine_threads)
    return probe(
        Model.load(info),
        ProbeLimits(
            budget_s=budget_s,
            chunk_tokens=config.chunk_tokens,
            block_tokens=config.block_tokens,
        ),
    )


def _measure(config: ServeConfig, info: ModelInfo, *, budget_s: float) -> Profile:
    measured = measure_model(config, info, budget_s=budget_s)
    prefill, prefill_error = fit_prefill(measured.prefill)
    decode, decode_error = fit_decode(measured.decode)
    transfer = _measure_link(config, info)
    return Profile(
        name=f"{info.name}-{info.dtype}",
        model=info.name,
        hardware=f"this machine, {info.device}, {config.engine_threads} threads",
        source=f"measured by snowskin profile, {transfer_name(config)} transfers on one host",
        kv_bytes_per_token=info.kv_bytes_per_token,
        prefill=prefill,
        decode=decode,
        transfer=transfer,
        # On a CPU the load from DRAM to "device" is part of every measured prefill.
        load=LinkCost(latency_s=SLOWEST_LATENCY_S, bytes_per_s=transfer.bytes_per_s),
        prefill_error=prefill_error,
        decode_error=decode_error,
    )


def transfer_name(config: ServeConfig) -> str:
    """The transport that nodes of one host use."""
    return "shm" if config.transport == "auto" else config.transport


def _measure_link(config: ServeConfig, info: ModelInfo) -> LinkCost:
    """Real pulls through a real Messenger, from one segment to another."""
    block_bytes = info.kv_bytes_per_token * config.block_tokens
    layout = segment_layout(
        info, block_tokens=config.block_tokens, dram_bytes=block_bytes * max(LINK_BLOCKS)
    )
    key = secrets.token_bytes(32)
    source = Segment.create(layout)
    messenger = MessengerProcess.start(source, node=NodeId("probe"), cluster_key=key)
    target = Segment.create(layout)
    engine = TransferEngine(target, transport=config.transport, cluster_key=key)
    try:
        return _fit_link(_time_pulls(source, target, engine, messenger), layout)
    finally:
        engine.close()
        messenger.stop()
        source.close()
        target.close()


def _time_pulls(
    source: Segment, target: Segment, engine: TransferEngine, messenger: MessengerProcess
) -> list[float]:
    """Median time of a pull of each of ``LINK_BLOCKS``."""
    there, here = BlockStore(source, node=NodeId("a")), BlockStore(target, node=NodeId("b"))
    medians_s = []
    for count in (LINK_BLOCKS[0], *LINK_BLOCKS):  # The first opens the connection.
        blocks = there.reserve([None] * count)
        room = here.reserve([None] * count)
        assert isinstance(blocks, tuple)
        assert isinstance(room, tuple)
        there.commit([block.slot for block in blocks], [block.key for block in blocks])
        pulls = [BlockPull(a.slot, a.generation, b.slot) for a, b in zip(blocks, room, strict=True)]
        times_s = []
        for _ in range(LINK_REPEATS):
            begin_s = time.perf_counter()
            result = engine.pull(messenger.peer, pulls, timeout_s=LINK_TIMEOUT_S)
            times_s.append(time.perf_counter() - begin_s)
            assert all(result.landed), result
        medians_s.append(statistics.median(times_s))
        there.release([block.slot for block in blocks])
        here.release([block.slot for block in room])
    return medians_s[1:]


def _fit_link(medians_s: Sequence[float], layout: SegmentLayout) -> LinkCost:
    """Through the smallest and the largest pull: a latency and a rate."""
    sizes = [count * layout.slot_bytes for count in LINK_BLOCKS]
    slope = (medians_s[-1] - medians_s[0]) / (sizes[-1] - sizes[0])
    slope = max(slope, medians_s[-1] / sizes[-1] / 2)  # Noise must not make a link endless.
    latency_s = max(medians_s[0] - slope * sizes[0], SLOWEST_LATENCY_S)
    return LinkCost(latency_s=latency_s, bytes_per_s=1 / slope)


def _tell(profile: Profile, console: Console) -> None:
    prefill, decode, transfer = profile.prefill, profile.decode, profile.transfer
    console.print(
        f"prefill  1,000 tokens {prefill.seconds(1000, 0):.3f} s, 960 of them reused "
        f"{prefill.seconds(1000, 960):.3f} s{_error(profile.prefill_error)}"
    )
    console.print(
        f"decode   step {decode.step_s(1, 500) * 1e3:.1f} ms alone, "
        f"{decode.step_s(16, 8000) * 1e3:.1f} ms for 16 sequences{_error(profile.decode_error)}"
    )
    console.print(
        f"transfer {transfer.bytes_per_s / 1e9:.2f} GB/s, latency {transfer.latency_s * 1e3:.2f} ms"
    )


def _warn_if_noisy(profile: Profile, console: Console) -> None:
    errors = [e.worst_ratio for e in (profile.prefill_error, profile.decode_error) if e is not None]
    if max(errors, default=0.0) > NOISY_RATIO:
        console.print(
            "The times scatter: this machine was busy. Run `snowskin profile` again when it is "
            "quiet; until then the Conductor corrects its predictions as it serves."
        )


def _error(error: FitError | None) -> str:
    return "" if error is None else f" (fit: worst {error.worst_ratio:.0%} off)"
