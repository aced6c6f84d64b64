"""Remembers which model files were found sound, so that a file is read through once and not at every load.

A record is an empty file, named after everything that tells one state of a file from another: device, inode, size,
times of the last change of its contents and of its inode (which no program can set), what was checked, and the version
of the checks. Whoever writes to a model file changes its record's name. Not noticed are bytes that rot on the disk: for
those there is ``verify="always"`` and ``gguf-repack verify``.

Records lie in ``$XDG_CACHE_HOME/tilebeam/checked`` (``~/.cache/tilebeam/checked``). They count only if that folder is
the user's own and nobody else may write to it. Deleting them is always safe. Where they cannot be kept, a process still
remembers its own.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

_VERSION = 1  # of what the checks mean: another number makes all records void
_MOST = 512  # records kept; the oldest go first
# A file that was written to this recently may be written to again without its times changing: clocks have ticks.
_SETTLED_NS = 2_000_000_000

_here: set[str] = set()  # found sound by this process


def folder() -> Path:
    """Where the records of this user lie."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache") / "tilebeam" / "checked"


@dataclass(frozen=True)
class State:
    """What tells one state of a file from another, and when that was looked at."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    seen_ns: int

    @classmethod
    def of(cls, file_or_path: int | str | os.PathLike[str]) -> State:
        """The state now of an open file, or of the one that has this path."""
        seen = time.time_ns()
        file = os.stat(file_or_path)
        return cls(file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns, seen)

    def record(self, check: str) -> str:
        """The name of the record that this file passed a check."""
        fields = (_VERSION, check, self.device, self.inode, self.size, self.modified_ns, self.changed_ns)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:40]

    @property
    def settled(self) -> bool:
        """Whether the last change is old enough for a further one to show in the times."""
        return self.seen_ns - max(self.modified_ns, self.changed_ns) >= _SETTLED_NS


def _trusted(path: Path) -> bool:
    """Is it a folder that only this user can write to?"""
    try:
        own = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and not own.st_mode & 0o022


def known(file: State, check: str) -> bool:
    """Did the file in this state pass that check before?"""
    name = file.record(check)
    try:
        return name in _here or (_trusted(folder()) and (folder() / name).is_file())
    except (OSError, RuntimeError):  # no home
        return False


def remember(before: State, path: str | os.PathLike[str], check: str) -> None:
    """The file that was in this state before passed that check; does nothing unless `path` is it, in the same state."""
    name = before.record(check)
    try:
        if name != State.of(path).record(check):
            return
    except OSError:
        return
    _here.add(name)
    if not before.settled:
        return
    try:
        records = folder()
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _trusted(records):
            (records / name).touch(mode=0o600)
            _prune(records)
    except (OSError, RuntimeError):
        return  # a read-only home, a full disk: the next process checks again


def _prune(records: Path) -> None:
    by_age = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(records))
    for _, record in by_age[: max(0, len(by_age) - _MOST)]:
        os.unlink(record)
