"""One process at a time has a directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from snowskin.terms.errors import InvalidInput


def lock_directory(directory: Path) -> int:
    """Make a directory if there is none, and lock it until the given descriptor is closed.

    The lock ends with its process, however that ends.

    Raises:
        InvalidInput: it cannot be made or written, or another has the lock.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput(f"SSD directory {directory} cannot be used: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace")
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise InvalidInput(
                f"SSD directory {directory} is in use by process {holder}; stop it, or choose "
                f"another directory"
            ) from error
        raise InvalidInput(f"SSD directory {directory} cannot be used: {error}") from error
    return fd
