"""The three costs that every prediction is made of: a prefill, a decode step, a transfer.

Each is a short formula with named coefficients, so that a profile can be read, fitted and argued
about. Tokens are counts, times are seconds.
"""

from __future__ import annotations

import math

import msgspec

from snowskin.terms.errors import InvalidInput


def _require_non_negative(struct: msgspec.Struct) -> None:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"{name} must be a finite number ≥ 0, not {value!r}", parameter=name)


class PrefillCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one prefill: c0 + c1·(n−p) + c2·(n²−p²) + c3·p.

    n are the prompt's tokens, p those whose KV is reused. The linear term is the weights' work, the
    square one attention's, and the last one the load of reused KV from DRAM.
    """

    base_s: float
    token_s: float
    token_pair_s: float
    reused_token_s: float = 0.0

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def seconds(self, prompt_tokens: int, reused_tokens: int = 0) -> float:
        """Predicted time for a prompt of which ``reused_tokens`` need no computing."""
        computed = prompt_tokens - reused_tokens
        return (
            self.base_s
            + self.token_s * computed
            + self.token_pair_s * computed * (prompt_tokens + reused_tokens)
            + self.reused_token_s * reused_tokens
        )


class DecodeCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one decode step: d0 + d1·b + d2·ctx.

    b sequences run in the batch, and ctx is the sum of their context tokens.
    """

    base_s: float
    sequence_s: float
    context_token_s: float

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """Predicted time of one step; means over nodes, hence fractions, are welcome."""
        return self.base_s + self.sequence_s * sequences + self.context_token_s * context_tokens


class LinkCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a transfer: a latency, then bytes at a constant rate."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _require_non_negative(self)
        if self.bytes_per_s == 0:
            raise InvalidInput("bytes_per_s must be greater than 0", parameter="bytes_per_s")

    def seconds(self, transfer_bytes: float) -> float:
        """Time until the last of ``transfer_bytes`` has arrived; nothing takes no time."""
        return self.latency_s + transfer_bytes / self.bytes_per_s if transfer_bytes else 0.0
