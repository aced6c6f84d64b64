"""Packed files kept for the next load: the first load of an ordinary file writes its tiles to a folder of the user's,
and every later one maps them, in this process or in others, which share their pages.

Off unless a size is given for it: packing takes a second or two for each GB, and a kept file as much room on the disk
as the model, which nobody should find taken unasked.

A file is named by what it was made of: the fingerprints of the model's parts and when they were written, and the
version of the packing. It gets its name once it is whole, synced (gguf_write.complete_file) and dated. Its time of
change is a number of that name, which nobody who writes into it later leaves as it is; its time of access tells when it
was used last. Only what belongs to this user, and nobody else may write to, is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilebeam import gguf as gguf_tools
from tilebeam._ext import LAYOUT_VERSION
from tilebeam.errors import CacheWarning, TilebeamError
from tilebeam.folder_lock import alone_in
from tilebeam.model.file_check import CheckedFile
from tilebeam.native.repacked import RepackedFile

_SUFFIX = ".gguf"
_EPOCH = 1_000_000_000  # seconds: times of change are later, and before any file was made here


class _UnusableError(Exception):
    """Why a folder or file cannot be used, as the end of a sentence."""


class _StoppedError(Exception):
    """Carries what `progress` raised past those who handle errors of packing."""


@dataclass(frozen=True)
class KeptFile:
    """A packed file of the cache: its size in bytes, and when it was used last, in seconds since 1970."""

    path: Path
    size: int
    used: float


def cache_folder() -> Path:
    """Return where files of this user's are kept for later: tilebeam in XDG_CACHE_HOME, or in ~/.cache.

    Raises:
        TilebeamError: this user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tilebeam"
    except RuntimeError as error:
        raise TilebeamError(f"No place for files that are kept: {error}") from None


def folder() -> Path:
    """Return where packed files are kept; raise TilebeamError as `cache_folder` does."""
    return cache_folder() / "packed"


def kept() -> list[KeptFile]:
    """List the packed files that are there, those used last first."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder()) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process makes room
                state = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(state.st_mode) and entry.name.endswith(_SUFFIX):
                    found.append(KeptFile(Path(entry.path), state.st_size, state.st_atime))
    return sorted(found, key=lambda file: -file.used)


def clear() -> int:
    """Delete all packed files, which models that are loaded go on with; return their bytes.

    Raises:
        OSError: one cannot be deleted.
    """
    return sum(_delete(file) for file in kept())


def find(file: CheckedFile, limit: int, *, verify: bool, progress: Callable[[float], object]) -> RepackedFile | None:
    """Return the packed form of an ordinary file, which is made if there is none. None: there can be none.

    Args:
        limit: bytes of all packed files; those used longest ago go when another needs the room.
        verify: compare the digests of one that was there.
        progress: called with the share of the packing that is done; what it raises is raised here.

    Warns:
        CacheWarning: a packed file was damaged, or cannot be kept, and why.
    """
    name = Path(file.path).name
    try:
        return _found(file, limit, verify, progress)
    except _StoppedError as stopped:
        raise (stopped.__cause__ or stopped) from None
    except (_UnusableError, gguf_tools.GGUFError, OSError, TilebeamError) as error:
        warnings.warn(f"No packed file of {name} is kept: {_reason(error)}.", CacheWarning, stacklevel=3)
        return None


def discard(file: RepackedFile, *, unlike: bool) -> None:
    """Warn of a packed file that was not used, and delete it unless it would be made in the same way again: `unlike`
    the ordinary file, it has tiles that llama.cpp leaves out."""
    if not unlike:
        with contextlib.suppress(OSError):  # another process may have deleted it meanwhile
            os.unlink(file.path)
    why = "has tiles that llama.cpp leaves out" if unlike else "could not be loaded"
    warnings.warn(f"{file.path} {why}, and the model was packed in memory.", CacheWarning, stacklevel=7)


def _found(file: CheckedFile, limit: int, verify: bool, progress: Callable[[float], object]) -> RepackedFile | None:
    from tilebeam.gguf.policy import plan
    from tilebeam.gguf.whole_file import beside

    def told(done: int, total: int) -> None:
        try:
            progress(done / total)
        except Exception as error:
            raise _StoppedError from error

    here, key = _own_folder(), _key(file.parts)
    stem = os.fsencode(Path(file.path).stem)[:80].decode(errors="ignore")  # the longest file name is 255 bytes
    path = here / f"{stem}-{key[:16]}{_SUFFIX}"
    if os.path.lexists(path):
        with contextlib.suppress(_UnusableError, gguf_tools.GGUFError, OSError):
            return _opened(path, key, verify)
    else:
        with gguf_tools.open_gguf(file.path) as source:
            if not any(target.tiled is not None for target in plan(source, gguf_tools.Policy())):
                return None
    with alone_in(here, _UnusableError("another process is packing a file")):
        if os.path.lexists(path):
            try:  # another process may have made it just now
                return _opened(path, key, verify)
            except (_UnusableError, gguf_tools.GGUFError, OSError) as error:
                said = f"The packed file of {Path(file.path).name} is made anew: {_reason(error)}."
                warnings.warn(said, CacheWarning, stacklevel=4)
                path.unlink(missing_ok=True)
        _make_room(sum(part.stat().st_size for part in file.parts), limit)
        partial = beside(path)
        try:  # it has its name once nothing about it changes: others trust it by its mode and times
            gguf_tools.pack(file.path, partial, progress=told)
            partial.chmod(0o600)
            os.utime(partial, (time.time(), _time_of_change(key)))
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return _opened(path, key, verify=False)


def _key(parts: Sequence[Path]) -> str:
    """Name what a packed file is made of, and how."""
    from tilebeam.gguf.fingerprint import fingerprint
    from tilebeam.gguf.repack import tool_version

    made_by = f"{tool_version()} {LAYOUT_VERSION}"
    made_of = [f"{fingerprint(part)} {part.stat().st_mtime_ns}" for part in parts]
    return hashlib.sha256("\n".join([made_by, *made_of]).encode()).hexdigest()


def _time_of_change(key: str) -> int:
    """Return seconds that a file of this key has as its time of change; even, as coarse file systems keep them."""
    return _EPOCH + 2 * int(key[:7], 16)


def _opened(path: Path, key: str, verify: bool) -> RepackedFile:
    """Check a packed file and note that it is used.

    Raises:
        _UnusableError, GGUFError, OSError: it is not to be trusted, or damaged.
    """
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode):
        raise _UnusableError(f"{path} is no regular file")
    _check_owner(path, state)
    if int(state.st_mtime) != _time_of_change(key):
        raise _UnusableError(f"{path} was written to")
    manifest = gguf_tools.manifest(path)
    if verify:
        gguf_tools.verify(path, deep=False)
    os.utime(path, ns=(time.time_ns(), state.st_mtime_ns))
    return RepackedFile.of(manifest)


def _own_folder() -> Path:
    """Return the folder, made if it is missing.

    Raises:
        _UnusableError, OSError: it cannot be made, or others can write to it.
    """
    path = folder()
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            part.mkdir(0o700)
        state = part.stat()  # a link to another disk is the user's own doing
        if not stat.S_ISDIR(state.st_mode):
            raise _UnusableError(f"{part} is no folder")
        _check_owner(part, state)
    return path


def _check_owner(path: Path, state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise _UnusableError(f"{path} belongs to another user")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UnusableError(f"other users can write to {path}")


def _make_room(size: int, limit: int) -> None:
    """Delete the files used longest ago until one of this size fits.

    Raises:
        _UnusableError: it never does.
    """
    from tilebeam.gguf.whole_file import remove_leftovers

    if size > limit:
        raise _UnusableError(f"it takes {size >> 20} MiB, and packed_cache allows {limit >> 20} MiB for all files")
    remove_leftovers(folder(), ".*")
    files = kept()
    taken = sum(file.size for file in files)
    while files and taken + size > limit:
        taken -= _delete(files.pop())


def _delete(file: KeptFile) -> int:
    file.path.unlink(missing_ok=True)
    return file.size


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).rstrip(".")
