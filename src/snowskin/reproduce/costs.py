"""Items that the cost models alone decide: FAST Table 1, Figures 12 and 14, arXiv Figure 7."""

from __future__ import annotations

from snowskin.cost.costs import LinkCost
from snowskin.cost.profile import load_profile
from snowskin.cost.reuse import ATTENTION_FACTOR, MATRIX_FACTOR, reuse_threshold_bytes_per_s
from snowskin.cost.roofline import HARDWARE
from snowskin.cost.shapes import SHAPES
from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.observe import TransferLog
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, profile
from snowskin.sim.config import WorldConfig
from snowskin.sim.world import World
from snowskin.trace.records import TraceRequest, trace_of

GB = 1e9


def thousands(tokens: float) -> str:
    """Tokens as the papers label them: 8k, 128k."""
    return f"{round(tokens / 1024)}k"


def reuse_threshold(_: Scale) -> Result:
    """FAST Table 1: the count of prefill arithmetic, and the bandwidth above which reuse pays."""
    shape = SHAPES[p.MODEL]
    prefix_tokens = 8_192
    rows = [
        row("a, factor of n²·d", ATTENTION_FACTOR, _pair_factor()),
        row("b, factor of n·d²", MATRIX_FACTOR, 2 * shape.layer_weights / shape.hidden**2),
    ]
    lengths = tuple(2.0**power for power in range(10, 18))
    curves: list[Curve] = []
    for name, printed in paper.REUSE_THRESHOLD.items():
        flops_per_s = HARDWARE[name].flops_per_s
        ours = reuse_threshold_bytes_per_s(shape, prefix_tokens, flops_per_s=flops_per_s)
        rows.append(row(f"threshold on {name}, GB/s", printed / GB, ours / GB))
        curve = tuple(
            reuse_threshold_bytes_per_s(shape, int(length), flops_per_s=flops_per_s) / GB
            for length in lengths
        )
        curves.append(Curve(f"{name}, ours", lengths, curve, name))
        point = (float(prefix_tokens),), (printed / GB,)
        curves.append(Curve(f"{name}, paper", *point, name, is_paper=True))
    title = "Bandwidth above which reuse of a prefix pays"
    panel = Panel(title, "prefix, tokens", "threshold, GB/s", tuple(curves), log_x=True)
    report = Report(
        "fast-table1",
        tuple(rows),
        "none: LLaMA3-70B, a prefix of 8,192 tokens",
        "reuse of p tokens pays when B / G > 2·d·s / (gqa·(a·p·d + b·d²)) with the paper's a = 4 "
        "and b = 22; G is the node's peak arithmetic",
        (
            "our own a and b are counted from the model's shape: attention over the causal half "
            "of the square alone, and every matrix of a layer with its 8 KV heads",
            "the threshold uses the paper's a and b, so that it tests the equation",
        ),
    )
    return Result(report, (panel,))


def _pair_factor() -> float:
    """Our own a: operations of attention over n²·d and layer."""
    shape = SHAPES[p.MODEL]
    # What is linear cancels out but for the head, and (2n)² − 2·n² = 2·n² is left.
    flops = shape.prefill_flops(2_048) - 2.0 * shape.prefill_flops(1_024)
    flops += 2.0 * shape.vocabulary * shape.hidden
    return flops / (2.0 * 1_024**2 * shape.layers * shape.hidden)


def transfer_times(_: Scale) -> Result:
    """FAST Figure 12: seconds to move KV between two nodes, against TCP."""
    links = {
        "4×200 Gbps": load_profile(p.HARDWARE).transfer,
        "8×400 Gbps": load_profile(p.FAST_LINK_HARDWARE).transfer,
    }
    sizes = tuple(float(size) for size in (1, 2, 5, 10, 20, 40, 70, 100))
    rows: list[Row] = []
    curves: list[Curve] = []
    for name, link in links.items():
        points = paper.TRANSFER_S[name]
        for size, seconds in points.items():
            rows.append(row(f"{name}, {size} GB, s", seconds, link.seconds(size * GB)))
        tcp = LinkCost(0.0, p.TCP_BYTES_PER_S[name])
        forty_s = link.seconds(40 * GB)
        rows.append(
            row(f"{name}, rate at 40 GB, GB/s", paper.TRANSFER_RATE[name] / GB, 40 / forty_s)
        )
        speedup = tcp.seconds(40 * GB) / forty_s
        rows.append(row(f"{name}, 40 GB, times faster than TCP", paper.TCP_SPEEDUP[name], speedup))
        curves.append(_link_curve(name, link, sizes))
        x, y = tuple(float(size) for size in points), tuple(points.values())
        curves.append(Curve(f"{name}, paper", x, y, name, is_paper=True))
    tcp = LinkCost(0.0, p.TCP_BYTES_PER_S["4×200 Gbps"])
    curves.append(_link_curve("TCP", tcp, sizes))
    curves.append(Curve("TCP, paper", (40.0,), (paper.TCP_40_GB_S,), "TCP", is_paper=True))
    title = "Time to move KV between two nodes"
    panel = Panel(title, "GB", "seconds", tuple(curves), log_x=True, log_y=True)
    report = Report(
        "fast-fig12",
        tuple(rows),
        "none: one transfer on an idle link",
        "latency + bytes / rate of the link that the simulator uses; 1 GB is 10⁹ bytes",
        (
            "both links are fitted to this figure: the rows tell how well a straight line fits it",
            "TCP is the paper's one printed point on each set of NICs, at a constant rate",
        ),
    )
    return Result(report, (panel,))


def _link_curve(name: str, link: LinkCost, sizes: tuple[float, ...]) -> Curve:
    return Curve(f"{name}, ours", sizes, tuple(link.seconds(size * GB) for size in sizes), name)


BREAKDOWN_PARTS = (
    "prefill, nothing cached", "prefill, 95 % cached", "transfer", "load", "decode step",
)  # fmt: skip


def breakdown_s(prompt_tokens: int) -> tuple[float, float, float, float, float]:
    """The parts of one request's latency, in the order of BREAKDOWN_PARTS."""
    costs = profile()
    kv_bytes = costs.kv_bytes(prompt_tokens)
    return (
        costs.prefill.seconds(prompt_tokens),
        costs.prefill.seconds(prompt_tokens, round(prompt_tokens * p.CACHED_RATIO)),
        costs.transfer.seconds(kv_bytes),
        costs.load.seconds(kv_bytes),
        costs.decode.step_s(1, prompt_tokens),
    )


def latency_breakdown(_: Scale) -> Result:
    """FAST Figure 14: what one request's latency is made of, by prompt length."""
    ours = {tokens: breakdown_s(tokens) for tokens in paper.BREAKDOWN}
    labels = tuple(thousands(tokens) for tokens in ours)
    rows: list[Row] = []
    panels: list[Panel] = []
    for part, name in enumerate(BREAKDOWN_PARTS):
        unit, factor = ("ms", 1e3) if name == "decode step" else ("s", 1.0)
        printed = tuple(values[part] * factor for values in paper.BREAKDOWN.values())
        computed = tuple(values[part] * factor for values in ours.values())
        rows += [
            row(f"{name}, {label}, {unit}", theirs, own)
            for label, theirs, own in zip(labels, printed, computed, strict=True)
        ]
        curves = (
            Curve("paper", labels, printed, "paper", is_paper=True),
            Curve("ours", labels, computed, "ours"),
        )
        panels.append(Panel(name, "prompt, tokens", unit, curves, bars=True))
    whole, cached, transfer, load, _decode = ours[131_072]
    prefill_cut, rest = 1 - cached / whole, transfer + load
    ttft_cut = 1 - (cached + rest) / (whole + rest)
    rows.append(row("cut of prefill at 128k, ratio", paper.CACHED_128K_PREFILL_CUT, prefill_cut))
    rows.append(row("cut of TTFT at 128k, ratio", paper.CACHED_128K_TTFT_CUT, ttft_cut))
    report = Report(
        "fast-fig14",
        tuple(rows),
        "none: one request alone, prompts of 8k to 128k tokens",
        "each part by the cost profile a800_tp8; TTFT is prefill + transfer + load",
        (
            "the prefill cost is fitted to these ten points, so the errors are those of its form: "
            "c0 + c1·(n−p) + c2·(n²−p²) + c3·p",
            "scheduling (0.03–0.09 s in the paper) is not in our TTFT",
        ),
    )
    return Result(report, tuple(panels))


def store_time(_: Scale) -> Result:
    """arXiv Figure 7: time that storing KV adds to prefill, after it or layer by layer."""
    kinds = ((False, "serialised"), (True, "layer-wise"))
    labels = tuple(thousands(tokens) for tokens in paper.STORE_S)
    rows: list[Row] = []
    curves: list[Curve] = []
    for index, (overlap, name) in enumerate(kinds):
        printed = tuple(values[index] for values in paper.STORE_S.values())
        ours = tuple(_exposed_s(tokens, overlap=overlap) for tokens in paper.STORE_S)
        rows += [
            row(f"{name}, {label}, s", theirs, own)
            for label, theirs, own in zip(labels, printed, ours, strict=True)
        ]
        curves.append(Curve(f"{name}, paper", labels, printed, name, is_paper=True))
        curves.append(Curve(f"{name}, ours", labels, ours, name))
    title = "Time that storing KV adds to prefill"
    panel = Panel(title, "prompt, tokens", "seconds", tuple(curves), bars=True)
    report = Report(
        "arxiv-fig7",
        tuple(rows),
        "none: one request alone on 1P+1D in the simulator",
        "from the first token to the last byte of KV at the decode node",
        (
            "the paper measures the store into its own node's DRAM, we the stream to the decode "
            "node's, which is what our prefill nodes do with new KV",
        ),
    )
    return Result(report, (panel,))


def _exposed_s(prompt_tokens: int, *, overlap: bool) -> float:
    blocks = tuple(range(prompt_tokens // p.BLOCK_TOKENS))
    trace = trace_of(
        "alone", [TraceRequest(0.0, prompt_tokens, 2, blocks)], block_tokens=p.BLOCK_TOKENS
    )
    config = WorldConfig(profile(), prefill_nodes=1, decode_nodes=1, overlap=overlap, seed=p.SEED)
    log = TransferLog()
    world = World(trace, config, on_event=log.note)
    world.run()
    first_token_s = world.jobs[0].first_token_s
    assert first_token_s is not None
    return log.landed_s[0] - first_token_s
