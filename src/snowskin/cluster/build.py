"""Puts a node's parts together: model, segment, Messenger, transfer engine, engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snowskin.cluster import messages as m
from snowskin.cluster.config import NodeConfig
from snowskin.cluster.node import Node, Worker
from snowskin.engine.model import Model, ModelInfo, inspect_model
from snowskin.store.blocks import BlockStore
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import Role
from snowskin.transfer.engine import TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess


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


class BuiltNode:
    """All parts of one node but the control wire, ready to work."""

    def __init__(self, config: NodeConfig) -> None:
        import torch

        torch.set_num_threads(config.threads)
        self._config = config
        info = inspect_model(Path(config.model_dir), dtype=config.dtype, device=config.device)
        layout = segment_layout(
            info, block_tokens=config.key_space.block_tokens, dram_bytes=config.dram_bytes
        )
        self._segment = Segment.create(layout)
        self._messenger = MessengerProcess.start(
            self._segment, node=config.node, host=config.host, cluster_key=config.cluster_key
        )
        self.store = BlockStore(self._segment, node=config.node)
        self.transfer = TransferEngine(
            self._segment, transport=config.transport, cluster_key=config.cluster_key
        )
        self._model = Model.load(info)
        self.ready = m.NodeReady(
            node=config.node,
            role=config.role,
            peer=self._messenger.peer,
            block_count=layout.slot_count,
            sequence_limit=config.sequence_limit,
            device_tokens=config.device_tokens,
        )

    def worker(self, node: Node) -> Worker:
        """The part that differs by role."""
        build = {Role.PREFILL: self._prefill_worker, Role.DECODE: self._decode_worker}
        return build[self._config.role](node.say, node.wake_engine)

    def messenger_alive(self) -> bool:
        """False once the Messenger has died: peers can no longer read here."""
        return self._messenger.alive()

    def close(self) -> None:
        """End the Messenger and let go of the segment."""
        self.transfer.close()
        self._messenger.stop()
        self._segment.close()

    def _prefill_worker(self, say: Callable[..., None], wake_engine: Callable[[], None]) -> Worker:
        from snowskin.cluster.prefill_node import PrefillWorker
        from snowskin.engine.prefill import PrefillConfig, PrefillEngine

        config = self._config
        engine = PrefillEngine(
            self._model,
            self.store,
            PrefillConfig(
                key_space=config.key_space,
                chunk_tokens=config.chunk_tokens,
                device_tokens=config.device_tokens,
                sequence_limit=config.sequence_limit,
            ),
        )
        return PrefillWorker(
            config.node,
            engine=engine,
            store=self.store,
            transfer=self.transfer,
            say=say,
            wake_engine=wake_engine,
        )

    def _decode_worker(self, say: Callable[..., None], wake_engine: Callable[[], None]) -> Worker:
        from snowskin.cluster.decode_node import DecodeWorker
        from snowskin.engine.decode import DecodeConfig, DecodeEngine

        config = self._config
        engine = DecodeEngine(
            self._model,
            self.store,
            DecodeConfig(
                key_space=config.key_space,
                device_tokens=config.device_tokens,
                sequence_limit=config.sequence_limit,
            ),
        )
        return DecodeWorker(
            config.node,
            engine=engine,
            store=self.store,
            transfer=self.transfer,
            say=say,
            wake_engine=wake_engine,
        )
