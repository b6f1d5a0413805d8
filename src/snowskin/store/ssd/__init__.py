"""The SSD tier of a node, see ``tier``."""

from snowskin.store.ssd.answers import (
    WRITE_RETRY_S,
    Flushed,
    HeldValue,
    Hit,
    Miss,
    MissReason,
    SsdStat,
    Value,
    WriteOutcome,
)
from snowskin.store.ssd.config import SsdConfig, Sync
from snowskin.store.ssd.tier import SsdTier

__all__ = [
    "WRITE_RETRY_S",
    "Flushed",
    "HeldValue",
    "Hit",
    "Miss",
    "MissReason",
    "SsdConfig",
    "SsdStat",
    "SsdTier",
    "Sync",
    "Value",
    "WriteOutcome",
]
