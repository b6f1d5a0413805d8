"""``snowskin serve``: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from snowskin.cli.sizes import parse_bytes
from snowskin.terms.errors import InvalidInput

LOG_LEVELS = ("debug", "info", "warning", "error")
_PLACEMENT, _ENGINE, _NETWORK = "Placement", "Engine", "Network"


def serve(
    model: Annotated[
        str, typer.Option(help="A Hugging Face model folder, or smollm2 (comes with Snowskin).")
    ] = "smollm2",
    prefill: Annotated[int, typer.Option(help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode nodes.")] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help="Where prefill goes: kvcache-centric, cache-aware, load-balance or random.",
            rich_help_panel=_PLACEMENT,
        ),
    ] = "kvcache-centric",
    admission: Annotated[
        str,
        typer.Option(
            help="Who gets 429 where the SLOs cannot be kept: none, baseline, early or predicted. "
            "Full queues answer 429 whatever this says.",
            rich_help_panel=_PLACEMENT,
        ),
    ] = "none",
    ttft_slo: Annotated[
        float, typer.Option(help="Seconds to the first token.", rich_help_panel=_PLACEMENT)
    ] = 30.0,
    tbt_slo: Annotated[
        float, typer.Option(help="Seconds between tokens.", rich_help_panel=_PLACEMENT)
    ] = 0.3,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests at once; more get 429.", rich_help_panel=_PLACEMENT)
    ] = 512,
    dtype: Annotated[
        str, typer.Option(help="auto, fp32 or bf16.", rich_help_panel=_ENGINE)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)
    ] = "auto",
    threads: Annotated[
        int, typer.Option(help="CPU threads of each node; 0: all cores.", rich_help_panel=_ENGINE)
    ] = 0,
    dram: Annotated[
        str, typer.Option(help="KV pool of each node, e.g. 2GiB.", rich_help_panel=_ENGINE)
    ] = "1GiB",
    device_tokens: Annotated[
        int,
        typer.Option(help="KV that a node's batch holds, in tokens.", rich_help_panel=_ENGINE),
    ] = 131072,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of one KV block.", rich_help_panel=_ENGINE)
    ] = 32,
    chunk_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of one prefill pass.", rich_help_panel=_ENGINE)
    ] = 512,
    sequences: Annotated[
        int, typer.Option(help="Sequences that a node runs at once.", rich_help_panel=_ENGINE)
    ] = 64,
    host: Annotated[
        str, typer.Option(help="Address of the API.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.", rich_help_panel=_NETWORK)] = 8000,
    node_host: Annotated[
        str, typer.Option(help="Address of the nodes.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    transport: Annotated[
        str, typer.Option(help="How KV travels: auto, shm, tcp or nixl.", rich_help_panel=_NETWORK)
    ] = "auto",
    slice_bytes: Annotated[
        int,
        typer.Option(help="Piece of a TCP transfer tried on one path.", rich_help_panel=_NETWORK),
    ] = 65536,
    topology: Annotated[
        str | None,
        typer.Option(
            help='JSON file like {"cpu:0": [["eth0"], ["eth1"]]}: preferred NICs, others.',
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SNOWSKIN_API_KEY",
            help="Clients must send it as a bearer token.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    cluster_key: Annotated[
        str | None,
        typer.Option(
            envvar="SNOWSKIN_CLUSTER_KEY",
            help="Nodes must know it; random where not given.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            help="Record every event and decision in this file.", rich_help_panel=_PLACEMENT
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record what is served in this new file, as a trace: lengths and sharing, no "
            "text. `snowskin simulate --trace` replays it.",
            rich_help_panel=_PLACEMENT,
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_NETWORK)
    ] = "info",
) -> None:
    """Serve a model behind an OpenAI-compatible API, with separate prefill and decode nodes.

    Then point any OpenAI client at http://localhost:8000/v1, or open /docs there.
    """
    from snowskin.cli.server import run_server
    from snowskin.cluster.config import ServeConfig

    if log_level not in LOG_LEVELS:
        raise InvalidInput(
            f"--log-level {log_level}: give {', '.join(LOG_LEVELS)}", parameter="--log-level"
        )
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    config = ServeConfig(
        model=model,
        dtype=dtype,
        device=device,
        prefill_nodes=prefill,
        decode_nodes=decode,
        policy=policy,
        admission=admission,
        ttft_slo_s=ttft_slo,
        tbt_slo_s=tbt_slo,
        host=host,
        port=port,
        node_host=node_host,
        api_key=api_key,
        cluster_key=cluster_key,
        transport=transport,
        slice_bytes=slice_bytes,
        topology=topology,
        block_tokens=block_tokens,
        dram_bytes=parse_bytes(dram, option="--dram"),
        device_tokens=device_tokens,
        chunk_tokens=chunk_tokens,
        sequence_limit=sequences,
        max_in_flight=max_in_flight,
        threads=threads,
        journal=journal,
    )
    run_server(config, record=record)
