"""Model shapes: what a transformer's size says of its work and of its KV."""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dimensions of a dense Llama-like decoder (gated feed-forward, grouped queries)."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    element_bytes: int = 2
    tied_embeddings: bool = False

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head (gqa)."""
        return self.query_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token adds, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices; norms are left out."""
        queries_and_output = 2 * self.hidden * self.query_heads * self.head_dim
        keys_and_values = 2 * self.hidden * self.kv_heads * self.head_dim
        return queries_and_output + keys_and_values + 3 * self.hidden * self.feed_forward

    @property
    def weight_count(self) -> int:
        """Weights of the whole model, embeddings included."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_weights + tables * self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.weight_count * self.element_bytes

    def prefill_flops(self, prompt_tokens: int, reused_tokens: int = 0) -> float:
        """Floating-point operations of a prefill, with causal attention counted once.

        The head is applied to the last token alone.
        """
        computed = prompt_tokens - reused_tokens
        matrices = 2.0 * computed * self.layer_weights
        pairs = (prompt_tokens**2 - reused_tokens**2) / 2
        attention = 4.0 * pairs * self.query_heads * self.head_dim
        return self.layers * (matrices + attention) + 2.0 * self.vocabulary * self.hidden


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("smollm2", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True),
    )
}
"""The shapes that have a name. Source: each model's published configuration."""
