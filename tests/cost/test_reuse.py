import pytest

from snowskin.cost.reuse import (
    reuse_threshold_bytes_per_s,
    reuse_ttft_s,
    table1_kv_bytes,
    table1_prefill_flops,
)
from snowskin.cost.roofline import HARDWARE
from snowskin.cost.shapes import SHAPES

LLAMA = SHAPES["llama3-70b"]


@pytest.mark.parametrize(("hardware", "printed_gb_per_s"), [("a800_tp8", 6), ("h800_tp8", 19)])
def test_reuse_pays_above_the_bandwidth_that_the_paper_prints(hardware: str, printed_gb_per_s: int):
    threshold = reuse_threshold_bytes_per_s(LLAMA, 8192, flops_per_s=HARDWARE[hardware].flops_per_s)
    assert round(threshold / 1e9) == printed_gb_per_s


def test_table_1_counts_arithmetic_as_the_paper_does():
    n, d, layers = 1000, 8192, 80
    assert table1_prefill_flops(LLAMA, n) == layers * (4 * n**2 * d + 22 * n * d**2)


def test_table_1_counts_kv_as_the_model_stores_it():
    assert table1_kv_bytes(LLAMA, 10) == 10 * LLAMA.kv_bytes_per_token


@pytest.mark.parametrize(("factor", "pays"), [(0.99, False), (1.01, True)])
def test_at_the_threshold_reuse_neither_gains_nor_loses(factor: float, pays: bool):
    flops_per_s = HARDWARE["a800_tp8"].flops_per_s
    bytes_per_s = factor * reuse_threshold_bytes_per_s(LLAMA, 8192, flops_per_s=flops_per_s)
    reused_s, computed_s = (
        reuse_ttft_s(LLAMA, 10_000, reused, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
        for reused in (8192, 0)
    )
    assert (reused_s < computed_s) is pays
