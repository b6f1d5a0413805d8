from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.engine.attention import CausalMasks, PackedPass, Span
from snowskin.engine.kv import KvShape, SequenceKv

torch.set_num_threads(1)

HEADS, HEAD_DIM = 4, 8


def expected(query: torch.Tensor, kv: SequenceKv, start: int, scale: float) -> torch.Tensor:
    """Attention as its definition has it: ``[rows, heads, head_dim]``."""
    rows, end = query.shape[1], start + query.shape[1]
    keys, values = kv.data[0, :, :end].float().transpose(1, 2)
    group = query.shape[0] // keys.shape[0]
    scores = query.float() @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    future = torch.arange(end)[None] > torch.arange(start, end)[:, None]
    weights = scores.masked_fill(future[None], -torch.inf).softmax(-1)
    out = weights @ values.repeat_interleave(group, 0)
    assert out.shape[1] == rows
    return out.transpose(0, 1)


@settings(deadline=None, max_examples=40)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 31, 128, 129, 270])),
        min_size=1,
        max_size=4,
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    decode=st.booleans(),
)
def test_packed_attention_is_causal_attention_of_each_sequence_alone(
    spans: list[tuple[int, int]], kv_heads: int, dtype: torch.dtype, decode: bool
) -> None:
    if decode:
        spans = [(start, 1) for start, _ in spans]
    torch.manual_seed(len(spans) * kv_heads)
    shape = KvShape(layers=1, kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype)
    packed = []
    for start, rows in spans:
        kv = SequenceKv(shape, device=torch.device("cpu"), capacity_tokens=start + rows + 3)
        kv.data.copy_(torch.randn(kv.data.shape))
        packed.append(Span(kv, start, rows))
    rows = sum(span.rows for span in packed)
    query, key, value = (
        torch.randn(1, rows, heads, HEAD_DIM, dtype=dtype).transpose(1, 2)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    masks = CausalMasks(dtype=dtype, device=torch.device("cpu"))
    with torch.inference_mode():
        out = PackedPass(packed, masks, None).attend(0, query, key, value, 0.3)

    row = 0
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for span in packed:
        part = slice(row, row + span.rows)
        assert torch.equal(
            span.kv.data[0, 0, span.start : span.end], key[0, :, part].transpose(0, 1)
        )
        alone = expected(query[0, :, part], span.kv, span.start, 0.3)
        torch.testing.assert_close(out[0, part].float(), alone, atol=tolerance, rtol=tolerance)
        row += span.rows
