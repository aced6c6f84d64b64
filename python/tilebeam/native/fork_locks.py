"""Locks that a child of fork() finds free.

The threads that hold a lock when fork() is called do not exist in the child, so nobody would ever release its copy.
"""

from __future__ import annotations

import os
import threading
from typing import Any


def renew(lock: threading.Lock) -> None:
    """Release this process' copy of a lock, whoever held it; for the child's side of fork()."""
    unlocked: Any = lock
    unlocked._at_fork_reinit()  # what the standard library calls for its own locks


def free_in_children() -> threading.Lock:
    """Make a lock that lives as long as the process and guards nothing that a child would find half done."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lambda: renew(lock))
    return lock
