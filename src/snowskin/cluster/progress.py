"""Whether a process that starts still gets on: it computes or reads, or it hangs.

How long a start may take depends on the model and its disk; what a hanging one looks like does not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

STALL_S = 60.0
"""A node that starts and does nothing for so long hangs.

Our choice: longer than a shared disk or a laden machine keeps a reader waiting."""
LEAST_CPU_S = 0.5
"""Of a stall's time. Who waits in vain may look up now and then."""
LEAST_READ_BYTES = 1 << 20
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Work(NamedTuple):
    """What a process has done since it began."""

    cpu_s: float
    read_bytes: int


def work_of(pid: int) -> Work | None:
    """What a process has done so far; None if it has ended, or the system does not tell."""
    try:
        # The second field is the name, which may hold anything, blanks and brackets included.
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:
        return None
    user_ticks, system_ticks = int(stat[11]), int(stat[12])
    # By calls, and from disks: a file that is mapped is read without a call.
    read_bytes = int(io["rchar"]) + int(io["read_bytes"])
    return Work((user_ticks + system_ticks) * _TICK_S, read_bytes)


class StartWatch:
    """Watches one start of one process."""

    def __init__(self, pid: int, *, now_s: float) -> None:
        self._pid = pid
        self._seen = work_of(pid)
        self._since_s = now_s

    def stalled_s(self, *, now_s: float) -> float:
        """For how long it has done nothing to speak of, in seconds."""
        work, seen = work_of(self._pid), self._seen
        if (
            work is None
            or seen is None
            or work.cpu_s - seen.cpu_s >= LEAST_CPU_S
            or work.read_bytes - seen.read_bytes >= LEAST_READ_BYTES
        ):
            self._seen, self._since_s = work, now_s
        return now_s - self._since_s
