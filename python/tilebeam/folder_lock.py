"""A folder in which one process works at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_in(folder: Path, refusal: Exception) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process at the latest; nobody waits for one that may have stopped.

    Raises:
        Exception: `refusal`: another one has it.
        OSError: the file system has no locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield
    finally:
        os.close(fd)
