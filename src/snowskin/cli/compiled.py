"""Whether compiled modules are those of their sources, which may have moved on in a checkout."""

from __future__ import annotations

from pathlib import Path

import snowskin
from snowskin.terms.errors import SnowskinError

PACKAGE = Path(snowskin.__file__).parent


class StaleModule(SnowskinError):
    """A source was edited after it was compiled, and what would run is the old one."""


def compiled_count() -> int:
    """How many modules run compiled (see ``setup.py``); 0: all is plain Python."""
    return len(list(PACKAGE.glob("*/*.so")))


def refuse_stale_modules() -> None:
    """See to it that what runs is what the sources say.

    Raises:
        StaleModule: it is not; names the source and the remedy.
    """
    if not (PACKAGE.parent.parent / "pyproject.toml").is_file():
        return  # An installed package: its sources and modules came together.
    for module in sorted(PACKAGE.glob("*/*.so")):
        source = module.with_name(module.name.partition(".")[0] + ".py")
        if not source.exists() or source.stat().st_mtime > module.stat().st_mtime:
            raise StaleModule(
                f"{source.relative_to(PACKAGE)} was changed after it was compiled; run `make "
                "setup` to compile it again, or `make pure` to work with plain Python"
            )
