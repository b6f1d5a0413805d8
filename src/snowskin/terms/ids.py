"""Who and where: the names of nodes, requests, blocks, roles and tiers."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

NodeId = NewType("NodeId", str)
"""A node of the cluster, e.g. ``prefill-0``; a restarted node keeps its name."""

RequestId = NewType("RequestId", str)
"""One generation as the client knows it, e.g. ``req-4f0c…``."""

StartId = NewType("StartId", str)
"""One start of a server: the next one has another."""

BlockKey = NewType("BlockKey", bytes)
"""The 16 bytes that name a block's content and everything before it (see ``terms.keys``)."""

SlotIndex = NewType("SlotIndex", int)
"""An entry of a node's segment: one block's place in its DRAM."""


class Role(StrEnum):
    """What a node computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Tier(StrEnum):
    """Where in a node a replica lies."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"
