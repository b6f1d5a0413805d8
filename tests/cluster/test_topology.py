"""Nodes reach each other over the addresses that a topology file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from snowskin.cluster.config import ServeConfig
from snowskin.cluster.prepare import serving_info
from snowskin.engine.model import inspect_model
from snowskin.terms.errors import InvalidInput
from tests.cluster.live import live_cluster
from tests.engine import tiny
from tests.engine.pair import Oracle

torch.set_num_threads(1)


def test_kv_travels_over_the_addresses_of_the_topology_file(tmp_path: Path) -> None:
    model_dir = tiny.build("llama", tmp_path)
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps({"cpu:0": [["127.0.0.1"], ["127.0.0.2"]]}))
    with live_cluster(model_dir, transport="tcp", topology=str(topology), slice_bytes=4096) as live:
        prompt = tiny.prompt_tokens(90, seed=1)
        answer = live.ask(prompt, output_tokens=12)
    assert answer.tokens == tuple(Oracle(model_dir).generate(tuple(prompt), 12))


def test_a_topology_that_other_machines_can_reach_demands_keys(tmp_path: Path) -> None:
    model_dir = tiny.build("llama", tmp_path)
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps({"cpu:0": [["192.0.2.7"], []]}))
    model = inspect_model(model_dir, dtype="fp32", device="cpu")
    with pytest.raises(InvalidInput, match=r"192\.0\.2\.7"):
        serving_info(ServeConfig(model=str(model_dir), topology=str(topology)), model)
