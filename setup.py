"""Compiles the scheduler and the simulator with mypyc; all else is said in ``pyproject.toml``.

What is compiled is ordinary Python, and without a C compiler it stays that. ``SNOWSKIN_PURE=1``
leaves compiling out.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILED = {
    "conductor": "admission conductor decode_choice draw fleet forecast ledger prediction "
    "prefill_choice state waiting",
    "cost": "costs",
    "sim": "calendar decode job journey links memory nodes world",
    "store": "directory eviction pool runs",
}
"""By room: what runs for every simulated event, and is no message or setting."""


def extensions() -> list[Extension]:
    """The modules to compile; none if they are not wanted, or cannot be compiled here."""
    if os.environ.get("SNOWSKIN_PURE"):
        return []
    from mypyc.build import mypycify

    paths = [
        Path("src/snowskin", room, f"{name}.py").as_posix()
        for room, names in COMPILED.items()
        for name in names.split()
    ]
    try:
        modules = mypycify(paths, group_name="snowskin", debug_level="0")
    except SystemExit:
        print("snowskin stays plain Python: mypyc could not compile it", file=sys.stderr)
        return []
    for module in modules:
        module.optional = True
    return modules


setup(ext_modules=extensions())
