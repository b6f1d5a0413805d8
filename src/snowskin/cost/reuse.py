"""When reuse of a prefix pays: the equation of FAST '25, Table 1.

The paper counts prefill arithmetic as l·(a·n²·d + b·n·d²) with a = 4 and b = 22, and reuses a
prefix where moving its KV takes less time than computing it anew.
"""

from __future__ import annotations

from snowskin.cost.shapes import ModelShape

ATTENTION_FACTOR = 4
MATRIX_FACTOR = 22


def table1_prefill_flops(shape: ModelShape, prompt_tokens: int) -> float:
    """Floating-point operations of a prefill by the paper's count."""
    square = ATTENTION_FACTOR * float(prompt_tokens) ** 2 * shape.hidden
    linear = MATRIX_FACTOR * float(prompt_tokens) * shape.hidden**2
    return shape.layers * (square + linear)


def table1_kv_bytes(shape: ModelShape, prompt_tokens: int) -> float:
    """Bytes of a prompt's KV by the paper's count: p·l·(2·d / gqa)·s."""
    per_layer = 2 * shape.hidden / shape.queries_per_kv_head * shape.element_bytes
    return prompt_tokens * shape.layers * per_layer


def reuse_ttft_s(
    shape: ModelShape,
    prompt_tokens: int,
    reused_tokens: int,
    *,
    flops_per_s: float,
    bytes_per_s: float,
) -> float:
    """Time to first token when a prefix's KV is moved at ``bytes_per_s`` and the rest computed."""
    computed = table1_prefill_flops(shape, prompt_tokens) - table1_prefill_flops(
        shape, reused_tokens
    )
    return computed / flops_per_s + table1_kv_bytes(shape, reused_tokens) / bytes_per_s


def reuse_threshold_bytes_per_s(
    shape: ModelShape, reused_tokens: int, *, flops_per_s: float
) -> float:
    """The bandwidth above which reuse of a prefix of ``reused_tokens`` shortens TTFT.

    B / G > 2·d·s / (gqa·(a·p·d + b·d²)). The paper prints 6 GB/s for 8×A800 and 19 GB/s for
    8×H800 at a prefix of 8192 tokens.
    """
    numerator = 2 * shape.hidden * shape.element_bytes
    per_token = ATTENTION_FACTOR * reused_tokens * shape.hidden + MATRIX_FACTOR * shape.hidden**2
    return flops_per_s * numerator / (shape.queries_per_kv_head * per_token)
