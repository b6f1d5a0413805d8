import pytest

from snowskin.transfer.available import available_bytes, cgroup_left_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def make_group(folder, names, limit, used, droppable):
    limit_name, used_name, droppable_name = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{droppable_name} {droppable}\n")


@pytest.mark.parametrize("names", [V2, V1])
def test_a_group_leaves_its_limit_less_what_it_cannot_drop(tmp_path, names):
    make_group(tmp_path, names, limit=1000, used=700, droppable=200)
    assert cgroup_left_bytes(tmp_path) == 500


def test_a_group_without_a_limit_limits_nothing(tmp_path):
    make_group(tmp_path, V2, limit="max", used=700, droppable=200)
    assert cgroup_left_bytes(tmp_path) is None


def test_a_folder_that_is_no_group_limits_nothing(tmp_path):
    assert cgroup_left_bytes(tmp_path) is None
    make_group(tmp_path, V2, limit="many", used=700, droppable=200)
    assert cgroup_left_bytes(tmp_path) is None


def test_this_machine_has_memory():
    assert available_bytes() > 0
