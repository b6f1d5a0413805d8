"""Threads that a command does not want."""

from __future__ import annotations

import os


def keep_blas_to_one_thread() -> None:
    """Before numpy is loaded: its BLAS starts a thread for every core, and they wait busily.

    For commands that multiply no matrices. It does not override what the user has set.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
