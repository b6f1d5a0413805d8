"""Find the traces that the papers' authors and Azure released, if the user has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "SNOWSKIN_TRACES"


def released_trace(file_name: str) -> Path | None:
    """The path of a released trace; None if it is not at hand.

    Looked for in the folder that SNOWSKIN_TRACES names, then in ``traces`` and ``shared/traces``
    of the working directory and of the directories above it.
    """
    for folder in _folders():
        path = folder / file_name
        if path.is_file():
            return path
    return None


def _folders() -> Iterator[Path]:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        yield Path(named)
    here = Path.cwd()
    for place in (here, *here.parents):
        yield place / "traces"
        yield place / "shared" / "traces"
