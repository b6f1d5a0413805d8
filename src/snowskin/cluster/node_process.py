"""The process of one node, from its first instruction to its last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from snowskin.cluster.config import NodeConfig
from snowskin.cluster.decode_node import DecodeWorker
from snowskin.cluster.node import STOP_GRACE_S, Node, Worker
from snowskin.cluster.parts import NodeParts
from snowskin.cluster.prefill_node import PrefillWorker
from snowskin.cluster.wire import NodeWire
from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import Role
from snowskin.transfer.child import Parent

log = logging.getLogger("snowskin.node")

WORKERS: dict[Role, Callable[[Node], Worker]] = {
    Role.PREFILL: PrefillWorker,
    Role.DECODE: DecodeWorker,
}


async def serve_node(config: NodeConfig, parent: Parent) -> None:
    """Load the model, then serve until the front goes or says so."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    parent.watch(partial(loop.call_soon_threadsafe, stop.set), grace_s=STOP_GRACE_S)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    parts = await asyncio.to_thread(NodeParts, config)
    wire = NodeWire(
        address=config.front_address, identity=config.identity, cluster_key=config.cluster_key
    )
    try:
        node = Node(config, parts, wire, stop)
        await node.run(WORKERS[config.role](node), parts.ready)
    finally:
        wire.close()
        parts.close()


def main() -> None:
    """The entry point of a node process."""
    parent = Parent()
    config = parent.hear(NodeConfig)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {config.node} %(levelname)s %(message)s"
    )
    try:
        asyncio.run(serve_node(config, parent))
    except SnowskinError as error:
        log.error("%s", error)
        sys.exit(1)
    except Exception as error:
        # Taking the interpreter apart takes seconds, in which the node would seem to live.
        log.critical("it cannot go on", exc_info=error)
        os._exit(1)
    # Everything is closed; taking torch apart in order would only cost seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
