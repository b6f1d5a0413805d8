"""Costs of a shape on hardware without a measurement: the roofline.

A prefill is bound by arithmetic, a decode step by memory. Both are scaled by the share of the peak
that well-made kernels reach; the defaults are those at which the roofline meets the measured
A100 profile (see the tests for how near it comes).
"""

from __future__ import annotations

import msgspec

from snowskin.cost.costs import DecodeCost, LinkCost, PrefillCost
from snowskin.cost.profile import Profile
from snowskin.cost.shapes import ModelShape


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node: its devices together, and the roads into it."""

    name: str
    devices: int
    device_flops_per_s: float
    device_memory_bytes_per_s: float
    host_to_device_bytes_per_s: float
    network_bytes_per_s: float

    @property
    def flops_per_s(self) -> float:
        """Peak arithmetic of the node (FAST's G)."""
        return self.devices * self.device_flops_per_s

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak memory bandwidth of the node's devices together."""
        return self.devices * self.device_memory_bytes_per_s


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a800_tp8", 8, 312e12, 2039e9, 128e9, 100e9),
        Hardware("h800_tp8", 8, 989e12, 3350e9, 128e9, 100e9),
    )
}
"""Source: FAST '25 §3 and Table 1, and the vendor's data sheets for the memory bandwidth."""

PREFILL_EFFICIENCY = 0.55
DECODE_EFFICIENCY = 0.55
STEP_OVERHEAD_S = 2e-3
"""Launches and collectives of one pass. Our choice, because small models are bound by it."""


def roofline(
    shape: ModelShape,
    hardware: Hardware,
    *,
    prefill_efficiency: float = PREFILL_EFFICIENCY,
    decode_efficiency: float = DECODE_EFFICIENCY,
) -> Profile:
    """A profile from first principles.

    Args:
        prefill_efficiency: share of peak arithmetic that a prefill reaches, 0–1.
        decode_efficiency: share of peak memory bandwidth that a decode step reaches, 0–1.
    """
    flops_per_s = hardware.flops_per_s * prefill_efficiency
    memory_bytes_per_s = hardware.memory_bytes_per_s * decode_efficiency
    attention_flops = 2.0 * shape.layers * shape.query_heads * shape.head_dim
    prefill = PrefillCost(
        base_s=STEP_OVERHEAD_S + shape.weight_bytes / memory_bytes_per_s,
        token_s=2.0 * shape.layers * shape.layer_weights / flops_per_s,
        token_pair_s=attention_flops / flops_per_s,
        reused_token_s=shape.kv_bytes_per_token / hardware.host_to_device_bytes_per_s,
    )
    decode = DecodeCost(
        base_s=STEP_OVERHEAD_S + shape.weight_bytes / memory_bytes_per_s,
        sequence_s=2.0 * shape.weight_count / flops_per_s,
        context_token_s=shape.kv_bytes_per_token / memory_bytes_per_s,
    )
    return Profile(
        name=f"{shape.name}@{hardware.name}",
        model=shape.name,
        hardware=hardware.name,
        source=(
            f"roofline: {prefill_efficiency:.0%} of peak arithmetic, "
            f"{decode_efficiency:.0%} of peak memory bandwidth"
        ),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        prefill=prefill,
        decode=decode,
        transfer=LinkCost(1e-3, hardware.network_bytes_per_s),
        load=LinkCost(1e-3, hardware.host_to_device_bytes_per_s),
    )
