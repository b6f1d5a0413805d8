"""What may be set about transfers."""

from __future__ import annotations

import msgspec

from snowskin.terms.errors import InvalidInput
from snowskin.transfer.slicing import BATCH_LEAST_BYTES, SLICE_BYTES


class TransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How pulls are cut up and how long a path may keep us waiting.

    Args:
        slice_bytes: the least piece that is assigned to a path and retried.
        connections_per_path: a pull uses at most so many connections over one path at once.
        stripe_least_bytes: no further connection is used for less than so much.
        stall_s: a path that is silent for so long is cut off if there is another one. The last
            path left is waited for up to 10 s.

    Raises:
        InvalidInput: a value out of its range.
    """

    slice_bytes: int = SLICE_BYTES
    connections_per_path: int = 1
    stripe_least_bytes: int = BATCH_LEAST_BYTES
    stall_s: float = 1.0

    def __post_init__(self) -> None:
        if not 4096 <= self.slice_bytes <= 1 << 30:
            raise InvalidInput(
                f"slice_bytes is {self.slice_bytes}; choose from 4096 to {1 << 30}",
                parameter="slice_bytes",
            )
        if not 1 <= self.connections_per_path <= 16:
            raise InvalidInput(
                f"connections_per_path is {self.connections_per_path}; choose from 1 to 16",
                parameter="connections_per_path",
            )
        if self.stripe_least_bytes < 1:
            raise InvalidInput(
                f"stripe_least_bytes is {self.stripe_least_bytes}; it must be at least 1",
                parameter="stripe_least_bytes",
            )
        if not 0.3 <= self.stall_s <= 3600:
            raise InvalidInput(
                f"stall_s is {self.stall_s}; choose from 0.3 (a peer shows life each 0.25 s) "
                "to 3600",
                parameter="stall_s",
            )
