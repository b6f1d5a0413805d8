from pathlib import Path

import pytest
import torch

from snowskin.engine.model import Model, inspect_model
from snowskin.engine.probe import ProbeLimits, ProbeResult, probe
from tests.engine import tiny


class _Ticks:
    """A clock that each reading moves on by the same step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self._step_s
        return self._now_s


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return Model.load(inspect_model(directory, dtype="fp32", device="cpu"))


def _points(result: ProbeResult) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return (
        [(sample.prompt_tokens, sample.reused_tokens) for sample in result.prefill],
        [(sample.sequences, sample.context_tokens) for sample in result.decode],
    )


def test_without_a_budget_only_what_determines_the_costs_is_timed(model: Model) -> None:
    result = probe(model, ProbeLimits(budget_s=0.0))

    prefills, decodes = _points(result)
    assert prefills == [(64, 0), (64, 32), (64, 56), (128, 0), (128, 64), (128, 112)]
    assert decodes == [(1, 32), (1, 256), (4, 128), (4, 1024)]
    assert all(sample.prefill_s > 0 for sample in result.prefill)
    assert all(sample.step_s > 0 for sample in result.decode)
    assert result.wall_s >= sum(sample.prefill_s for sample in result.prefill)


def test_a_larger_budget_times_more_of_the_same_points(model: Model) -> None:
    small = probe(model, ProbeLimits(budget_s=40.0), clock=_Ticks(1.0))
    large = probe(model, ProbeLimits(budget_s=400.0), clock=_Ticks(1.0))

    for fewer, more in zip(_points(small), _points(large), strict=True):
        assert more[: len(fewer)] == fewer
        assert len(more) > len(fewer)


def test_all_points_keep_within_the_limits_and_the_context(model: Model) -> None:
    token_bytes = model.info.kv_bytes_per_token
    limits = ProbeLimits(
        budget_s=1e6, chunk_tokens=96, sequences=8, prompt_tokens=9999, kv_bytes=2000 * token_bytes
    )

    prefills, decodes = _points(probe(model, limits, clock=_Ticks(1e-6)))

    assert prefills[-1] == (1024, 896)
    assert len(set(prefills)) == len(prefills)
    assert len(set(decodes)) == len(decodes)
    assert max(sequences for sequences, _ in decodes) == 8
    assert all(sequences + context <= 2000 for sequences, context in decodes)
    assert max(context // sequences for sequences, context in decodes) == 1023


def test_a_model_of_a_very_short_context_is_timed_too(directory: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.mkdir()
    for path in directory.iterdir():
        (short / path.name).write_bytes(path.read_bytes())
    tiny.edit_config(short, max_position_embeddings=8)
    model = Model.load(inspect_model(short, dtype="fp32", device="cpu"))

    prefills, decodes = _points(probe(model, ProbeLimits(budget_s=1e6, sequences=2)))

    assert prefills == [(8, 0), (8, 4), (8, 7)]
    assert decodes == [(1, 7), (2, 14)]
