"""Items of the order of requests alone: FAST Table 2 and Figure 9, arXiv Table 1."""

from __future__ import annotations

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, described, drawn, is_released, workload
from snowskin.sim.cache_curve import DEFINITION, cache_curve
from snowskin.trace.describe import describe

TABLE_2_COLUMNS = ("requests", "mean prompt, tokens", "mean output, tokens", "cache ratio")


def workloads_described(scale: Scale) -> Result:
    """FAST Table 2: the three workloads in numbers."""
    played = [workload(name, scale) for name in paper.WORKLOADS]
    summaries = [describe(each.trace) for each in played]
    measured = [
        (
            each.requests,
            each.prompt_tokens.mean,
            each.output_tokens.mean,
            each.hit_ratio_blocks,
        )
        for each in summaries
    ]
    rows: list[Row] = []
    for name, ours in zip(paper.WORKLOADS, measured, strict=True):
        for column, printed, value in zip(TABLE_2_COLUMNS, paper.TABLE_2[name], ours, strict=True):
            rows.append(row(f"{name}, {column}", printed, value))
    panels = [
        Panel(
            column,
            "workload",
            column.rpartition(", ")[2],
            (
                Curve(
                    "paper",
                    paper.WORKLOADS,
                    tuple(float(paper.TABLE_2[name][index]) for name in paper.WORKLOADS),
                    "paper",
                    is_paper=True,
                ),
                Curve("ours", paper.WORKLOADS, tuple(ours[index] for ours in measured), "ours"),
            ),
            bars=True,
        )
        for index, column in enumerate(TABLE_2_COLUMNS)
        if index
    ]
    report = Report(
        "fast-table2",
        tuple(rows),
        described(played),
        "cache ratio: blocks in the longest cached prefix of each prompt / all blocks, one cache "
        "without limit",
        (
            "the paper does not say how it counts its cache ratio; weighted by tokens, the "
            "released trace has .374, as a mean over requests .409",
        ),
    )
    return Result(report, tuple(panels))


def hits_by_capacity(scale: Scale) -> Result:
    """FAST Figure 9: the hit rate of one cache by its capacity."""
    rows: list[Row] = []
    curves: list[Curve] = []
    played = [workload(name, scale) for name in paper.WORKLOADS]
    for each in played:
        tokens = p.CACHE_CURVE_TOKENS
        sizes = [int(capacity // p.BLOCK_TOKENS) for capacity in tokens]
        *points, most = cache_curve(each.trace, ["lru"], [*sizes, None])
        hits = {capacity: point.hit_ratio for capacity, point in zip(tokens, points, strict=True)}
        local = hits[p.LOCAL_TOKENS] / most.hit_ratio
        near = hits[p.GLOBAL_TOKENS] / most.hit_ratio
        printed = paper.LOCAL_SHARE[each.name]
        rows.append(row(f"{each.name}, share of the maximum at 3 M tokens", printed, local))
        rows.append(row(f"{each.name}, share of the maximum at 50 M tokens", 1.0, near))
        rows.append(row(f"{each.name}, maximum", paper.TABLE_2[each.name][3], most.hit_ratio))
        curves.append(
            Curve(
                f"{each.name}, ours",
                tuple(capacity / 1e6 for capacity in tokens),
                tuple(value / most.hit_ratio for value in hits.values()),
                each.name,
            )
        )
        curves.append(Curve(f"{each.name}, paper", (3.0,), (printed,), each.name, is_paper=True))
    panel = Panel(
        "Hit rate of one cache (LRU)",
        "capacity, million tokens",
        "share of the hit rate without limit",
        tuple(curves),
        log_x=True,
    )
    report = Report(
        "fast-fig9",
        tuple(rows),
        described(played),
        DEFINITION,
        (
            "as in the paper, only the order of requests counts: no time, no copies",
            "the paper says of 50 M tokens that they come near the maximum: 1 stands for that",
        ),
    )
    return Result(report, (panel,))


def hits_by_policy(scale: Scale) -> Result:
    """arXiv Table 1: hit ratio by eviction policy and capacity, and our own reference values."""
    real = drawn(p.REAL, scale)
    policies = list(paper.POLICY_HITS)
    sizes = list(paper.CACHE_SIZES)
    points = cache_curve(real.trace, policies, sizes)
    labels = tuple("∞" if size is None else f"{size // 1000}k" for size in sizes)
    rows: list[Row] = []
    curves: list[Curve] = []
    for index, policy in enumerate(policies):
        printed = paper.POLICY_HITS[policy]
        ours = tuple(point.hit_ratio for point in points[index * len(sizes) :][: len(sizes)])
        for label, theirs, own in zip(labels, printed, ours, strict=True):
            rows.append(row(f"{policy}, {label} blocks", theirs, own))
        x = labels[::-1]
        curves.append(Curve(f"{policy}, paper", x, printed[::-1], policy, is_paper=True))
        curves.append(Curve(f"{policy}, ours", x, ours[::-1], policy))
    panels = [Panel("Hit ratio by policy", "blocks of 512 tokens", "hit ratio", tuple(curves))]
    played = [real]
    if is_released("conversation") and scale.requests is None:
        played.append(workload("conversation", scale))
        reference_rows, panel = released_reference(scale)
        rows += reference_rows
        panels.append(panel)
    report = Report(
        "arxiv-table1",
        tuple(rows),
        described(played),
        DEFINITION,
        (
            "the paper's trace is not released in this form; ours has its means and its cache "
            "ratio, but how its hot blocks are spread is assumed",
            "rows of the released trace compare with values counted from the file by independent "
            "code, not with the paper",
        ),
    )
    return Result(report, tuple(panels))


def released_reference(scale: Scale) -> tuple[list[Row], Panel]:
    """The released conversation trace against values that other code counted from it."""
    trace = workload("conversation", scale).trace
    rows: list[Row] = []
    curves: list[Curve] = []
    for policy, values in paper.RELEASED_HITS.items():
        points = cache_curve(trace, [policy], list(values))
        ours = tuple(point.hit_ratio for point in points)
        labels = tuple("∞" if size is None else f"{size:,}" for size in values)
        rows += [
            row(f"released trace, {policy}, {label} blocks", theirs, own)
            for label, theirs, own in zip(labels, values.values(), ours, strict=True)
        ]
        x, y = tuple(size or 200_000 for size in values), tuple(values.values())
        curves.append(Curve(f"{policy}, reference", x, y, policy, is_paper=True))
        curves.append(Curve(f"{policy}, ours", x, ours, policy))
    title = "Released conversation trace (no limit: at 200k)"
    return rows, Panel(title, "blocks of 512 tokens", "hit ratio", tuple(curves), log_x=True)
