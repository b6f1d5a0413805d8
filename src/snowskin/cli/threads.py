"""Threads that a command does not want."""

from __future__ import annotations

import os


def keep_blas_to_one_thread() -> None:
    """Keep numpy's BLAS to one thread; to be called before numpy is loaded.

    Otherwise it starts one for every core, and they wait busily. For commands that multiply no
    matrices. What the user has set stays.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
