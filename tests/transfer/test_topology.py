import json

import pytest

from snowskin.terms.errors import InvalidInput
from snowskin.transfer.nics import read_nics, read_numa_nodes, read_topology
from snowskin.transfer.paths import Path
from snowskin.transfer.topology import (
    PATHS_PER_PEER_LIMIT,
    Address,
    LocalNic,
    Nic,
    discovered_topology,
    pair_paths,
    parse_topology,
)

NICS = (
    Nic("eth0", ("10.0.0.1/24",), 0),
    Nic("eth1", ("10.0.1.1/24", "10.0.2.1/24"), 1),
    Nic("bond", ("10.9.0.1/16",), None),
    Nic("idle", (), 0),
)


def test_memory_prefers_the_nics_of_its_own_node():
    topology = discovered_topology(NICS, (0, 1))
    assert topology.matrix == {
        "cpu:0": (("eth0", "bond"), ("eth1",)),
        "cpu:1": (("eth1", "bond"), ("eth0",)),
    }
    assert topology.nics("cpu:1") == (
        LocalNic("10.0.1.1", 24, 0),
        LocalNic("10.0.2.1", 24, 0),
        LocalNic("10.9.0.1", 16, 0),
        LocalNic("10.0.0.1", 24, 1),
    )


def test_memory_without_a_nic_of_its_own_prefers_the_others():
    assert discovered_topology(NICS[:1], (0, 1)).matrix["cpu:1"] == (("eth0",), ())
    assert discovered_topology((), ()).nics("cpu:0") == ()


def test_a_file_says_which_nics_serve_which_memory():
    text = json.dumps({"cpu:0": [["eth1"], ["10.0.0.1"]], "cuda:0": [["127.0.0.2"], []]})
    topology = parse_topology(text, NICS)
    assert topology.nics("cpu:0") == (
        LocalNic("10.0.1.1", 24, 0),
        LocalNic("10.0.2.1", 24, 0),
        LocalNic("10.0.0.1", 24, 1),
    )
    assert topology.nics("cuda:0") == (LocalNic("127.0.0.2", 8, 0),)
    with pytest.raises(InvalidInput, match="no location 'cpu:3' in the topology; it has cpu:0"):
        topology.nics("cpu:3")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "must be JSON like"),
        ('{"cpu:0": "eth0"}', "must be JSON like"),
        ("{}", "has no location; give at least cpu:0"),
        ('{"gpu0": [["eth0"], []]}', "'gpu0' is no location; write cpu:N or cuda:N"),
        ('{"cpu:0": [["eth0"]]}', "'cpu:0' has 1 lists; give the preferred and the others"),
        ('{"cpu:0": [[], []]}', "'cpu:0' names no NIC"),
        ('{"cpu:0": [["eth0"], ["eth0"]]}', "names 'eth0' twice"),
        ('{"cpu:0": [["mlx5_0"], []]}', "names 'mlx5_0', which this machine does not have; it has"),
        ('{"cpu:0": [["idle"], []]}', "names 'idle', which has no address"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_value_and_the_remedy(text, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        parse_topology(text, NICS)


def test_an_address_is_paired_with_ours_of_the_same_network():
    ours = [LocalNic("10.0.0.1", 24), LocalNic("10.0.1.1", 24, 1), LocalNic("10.0.0.5")]
    theirs = [
        Address("10.0.1.9", 2),
        Address("10.0.0.9", 1),
        Address("10.7.7.7", 3),
        Address("h", 4),
    ]
    assert pair_paths("peer", theirs, ours) == (
        Path("peer", "tcp", "10.0.0.9", 1, "10.0.0.1"),
        Path("peer", "tcp", "10.7.7.7", 3),
        Path("peer", "tcp", "h", 4),
        Path("peer", "tcp", "10.0.1.9", 2, "10.0.1.1", tier=1),
    )


def test_on_one_network_the_first_paths_use_different_nics_at_both_ends():
    ours = [LocalNic("10.0.0.1", 24), LocalNic("10.0.0.2", 24)]
    paths = pair_paths("peer", [Address("10.0.0.8", 1), Address("10.0.0.9", 1)], ours)
    assert [(path.local_host, path.host) for path in paths] == [
        ("10.0.0.1", "10.0.0.8"),
        ("10.0.0.2", "10.0.0.9"),
        ("10.0.0.2", "10.0.0.8"),
        ("10.0.0.1", "10.0.0.9"),
    ]


def test_a_peer_has_a_bounded_number_of_paths():
    ours = [LocalNic(f"10.0.0.{at}", 24) for at in range(1, 9)]
    theirs = [Address(f"10.0.0.{at}", 1) for at in range(11, 19)]
    paths = pair_paths("peer", theirs, ours)
    assert len(set(paths)) == PATHS_PER_PEER_LIMIT
    assert {path.host for path in paths} == {address.host for address in theirs}


def test_this_machine_has_a_topology():
    topology = read_topology()
    assert [f"cpu:{node}" for node in read_numa_nodes()] == list(topology.matrix)
    for nic in read_nics():
        assert nic.name != "lo"


def test_nics_are_read_with_their_node_and_without_the_loopback(tmp_path):
    for name, kind, state, node in (
        ("lo", "772", "unknown", None),
        ("down0", "1", "down", "0"),
        ("fast0", "1", "up", "1"),
        ("veth0", "1", "up", "-1"),
    ):
        folder = tmp_path / "class" / "net" / name
        (folder / "device").mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "operstate").write_text(f"{state}\n")
        if node is not None:
            (folder / "device" / "numa_node").write_text(f"{node}\n")
    for node in (0, 1):
        (tmp_path / "devices" / "system" / "node" / f"node{node}").mkdir(parents=True)
    assert read_nics(tmp_path) == (Nic("fast0", (), 1), Nic("veth0", (), None))
    assert read_numa_nodes(tmp_path) == (0, 1)
    assert read_numa_nodes(tmp_path / "class") == (0,)


def test_a_topology_file_is_read_and_one_that_is_missing_is_named(tmp_path):
    file = tmp_path / "topology.json"
    file.write_text('{"cpu:0": [["127.0.0.2"], ["127.0.0.3"]]}')
    assert read_topology(file).nics("cpu:0") == (
        LocalNic("127.0.0.2", 8, 0),
        LocalNic("127.0.0.3", 8, 1),
    )
    with pytest.raises(InvalidInput, match=r"cannot read the topology .*nowhere"):
        read_topology(tmp_path / "nowhere")
