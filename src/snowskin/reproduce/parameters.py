"""The one set of parameters of every reproduced table and figure, each with its ground.

No item has values of its own beyond those that its paper states for it, and none was fitted to a
result of the simulator, but ``SYNTHETIC_LOAD``, which says so (``docs/reproduction.md`` tells what
was changed after a first run). What is not here is the default of ``WorldConfig``,
``ConductorConfig`` or ``CoupledConfig``, which state their own grounds.
"""

from __future__ import annotations

import msgspec

from snowskin.trace.shapes import (
    CONVERSATIONS,
    RELEASED_STAMP_S,
    Arrivals,
    Documents,
    Shape,
    tools_and_conversations,
)

SEED = 0
"""Of every draw. Our choice; another seed moves simulated means by a few per cent."""

HARDWARE = "a800_tp8"
"""FAST §5.1: nodes of 8×A800. Costs are fitted to FAST Fig. 14, 12 and arXiv Fig. 2."""

FAST_LINK_HARDWARE = "h100_tp8"
"""The profile whose link is fitted to 8×400 Gbps (FAST Fig. 12, right)."""

MODEL = "llama3-70b"
"""FAST §5.1. LLaMA2-70B of the arXiv paper has the same dimensions but for its vocabulary."""

PREFILL_NODES = 8
DECODE_NODES = 8
"""FAST §5.1: 16 nodes; Fig. 15 finds the best split near 1:1. arXiv Fig. 8, Table 3: 8P+8D."""

BLOCK_TOKENS = 512
"""The released traces' block."""

TTFT_SLO_S = 30.0
TBT_SLOS_S = (0.1, 0.2, 0.3)
"""FAST §5.1; the arXiv paper's replays use 30 s and 0.1 s."""

SPLIT_TTFT_SLO_S = 10.0
"""FAST Fig. 15."""

EFFECTIVE_RATIO = 0.9
"""A system carries a load while so many requests meet both SLOs. The arXiv paper judges the 90th
percentile; FAST names no bound, so we keep the same."""

RELATIVE_SLO = (10.0, 5.0)
"""arXiv §8.1.2: 90 % within 10× the TTFT and 5× the TBT of a request that is alone."""

SPEED_STEP = 2.0 ** (1 / 4)
"""Replay speeds are tried on this geometric grid; between its points we interpolate. Our choice:
fine enough for an error of a few per cent, coarse enough for a quick search."""

SPEED_BOUNDS = (-32, 32)
"""Steps from the trace's own speed beyond which no search goes: 1/256 to 256 times."""

SWEEP_REQUESTS = 12_031
"""Items that play a workload at many speeds take its first so many requests: as many as the
released conversation trace has, half an hour of the busier ones. Our choice, for the sake of time.
"""

BUSY_LOAD = 1.0
"""The load at which schedulers and splits are compared: prefill work without any reuse would
just fill the papers' 8 prefill nodes. Our choice, because it needs no simulation to state."""

SYNTHETIC_LOAD = 0.72
"""The load, in the same unit, of the two items that sweep a setting on the synthetic workload. FAST
prints no rate for them, but the mean TTFT without any reuse: 2.62 s (Fig. 13), which is what our 8
prefill nodes have at this load. So that one value is calibrated, and no reproduction."""

LOADS = (0.7, 0.85, 1.0, 1.15)
"""Loads of the curves by load, in the same unit."""

OVERLOAD_SPEEDS = (2.0, 4.0)
"""arXiv Table 3 replays at twice the speed; the other shows what follows beyond it."""

DECODE_BOUND = (14, 2)
"""Prefill and decode nodes of a second cluster of 16 for the items of overload: with 8P+8D decode
never limits our model, and rules that differ in nothing but decode load then do the same."""

CACHE_NODES = 10
"""FAST Fig. 10: so many prefill nodes; we give them as many decode nodes."""

LOCAL_TOKENS = 3_000_000
GLOBAL_TOKENS = 50_000_000
"""FAST Fig. 9: one node's 1 TB of DRAM, and the capacity that comes near the maximum."""

CACHE_CURVE_TOKENS = (1e6, 3e6, 6e6, 12e6, 25e6, 50e6, 100e6)
"""Capacities of the curve of FAST Fig. 9. Our choice of points."""

REPLICA_SAMPLE_S = 30.0
REPLICA_RANKS = (10, 100, 1_000, 10_000)
"""FAST Fig. 11: keys are counted every 30 s and ranked by the sum of counts."""

CACHED_RATIO = 0.95
"""FAST Fig. 14: the cached share of the prompt."""

LINK_EFFICIENCY = 89.5 / 100
"""Bytes that arrive over a NIC's nominal rate: FAST Fig. 12 measures 89.5 GB/s on 4×200 Gbps."""

TCP_BYTES_PER_S = {"4×200 Gbps": 40e9 / 1.08, "8×400 Gbps": 40e9 / (4.6 * 0.211)}
"""FAST Fig. 12: TCP moves 40 GB in 1.08 s on the first NICs; on the others it is 4.6 times slower
than the 0.211 s of the transfer engine."""

LONG_CONTEXT_TOKENS = (16_384, 32_768, 65_536, 131_072)
LONG_CONTEXT_OUTPUT_TOKENS = 512
LONG_CONTEXT_CACHE_RATIO = 0.5
LONG_CONTEXT_REQUESTS = 400
"""arXiv Table 2 and Fig. 12; the count of requests is ours: 90th percentiles need hundreds."""

DATASET_REQUESTS = 2_000
"""Requests of each dataset of arXiv Fig. 11. Our choice, as above."""

BOUND_BLOCKS = (1_000, 3_000, 10_000, 30_000, 100_000)
BOUND_LOADS = (0.7, 1.0)
THRESHOLDS = (1.0, 1.25, 1.5, 2.0, 4.0, 16.0)
OVERLOAD_SWEEP = (1.2, 2.0, 3.0, 5.0)
LEAD_GBPS = (10, 25, 50, 100, 200, 400, 800)
LEAD_DRAM_GB = (125, 250, 500, 1_000, 2_000)
LEAD_BLOCK_TOKENS = (128, 256, 512, 1_024, 2_048)
"""Points of the items beyond the papers. Our choice: each spans what hardware offers today."""

REAL = Shape(
    name="real",
    requests=23_000,
    prompt_tokens=7_955,
    output_tokens=194,
    output_sigma=0.9,
    cache_ratio=0.50,
    rate_per_s=6.4,
    arrivals=Arrivals.POISSON,
    stamp_s=RELEASED_STAMP_S,
    structure=tools_and_conversations(
        msgspec.structs.replace(
            CONVERSATIONS, first_tokens=9_350, message_tokens=1_670, continue_ratio=0.11
        ),
        output_tokens=400,
    ),
)
"""arXiv Table 2, the real workload: 23,000 requests of 7,955 / 194 tokens, half of them cached.
Rate: one hour. Structure: that of the tool & agent workload, whose file was released with this
paper (``mooncake_trace.jsonl``); its conversations are shortened and go on more seldom, by as much
as the published means and the published cache ratio ask for."""

SUMMARIES = Shape(
    name="arxiv-summarization",
    requests=DATASET_REQUESTS,
    prompt_tokens=8_088,
    output_tokens=229,
    output_sigma=0.5,
    cache_ratio=0.0,
    rate_per_s=1.0,
    arrivals=Arrivals.POISSON,
    structure=Documents(
        document_tokens=1,
        document_sigma=0.0,
        question_tokens=8_087,
        question_sigma=0.6,
        fixed_count=0,
        again_ratio=0.0,
    ),
)
"""arXiv Table 2, ArXiv Summarization: 8,088 / 229 tokens, nothing shared."""
