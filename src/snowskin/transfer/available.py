"""How much memory this process may still take: the machine's, or its container's if less."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can be taken now without swapping or being killed; None where unknown.

    The least of MemAvailable and, for each control group that this process is in, its limit less
    what it uses (without page cache that can be dropped at once).
    """
    known = [
        value
        for value in (
            _meminfo_available_bytes(),
            *(cgroup_left_bytes(folder) for folder in _cgroup_folders()),
        )
        if value is not None
    ]
    return max(0, min(known)) if known else None


def _meminfo_available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_folders() -> list[Path]:
    """The group of this process and all groups above it; for version 1, what a container sees."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line[len("0::") :] for line in lines if line.startswith("0::")]
    own = [_CGROUP / path.strip("/") for path in paths if path.strip("/")]
    above = [folder for path in own for folder in path.parents if _CGROUP in folder.parents]
    return [*own, *above, _CGROUP, _CGROUP / "memory"]


def cgroup_left_bytes(folder: Path) -> int | None:
    """What a control group may still take; None if it has no limit, or is none.

    Args:
        folder: of a group with the files of version 2 or 1.
    """
    for limit_name, used_name, droppable_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used_bytes = int((folder / used_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit == "max":
                return None
            return int(limit) - used_bytes + int(stat.get(droppable_name, 0))
        except (OSError, ValueError):
            continue
    return None
