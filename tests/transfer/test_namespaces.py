"""Two real links to a peer in another network namespace, one of which goes down in mid-transfer."""

import contextlib
import os
import shutil
import subprocess

import pytest

from snowskin.transfer.memory import SegmentLayout
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.topology import LocalNic

from .conftest import Reader, when_ready
from .owner import Owner

LAYOUT = SegmentLayout(slot_count=32, slot_bytes=3 << 20, part_count=3)
RATE = ["tbf", "rate", "1600mbit", "burst", "512kb", "latency", "100ms"]
"""Each link needs a quarter of a second for half of the bytes, so there is a middle to cut."""


def ip(*words, **more):
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=20, **more
    )


def reason_to_skip():
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the programs ip and tc (package iproute2)"
    name = f"snowskin-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    return None


@pytest.fixture
def links():
    """Names of two links of ours to a namespace, whose far ends have the addresses .2."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    space = f"snowskin-{os.getpid()}"
    names = [f"sns{os.getpid() % 100_000}{letter}" for letter in "ab"]
    ip("netns", "add", space)
    try:
        ip("-n", space, "link", "set", "lo", "up")
        for number, name in enumerate(names):
            far = f"{name}far"
            ip("link", "add", name, "type", "veth", "peer", "name", far)
            ip("link", "set", far, "netns", space)
            ip("addr", "add", f"198.18.{number}.1/30", "dev", name)
            ip("-n", space, "addr", "add", f"198.18.{number}.2/30", "dev", far)
            ip("link", "set", name, "up")
            ip("-n", space, "link", "set", far, "up")
            within = ["ip", "netns", "exec", space]
            slow = ["tc", "qdisc", "add", "dev", far, "root", *RATE]
            subprocess.run([*within, *slow], check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        remove(space, names)
        pytest.skip(f"cannot make slow links between namespaces: {error.stderr.strip()}")
    try:
        yield space, names
    finally:
        remove(space, names)


def remove(space, names):
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", name)
    ip("netns", "delete", space)


@pytest.fixture
def owner(links):
    space, _ = links
    made = Owner(LAYOUT, ["198.18.0.2", "198.18.1.2"], within=["ip", "netns", "exec", space])
    yield made
    made.close()


@pytest.fixture
def reader():
    made = Reader(LAYOUT)
    yield made
    made.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_link_that_goes_down_in_mid_transfer_costs_no_block(owner, links, reader, lost):
    _, names = links
    generations = owner.tell("fill", 32)
    blocks = reader.blocks(generations)
    engine = reader.engine(
        "auto",
        nics=[LocalNic("198.18.0.1", 30), LocalNic("198.18.1.1", 30)],
        settings=TransferSettings(stall_s=0.8),
    )
    cutting = when_ready(
        reader.segment, [block.local_slot for block in blocks[:4]], 3, lambda: down(names[lost])
    )
    result = engine.pull(owner.peer, blocks, timeout_s=60)
    cutting.join()
    assert all(result.landed)
    reader.assert_right(blocks, result)
    by_host = {stat.path.host: stat for stat in engine.path_stat()}
    bad, good = by_host[f"198.18.{lost}.2"], by_host[f"198.18.{1 - lost}.2"]
    assert (bad.path.local_host, good.path.local_host) == (
        f"198.18.{lost}.1",
        f"198.18.{1 - lost}.1",
    )
    assert bad.failures >= 1
    assert bad.retried_bytes > 0
    assert bad.landed_bytes + good.landed_bytes == LAYOUT.data_bytes
    assert good.failures == 0
    stat = engine.stat()
    assert (stat.shm_bytes, stat.tcp_bytes) == (0, LAYOUT.data_bytes)
    assert stat.retried_bytes == bad.retried_bytes
    (link,) = engine.link_stat()
    assert (link.paths, link.bytes_in_flight) == (2, 0)


def down(name):
    ip("link", "set", name, "down")
