"""``snowskin bench serve`` and ``engine``: what a running server, and a model alone, give."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from snowskin.measure.latency import intervals_s, mean, percentile, tbt_s
from snowskin.terms.errors import InvalidInput, SnowskinError

TIMEOUT_S = 600.0
ANY_VOCABULARY = 256
"""Every model's vocabulary has so many tokens."""


class ServeRow(msgspec.Struct, frozen=True):
    """What came of some requests of one kind. Times in seconds."""

    name: str
    requests: int
    concurrency: int
    prompt_tokens: int
    cached_tokens_mean: float
    ttft_p50_s: float
    ttft_p90_s: float
    tbt_p50_s: float | None
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    ttft_s: float
    tbt_s: float | None
    output_tokens: int
    cached_tokens: int


class _Target:
    """A server, and how to ask it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def complete(self, tokens: Sequence[int], output_tokens: int) -> _Answer:
        """One streamed, greedy completion of a prompt of token ids."""
        import http.client
        import urllib.error
        import urllib.request

        body = {
            "prompt": list(tokens),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        address = f"{self._url}/v1/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), self._headers)
        begin_s = time.perf_counter()
        times_s: list[float] = []
        usage = None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise SnowskinError(f"{address}: {chunk['error']['message']}")
                    if chunk["choices"]:
                        times_s.append(time.perf_counter() - begin_s)
                    usage = chunk.get("usage") or usage
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            raise SnowskinError(f"{address} answered {error.code}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SnowskinError(f"no answer from {address}: {error}; give --url") from error
        if not times_s or usage is None:
            raise SnowskinError(f"{address} sent no tokens; is it a Snowskin server?")
        return _Answer(
            ttft_s=times_s[0],
            tbt_s=tbt_s(intervals_s(times_s)),
            output_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )


def serve_command(
    url: Annotated[
        str, typer.Option(help="Of a running server.", envvar="SNOWSKIN_URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="If the API wants one.", envvar="SNOWSKIN_API_KEY")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 1000,
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(help="Pairs of a cold and a warm prompt.")] = 5,
    concurrency: Annotated[int, typer.Option(help="Streams at once, in the last rows.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Of the prompts; default: new ones.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time to first token of new and repeated prompts, and the rate of many streams at once."""
    for option, value, least in (
        ("--prompt-tokens", prompt_tokens, 2),
        ("--output-tokens", output_tokens, 2),
        ("--rounds", rounds, 1),
        ("--concurrency", concurrency, 1),
    ):
        if value < least:
            raise InvalidInput(f"{option} {value}: give at least {least}", parameter=option)
    target = _Target(url, api_key)
    rng = random.Random(seed)
    prompts = [_prompt(rng, prompt_tokens) for _ in range(rounds + concurrency)]
    alone, together = prompts[:rounds], prompts[rounds:]
    typer.echo("kind               streams  cached  TTFT p50 s  p90 s   TBT p50 ms  tokens/s")
    cold: list[_Answer] = []
    warm: list[_Answer] = []
    cold_s = warm_s = 0.0
    for prompt in alone:
        # In turn, so that both meet the same machine.
        took_s, answers = _timed(target, [prompt], output_tokens)
        cold, cold_s = cold + answers, cold_s + took_s
        took_s, answers = _timed(target, [prompt], output_tokens)
        warm, warm_s = warm + answers, warm_s + took_s
    rows = [
        _tell(_row("new prompts", cold, 1, prompt_tokens, cold_s)),
        _tell(_row("repeated prompts", warm, 1, prompt_tokens, warm_s)),
    ]
    for name in ("new, at once", "repeated, at once"):
        took_s, answers = _timed(target, together, output_tokens)
        rows.append(_tell(_row(name, answers, concurrency, prompt_tokens, took_s)))
    typer.echo(f"repeated/new TTFT: {rows[1].ttft_p50_s / rows[0].ttft_p50_s:.3f}")
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def engine_command(
    model: Annotated[str, typer.Option(help="A model folder, or smollm2.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: all cores.")] = 0,
    budget: Annotated[float, typer.Option(help="Seconds to measure for, about.")] = 20.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the samples here.")
    ] = None,
) -> None:
    """Prefills and decode steps of a model alone, point by point."""
    import os

    from snowskin.cluster.config import YIELDING_THREADS, ServeConfig

    if not budget >= 0:
        raise InvalidInput(f"--budget {budget:g}: give seconds, 0 or more", parameter="--budget")
    for name, value in YIELDING_THREADS.items():
        os.environ.setdefault(name, value)
    config = ServeConfig(model=model, dtype=dtype, device=device, threads=threads)
    from snowskin.cluster.prepare import prepare_model
    from snowskin.cluster.profiling import measure_model

    measured = measure_model(config, prepare_model(config), budget_s=budget)
    typer.echo("prefill: prompt  reused       s   computed tokens/s")
    for p in measured.prefill:
        rate = (p.prompt_tokens - p.reused_tokens) / p.prefill_s
        typer.echo(f"{p.prompt_tokens:15,} {p.reused_tokens:7,} {p.prefill_s:7.4f} {rate:12,.0f}")
    typer.echo("decode: sequences  context   step s   tokens/s")
    for d in measured.decode:
        rate = d.sequences / d.step_s
        typer.echo(f"{d.sequences:17,} {d.context_tokens:8,} {d.step_s:8.4f} {rate:10,.0f}")
    if json_file is not None:
        rows = {"prefill": measured.prefill, "decode": measured.decode}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(ANY_VOCABULARY) for _ in range(tokens)]


def _timed(
    target: _Target, prompts: Sequence[Sequence[int]], output_tokens: int
) -> tuple[float, list[_Answer]]:
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: target.complete(prompt, output_tokens), prompts))
    return time.perf_counter() - begin_s, answers


def _row(
    name: str, answers: Sequence[_Answer], concurrency: int, prompt_tokens: int, took_s: float
) -> ServeRow:
    ttfts_s = [answer.ttft_s for answer in answers]
    p50_s, p90_s = percentile(ttfts_s, 50), percentile(ttfts_s, 90)
    assert p50_s is not None
    assert p90_s is not None
    return ServeRow(
        name=name,
        requests=len(answers),
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        cached_tokens_mean=mean([answer.cached_tokens for answer in answers]) or 0.0,
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        tbt_p50_s=percentile([a.tbt_s for a in answers if a.tbt_s is not None], 50),
        output_tokens_per_s=sum(answer.output_tokens for answer in answers) / took_s,
    )


def _tell(row: ServeRow) -> ServeRow:
    tbt = "–" if row.tbt_p50_s is None else f"{row.tbt_p50_s * 1000:.1f}"
    typer.echo(
        f"{row.name:18} {row.concurrency:7} {row.cached_tokens_mean:7.0f} {row.ttft_p50_s:11.3f} "
        f"{row.ttft_p90_s:6.3f} {tbt:>12} {row.output_tokens_per_s:9.1f}"
    )
    return row
