from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from snowskin.cluster.prepare import profile_path
from snowskin.cost.profile import save_profile
from snowskin.engine.model import inspect_model
from tests.cli.serving import END_S, Server, alive
from tests.cluster.live import PROFILE
from tests.engine import tiny


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A cache folder with a profile, so that no start needs to measure."""
    cache = tmp_path_factory.mktemp("cache")
    info = inspect_model(model_dir, dtype="fp32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNOWSKIN_CACHE", str(cache))
        path = profile_path(info, threads=1, transport="auto")
    path.parent.mkdir(parents=True)
    save_profile(PROFILE, path)
    return cache


@pytest.fixture(scope="package")
def server(
    model_dir: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(model_dir, cache, tmp_path_factory.mktemp("log") / "serve.log")
    yield server
    family = server.family()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(END_S) == 0
    assert not alive(family)
