"""How much memory this process may still take: the machine's, or its container's if less."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can be taken now without swapping or being killed; None where unknown.

    The least of MemAvailable and, for each control group above this process, its limit less what
    it uses (without page cache that can be dropped at once).
    """
    known = [
        value
        for value in (
            _meminfo_available_bytes(),
            *(_cgroup_left_bytes(folder) for folder in _cgroup_folders()),
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
    """The group of this process and all groups above it (control groups of version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line[len("0::") :] for line in lines if line.startswith("0::")]
    own = [_CGROUP / path.strip("/") for path in paths if path.strip("/")]
    above = [folder for path in own for folder in path.parents if _CGROUP in folder.parents]
    return [*own, *above, _CGROUP]


def _cgroup_left_bytes(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    droppable = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return int(limit) - used + droppable
