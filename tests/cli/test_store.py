"""The store's commands, as a user types them."""

import signal
import subprocess
import sys

import pytest

from tests.store.objects.running import ProcessStore, is_running


def run(*arguments, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "snowskin", "store", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def store():
    made = ProcessStore(["node-a"])
    yield made
    made.close()


def test_a_file_goes_in_and_comes_out_and_ctrl_c_ends_all_in_order(store, tmp_path):
    at = ("--master", store.address)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(bytes(range(256)) * 400)
    stored = run("put", "docs/a", str(source), "--replicas", "2", *at)
    assert stored.stdout == b"stored: 102400 bytes, 1 of 2 replicas\n"
    assert run("put", "docs/b", "-", *at, stdin=b"piped").returncode == 0
    assert run("get", "docs/a", str(target), *at).returncode == 0
    assert target.read_bytes() == source.read_bytes()
    assert run("get", "docs/b", "-", *at).stdout == b"piped"
    assert run("ls", "docs/", *at).stdout == b"docs/a\ndocs/b\n"
    assert b'"node-a"' in run("stat", *at).stdout
    assert b'"size_bytes": 5' in run("stat", "docs/b", *at).stdout
    assert run("rm", "docs/a", *at).returncode == 0
    missing = run("get", "docs/a", "-", *at)
    assert (missing.returncode, missing.stdout) == (2, b"")
    assert b"there is no object 'docs/a'" in missing.stderr
    for process in (*store.nodes.values(), store.master):
        assert process.end(signal.SIGINT) == 0
        assert not is_running(process.pid)


@pytest.mark.parametrize("host", ["127.0.0.1,", ",", "127.0.0.1, 127.0.0.1", ""])
@pytest.mark.parametrize("options", [[], ["--cluster-key", "k"]])
def test_addresses_of_a_node_are_each_named_once(host, options):
    refused = run("node", "--host", host, *options)
    assert refused.returncode == 2
    assert b"give one address, or several different ones" in refused.stderr


def test_what_others_could_reach_needs_a_cluster_key():
    refused = run("master", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 2
    assert b"--cluster-key" in refused.stderr
