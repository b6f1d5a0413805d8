"""``snowskin explain``: why a request went where it went, and what it really cost."""

from __future__ import annotations

import math
import urllib.parse
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, JustifyMethod
from rich.table import Table

from snowskin.cli.asking import DEFAULT_URL, ask

if TYPE_CHECKING:
    from snowskin.terms.commands import DecodeCandidate, PrefillCandidate
    from snowskin.terms.serving import Explanation


def explain(
    request_id: Annotated[str, typer.Argument(help="From the response header x-request-id.")],
    url: Annotated[str, typer.Option(help="Of the API.", envvar="SNOWSKIN_URL")] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="SNOWSKIN_API_KEY", help="If the API wants one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Tell where a request went, why, and what was predicted beside what came true."""
    body = ask(
        f"{url.rstrip('/')}/snowskin/explain/{urllib.parse.quote(request_id, safe='')}", api_key
    )
    if as_json:
        typer.echo(body.decode())
        return
    _show(_explanation(body), Console())


def _explanation(body: bytes) -> Explanation:
    """As sent. JSON knows no infinity: what was never predicted, as of a full queue, is null."""
    from snowskin.terms.serving import Explanation

    told = msgspec.json.decode(body)
    for name in ("ttft_s", "tbt_s"):
        if told["decision"][name] is None:
            told["decision"][name] = math.inf
    return msgspec.convert(told, Explanation)


def _show(told: Explanation, console: Console) -> None:
    decision = told.decision
    console.print(
        f"[bold]{told.request}[/bold] {told.state}: {told.prompt_tokens} prompt tokens, "
        f"{told.output_tokens} generated"
    )
    console.print(f"{decision.policy}: {decision.reason}\n")
    console.print(_prefill_table(told))
    console.print(_decode_table(told))
    console.print(_truth_table(told))
    if told.failure is not None:
        console.print(f"[red]{told.failure}[/red]")


def _prefill_table(told: Explanation) -> Table:
    table = Table(title="prefill candidates (prefixes in tokens, predicted)", title_justify="left")
    for column in ("node", "holds", "reuses", "from", "fetch", "queue", "prefill", "TTFT"):
        justify: JustifyMethod = "left" if column in ("node", "from") else "right"
        table.add_column(column, justify=justify, no_wrap=True)

    def add(candidate: PrefillCandidate) -> None:
        chosen = candidate.node == told.prefill
        table.add_row(
            candidate.node,
            str(candidate.local_blocks * told.block_tokens),
            str(candidate.reused_blocks * told.block_tokens),
            candidate.fetch_from or "–",
            *map(
                _seconds,
                (candidate.transfer_s, candidate.queue_s, candidate.prefill_s, candidate.ttft_s),
            ),
            style="bold green" if chosen else None,
        )

    for candidate in told.decision.prefill:
        add(candidate)
    return table


def _decode_table(told: Explanation) -> Table:
    table = Table(title="decode candidates (with it, predicted)", title_justify="left")
    table.add_column("node", no_wrap=True)
    for column in ("sequences", "context", "step"):
        table.add_column(column, justify="right")

    def add(candidate: DecodeCandidate) -> None:
        table.add_row(
            candidate.node,
            str(candidate.sequences),
            f"{candidate.context_tokens} tokens",
            _seconds(candidate.tbt_s),
            style="bold green" if candidate.node == told.decode else None,
        )

    for candidate in told.decision.decode:
        add(candidate)
    return table


def _truth_table(told: Explanation) -> Table:
    table = Table(title="what came true", title_justify="left", show_header=True)
    for column in ("", "predicted", "real"):
        table.add_column(column, justify="right" if column else "left")
    chosen = next((c for c in told.decision.prefill if c.node == told.prefill), None)
    reused = None if chosen is None else f"{chosen.reused_blocks * told.block_tokens} tokens"
    real_reused = None if told.cached_tokens is None else f"{told.cached_tokens} tokens"
    table.add_row("prefix reused", reused or "–", real_reused or "–")
    rows = (
        ("fetch", None if chosen is None else chosen.transfer_s, told.fetch_s),
        ("queue", None if chosen is None else chosen.queue_s, told.queue_s),
        ("prefill", None if chosen is None else chosen.prefill_s, told.prefill_s),
        ("TTFT", told.decision.ttft_s, told.ttft_s),
        ("KV to the decode node", None, told.kv_transfer_s),
        ("decode step", told.decision.tbt_s, None),
        ("TBT (longest 10 %)", None, told.tbt_s),
    )
    for name, predicted, real in rows:
        table.add_row(name, _seconds(predicted), _seconds(real))
    return table


def _seconds(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
