"""A node's parts: model, segment, Messenger, transfer engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snowskin.cluster import messages as m
from snowskin.cluster.config import NodeConfig
from snowskin.engine.model import Model, ModelInfo, inspect_model
from snowskin.store.blocks import BlockStore
from snowskin.terms.errors import InvalidInput
from snowskin.transfer.engine import TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess
from snowskin.transfer.nics import read_topology
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.topology import LocalNic

SEGMENT_LOCATION = "cpu:0"
"""Where a topology file has a node's segment. Our choice: segments are not bound to NUMA nodes."""


def segment_layout(info: ModelInfo, *, block_tokens: int, dram_bytes: int) -> SegmentLayout:
    """As many blocks as fit ``dram_bytes``.

    Raises:
        InvalidInput: not one block fits.
    """
    block_bytes = info.kv_bytes_per_token * block_tokens
    if dram_bytes < block_bytes:
        raise InvalidInput(
            f"--dram {dram_bytes} bytes hold no block: one of {block_tokens} tokens takes "
            f"{block_bytes} bytes with this model",
            parameter="--dram",
        )
    return SegmentLayout(
        slot_count=dram_bytes // block_bytes, slot_bytes=block_bytes, part_count=info.layers
    )


def segment_nics(topology: str | None) -> Sequence[LocalNic]:
    """The addresses that serve a segment by a topology file; none where there is no file.

    Raises:
        InvalidInput: the file cannot be read, or is no topology.
    """
    return () if topology is None else read_topology(Path(topology)).nics(SEGMENT_LOCATION)


class NodeParts:
    """What every node is made of, whatever its role. Making one loads the model."""

    def __init__(self, config: NodeConfig) -> None:
        import torch

        torch.set_num_threads(config.threads)
        info = inspect_model(Path(config.model_dir), dtype=config.dtype, device=config.device)
        layout = segment_layout(
            info, block_tokens=config.key_space.block_tokens, dram_bytes=config.dram_bytes
        )
        self._segment = Segment.create(layout)
        nics = segment_nics(config.topology)
        self.messenger = MessengerProcess.start(
            self._segment,
            node=config.node,
            host=config.host,
            cluster_key=config.cluster_key,
            nics=nics,
            nixl=config.transport == "nixl",
        )
        self.store = BlockStore(self._segment, node=config.node)
        self.transfer = TransferEngine(
            self._segment,
            transport=config.transport,
            cluster_key=config.cluster_key,
            settings=TransferSettings(slice_bytes=config.slice_bytes),
            nics=nics,
        )
        self.model = Model.load(info)
        self.ready = m.NodeReady(
            node=config.node,
            role=config.role,
            peer=self.messenger.peer,
            block_count=layout.slot_count,
            sequence_limit=config.sequence_limit,
            device_tokens=config.device_tokens,
        )

    def close(self) -> None:
        """End the Messenger and let go of the segment."""
        self.transfer.close()
        self.messenger.stop()
        self._segment.close()
