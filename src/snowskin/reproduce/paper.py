"""What the papers report, as numbers: printed in their text or tables, or read off a figure.

FAST is "Mooncake: Trading More Storage for Less Computation" (USENIX FAST '25), arXiv is
2407.00079. Values read off a figure are good to about 1 %.
"""

from __future__ import annotations

WORKLOADS = ("conversation", "tool-agent", "synthetic")

# FAST Table 1: bandwidth above which reuse pays at a prefix of 8192 tokens, bytes/s.
REUSE_THRESHOLD = {"a800_tp8": 6e9, "h800_tp8": 19e9}

# FAST Table 2: requests, mean prompt tokens, mean output tokens, cache ratio.
TABLE_2 = {
    "conversation": (12_031, 12_035, 343, 0.40),
    "tool-agent": (23_608, 8_596, 182, 0.59),
    "synthetic": (3_993, 15_325, 149, 0.66),
}

# FAST Figures 1, 6, 7: gain in capacity within SLO at a TBT of 100, 200, 300 ms.
CAPACITY_GAIN = {
    "conversation": (4.98, 1.57, 0.59),
    "tool-agent": (0.64, 0.42, 0.22),
    "synthetic": (0.62, 0.40, 0.28),
}

# Mean TTFT in seconds by scheduler: FAST Figure 5 (16 nodes), arXiv Figure 8 (8P+8D).
FAST_TTFT_S = {
    "random": 19.65,
    "load-balance": 5.27,
    "cache-aware": 3.58,
    "kvcache-centric": 3.07,
}
ARXIV_TTFT_S = {
    "random": 92.07,
    "load-balance": 60.41,
    "cache-aware": 14.36,
    "kvcache-centric": 6.26,
}

# FAST Figure 8: prefill GPU time relative to Mooncake.
PREFILL_TIME = {
    "conversation": {
        "vllm": 1.56, "vllm-prefix-caching": 1.43, "vllm-chunked-prefill": 1.90,
    },
    "tool-agent": {
        "vllm": 2.12, "vllm-prefix-caching": 1.40, "vllm-chunked-prefill": 2.68,
    },
    "synthetic": {
        "vllm": 2.76, "vllm-prefix-caching": 2.59, "vllm-chunked-prefill": 3.33,
    },
}  # fmt: skip

# FAST Figure 9: share of the greatest hit rate that one node's 3 M tokens give.
LOCAL_SHARE = {"conversation": 0.41, "tool-agent": 0.75, "synthetic": 0.46}

# FAST Figure 10: global over local cache, hit rate and prefill time.
GLOBAL_HITS = {"conversation": 2.22, "tool-agent": 1.38, "synthetic": 2.36}
GLOBAL_PREFILL = {"conversation": 0.76, "tool-agent": 0.74, "synthetic": 0.52}

# FAST Figure 12: seconds to move so many GB.
TRANSFER_S = {
    "4×200 Gbps": {1: 0.0132, 10: 0.114, 40: 0.451, 100: 1.103},
    "8×400 Gbps": {10: 0.055, 40: 0.211, 100: 0.458},
}
TRANSFER_RATE = {"4×200 Gbps": 87e9, "8×400 Gbps": 190e9}
TCP_40_GB_S = 1.08
TCP_SPEEDUP = {"4×200 Gbps": 2.4, "8×400 Gbps": 4.6}

# FAST Figure 13: Gbps → mean TTFT, theoretical transfer, real transfer, all in seconds.
BANDWIDTH = {
    24: (5.09, 1.54, 3.65),
    40: (2.40, 0.935, 1.13),
    80: (1.73, 0.478, 0.510),
    100: (1.60, 0.382, 0.403),
    160: (1.41, 0.242, 0.251),
    320: (1.25, 0.123, 0.125),
    400: (1.25, 0.100, 0.102),
}
RECOMPUTE_TTFT_S = 2.62

# FAST Figure 14, one request: prompt tokens → prefill with nothing cached, prefill with 95 %
# cached, transfer, load into device memory, one decode step; all in seconds.
BREAKDOWN = {
    8_192: (1.005, 0.134, 0.029, 0.029, 0.0265),
    16_384: (2.053, 0.227, 0.063, 0.053, 0.0268),
    32_768: (4.478, 0.406, 0.126, 0.106, 0.0275),
    65_536: (10.584, 0.882, 0.251, 0.213, 0.0286),
    131_072: (27.517, 2.328, 0.493, 0.420, 0.0308),
}
CACHED_128K_PREFILL_CUT = 0.92
CACHED_128K_TTFT_CUT = 0.86

# FAST Figure 15, 16 nodes: prefill nodes → mean TTFT in seconds, effective ratio, TBT in seconds.
SPLIT = {
    5: (5.74, 0.777, 0.0315),
    6: (1.71, 0.972, 0.0318),
    8: (1.19, 0.990, 0.0350),
    10: (1.11, 0.984, 0.0442),
    11: (1.14, 0.861, 0.0583),
}

# arXiv Table 1: hit ratio by policy at ∞, 100k, 50k, 30k, 10k and 1k blocks.
CACHE_SIZES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)
POLICY_HITS = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length-aware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}

# The released conversation trace, counted once from the file with the definition of
# ``snowskin cache-curve``: reference values for our own code, not a claim of the papers.
RELEASED_HITS: dict[str, dict[int | None, float]] = {
    "lru": {
        1_000: 0.0445, 5_859: 0.1355, 10_000: 0.2112, 30_000: 0.3257, 50_000: 0.3546,
        100_000: 0.3637, None: 0.3664,
    },
    "lfu": {1_000: 0.048, 10_000: 0.132, 30_000: 0.276, 50_000: 0.344, 100_000: 0.363},
}  # fmt: skip

# arXiv Table 2: mean prompt and output tokens, cache ratio.
ARXIV_REAL = (7_955, 194, 0.50)

# arXiv Table 3: rejected of 23,000 requests under a replay twice as fast.
REJECTED = {"baseline": 4_183, "early": 3_771, "predicted": 3_589}

# arXiv Figure 7: seconds to store a prompt's KV, after prefill (serialised) and layer by layer.
STORE_S = {
    8_192: (0.111, 0.10),
    16_384: (0.121, 0.10),
    32_768: (0.230, 0.10),
    65_536: (0.422, 0.10),
    131_072: (0.866, 0.10),
}

# arXiv Figures 11 and 12: gain of [3P+1D] over four vLLM instances.
DATASET_GAIN = {"ArXiv Summarization": 0.20, "L-Eval": 0.40}
LONG_CONTEXT_GAIN = {16_384: 0.50, 32_768: None, 65_536: None, 131_072: 5.25}

# arXiv Figure 13: share of requests within the TBT SLO, and the gain in requests.
REPLAY_TBT_RATIO = {"mooncake": 1.0, "vllm": 0.57}
REPLAY_GAIN = 0.75
