"""What must be known before a cluster starts: the model, and how fast this machine runs it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import xxhash
from rich.console import Console

from snowskin.cluster.config import YIELDING_THREADS, ServeConfig
from snowskin.cluster.inspection import inspect_once
from snowskin.cluster.parts import segment_layout, segment_nics
from snowskin.cost.profile import Profile, load_profile
from snowskin.engine.default_model import cache_dir, make_cache_folder, resolve_model
from snowskin.engine.model import ModelInfo
from snowskin.terms.errors import InvalidInput, SnowskinError
from snowskin.terms.keys import KeySpace
from snowskin.terms.serving import ServingInfo
from snowskin.transfer.available import available_bytes
from snowskin.transfer.transports.nixl import import_nixl

GIB = 1 << 30


def prepare_model(config: ServeConfig) -> ModelInfo:
    """The model in its folder, found, fetched or converted as needed.

    Raises:
        InvalidInput: no such model, or no such transport here.
        UnsupportedModel: the engine would compute it wrongly.
    """
    if config.transport == "nixl":
        import_nixl()  # To tell at once where it is missing.
    return inspect_once(
        resolve_model(config.model),
        dtype=config.dtype,
        device=config.device,
        machine=f"{platform.node()}|{_cpu_name()}",
    )


def serving_info(config: ServeConfig, model: ModelInfo) -> ServingInfo:
    """What is served, as clients may know it.

    Raises:
        InvalidInput: the nodes' memory holds not even one block, or there is not so much.
    """
    _check_memory(config)
    for nic in segment_nics(config.topology):
        config.demand_keys("--topology", nic.host)
    layout = segment_layout(model, block_tokens=config.block_tokens, dram_bytes=config.dram_bytes)
    pool_tokens = layout.slot_count * config.block_tokens
    return ServingInfo(
        model=config.model if config.model == "smollm2" else model.name,
        model_dir=str(model.model_dir),
        key_space=KeySpace(
            model=model.name,
            revision=model.revision,
            dtype=model.dtype,
            block_tokens=config.block_tokens,
        ),
        # A prompt that no node could ever hold is refused at the door, with both lengths.
        max_context_tokens=min(model.max_context_tokens, pool_tokens, config.device_tokens),
        vocab_size=model.vocab_size,
        stop_tokens=model.stop_tokens,
        sampling=model.sampling,
    )


def _check_memory(config: ServeConfig) -> None:
    nodes = config.prefill_nodes + config.decode_nodes
    available = available_bytes()
    if available is not None and nodes * config.dram_bytes > available:
        raise InvalidInput(
            f"--dram of {config.dram_bytes / GIB:.1f} GiB for each of {nodes} nodes: only "
            f"{available / GIB:.1f} GiB of memory are available; choose less, or fewer nodes",
            parameter="--dram",
        )


def profile_path(model: ModelInfo, *, threads: int, transport: str) -> Path:
    """Where this machine's profile of a model is kept."""
    machine = f"{platform.node()}|{_cpu_name()}|{os.cpu_count()}|{threads}|{transport}"
    subject = f"{model.name}|{model.revision}|{model.dtype}|{model.device}"
    digest = xxhash.xxh3_64_hexdigest(f"{machine}|{subject}".encode())
    return cache_dir() / "profiles" / f"{model.name}-{model.dtype}-{digest}.json"


def machine_profile(config: ServeConfig, model: ModelInfo) -> Profile:
    """This machine's profile: the saved one, or one measured now, once, in a process of its own.

    Raises:
        SnowskinError: it could not be measured.
    """
    path = profile_path(model, threads=config.engine_threads, transport=config.transport)
    if not path.is_file():
        make_cache_folder("profiles")
        Console(stderr=True).print(
            f"First start with [bold]{model.name}[/bold] on this machine: measuring its speed "
            "(once; again with `snowskin profile`)."
        )
        _measure_apart(config)
    return load_profile(path)


def _measure_apart(config: ServeConfig) -> None:
    # A process of its own gives back what torch takes, and starts from a clean thread pool.
    command = [sys.executable, "-m", "snowskin", "profile", "--model", config.model]
    command += ["--dtype", config.dtype, "--device", config.device]
    command += ["--threads", str(config.threads), "--transport", config.transport]
    environment = {**YIELDING_THREADS, **os.environ}
    if subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=False).returncode:
        raise SnowskinError("the speed of the model could not be measured; see the message above")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
