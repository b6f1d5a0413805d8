"""``snowskin trace …``: describe, make up and record traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from snowskin.cli.asking import DEFAULT_URL, ask
from snowskin.terms.errors import InvalidInput, SnowskinError
from snowskin.trace.shapes import SHAPES, Arrivals, Shape, fixed_shape, shape_named

if TYPE_CHECKING:
    from snowskin.trace.describe import TraceSummary

app = typer.Typer(no_args_is_help=True, help="Describe, make up and record request traces.")


@app.command("describe")
def describe_command(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, Azure CSV or our own JSONL.")],
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a PNG to this file.")] = None,
) -> None:
    """Lengths, rate and sharing of a trace, each by a stated definition."""
    from rich.console import Console

    from snowskin.trace.describe import describe
    from snowskin.trace.formats import read_trace

    read = read_trace(trace)
    summary = describe(read)
    Console().print(_table(summary))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(summary.to_json())) + b"\n")
    if picture is not None:
        from snowskin.trace.picture import draw_trace

        draw_trace(read, summary, picture)


def _table(summary: TraceSummary) -> object:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(summary.name), show_header=False)
    table.add_row("requests", f"{summary.requests:,}")
    table.add_row("duration", f"{summary.duration_s:,.1f} s")
    table.add_row(
        "rate", f"{summary.rate_per_s:.3f} requests/s (gaps' cv {summary.arrival_cv:.2f})"
    )
    for name, lengths in (
        ("prompt tokens", summary.prompt_tokens),
        ("output tokens", summary.output_tokens),
    ):
        table.add_row(
            name,
            f"mean {lengths.mean:,.0f}, p50 {lengths.p50:,.0f}, p90 {lengths.p90:,.0f}, "
            f"p99 {lengths.p99:,.0f}, max {lengths.max:,}",
        )
    table.add_row("block", f"{summary.block_tokens} tokens")
    if not summary.sharing_known:
        table.add_row("sharing", "the source does not tell")
        return table
    table.add_row("blocks", f"{summary.blocks:,}, of them {summary.distinct_blocks:,} different")
    for name in ("hit_ratio_blocks", "hit_ratio_tokens", "hit_ratio_requests", "reusing_ratio"):
        table.add_row(f"{name}\n[dim]{summary.definitions[name]}", f"{getattr(summary, name):.4f}")
    return table


@app.command("synthesise")
def synthesise_command(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    shape: Annotated[
        str, typer.Option(help=f"{', '.join(SHAPES)}, or fixed:PROMPT:OUTPUT[:CACHE_RATIO].")
    ] = "conversation",
    requests: Annotated[int | None, typer.Option(help="How many; default: as published.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean requests a second.")] = None,
    arrivals: Annotated[Arrivals | None, typer.Option(help="How arrivals are spaced.")] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    seed: Annotated[int, typer.Option(help="The same seed, the same file.")] = 0,
    format: Annotated[str, typer.Option(help="own or mooncake (blocks of 512).")] = "own",
) -> None:
    """Draw a trace with the statistics of a published workload; written while it is drawn."""
    from rich.console import Console

    from snowskin.trace.formats import MOONCAKE_BLOCK_TOKENS, write_mooncake, write_trace
    from snowskin.trace.synthesise import synthesise

    chosen = _changed(_parse_shape(shape), requests, rate, arrivals)
    if format not in ("own", "mooncake"):
        raise InvalidInput(f"format is own or mooncake, not {format!r}", parameter="format")
    if format == "mooncake" and block_tokens != MOONCAKE_BLOCK_TOKENS:
        raise InvalidInput(
            f"the mooncake format has blocks of {MOONCAKE_BLOCK_TOKENS} tokens, not {block_tokens}",
            parameter="block-tokens",
        )
    if 0 < chosen.cache_ratio * chosen.prompt_tokens < block_tokens and shape.startswith("fixed:"):
        remedy = "a longer PROMPT" if format == "mooncake" else "fewer --block-tokens"
        typer.secho(
            f"warning: {chosen.cache_ratio:g} of {chosen.prompt_tokens:g} tokens is less than a "
            f"block of {block_tokens}, and only full blocks are shared; give {remedy}",
            fg=typer.colors.YELLOW,
            err=True,
        )
    drawn = synthesise(chosen, seed=seed, block_tokens=block_tokens)
    if format == "mooncake":
        count = write_mooncake(out, drawn)
    else:
        count = write_trace(out, drawn, block_tokens=block_tokens, name=chosen.name)
    Console().print(f"{_count(count)} of shape {chosen.name} in {out}", soft_wrap=True)


@app.command("record")
def record_command(
    out: Annotated[Path, typer.Argument(help="The new file to write.")],
    url: Annotated[str, typer.Option(help="Of the API.", envvar="SNOWSKIN_URL")] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="SNOWSKIN_API_KEY", help="If the API wants one.")
    ] = None,
) -> None:
    """Write what a running server remembers, its last 10,000 requests or so, as a trace.

    Lengths, arrivals and sharing; no text. For all that is served, start `snowskin serve --record`.
    """
    from rich.console import Console

    from snowskin.cli.recording import Recording
    from snowskin.terms.serving import ServedPage
    from snowskin.trace.record import TraceRecorder

    def served(after: int) -> ServedPage:
        body = ask(f"{url.rstrip('/')}/snowskin/requests?after={after}", api_key)
        try:
            return msgspec.json.decode(body, type=ServedPage)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"what answers at {url} is no snowskin server: {error}") from error

    first = served(0)
    if not first.requests:
        raise InvalidInput(f"{url} has not answered any request yet; there is nothing to record")
    name = f"{first.model} live"
    with TraceRecorder(out, block_tokens=first.block_tokens, name=name) as recorder:
        recording = Recording(recorder, served, start=first.start)
        try:
            recording.catch_up()
        except OSError as error:
            raise SnowskinError(
                f"{out} ends with request {recorder.count}: {error.strerror}"
            ) from error
    older = f"; {recording.lost:,} older ones were forgotten" if recording.lost else ""
    told = f"{_count(recorder.count)} in {out}{older}"
    Console().print(told, soft_wrap=True, highlight=False)


def _parse_shape(text: str) -> Shape:
    if not text.startswith("fixed:"):
        return shape_named(text)
    parts = text.split(":")[1:]
    try:
        prompt, output, *rest = parts
        cache_ratio = float(rest[0]) if rest else 0.0
        return fixed_shape(int(prompt), int(output), cache_ratio=cache_ratio)
    except ValueError:
        raise InvalidInput(
            f"expected fixed:PROMPT:OUTPUT[:CACHE_RATIO], got {text!r}", parameter="shape"
        ) from None


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests:,} requests"


def _changed(
    shape: Shape, requests: int | None, rate: float | None, arrivals: Arrivals | None
) -> Shape:
    if requests is not None and requests < 1:
        raise InvalidInput(f"requests must be at least 1, got {requests}", parameter="requests")
    if rate is not None and not rate > 0:
        raise InvalidInput(f"rate must be above 0, got {rate}", parameter="rate")
    return msgspec.structs.replace(
        shape,
        requests=requests or shape.requests,
        rate_per_s=rate or shape.rate_per_s,
        arrivals=arrivals or shape.arrivals,
    )
