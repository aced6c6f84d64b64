"""Output files and folders that appear under their name only when they are complete; errors that name the file.

A file that is replaced hands its mode on, and where the name is a symbolic link the file it points to is replaced.
What a killed process left incomplete is removed by the next one that writes the same name: a lock tells whether
anybody still writes it.
``gguf_write.complete_file`` is for GGUF files, whose size is known before: it also makes sure of room, and syncs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SUFFIX = ".part"


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], partial: Path | None = None) -> Iterator[None]:
    """Name the file that is written in errors of the block: the system's error of a write that finds no room does not
    say to which file.

    Args:
        partial: a name that the file has until it is whole; nobody knows it.

    Raises:
        OSError: of the same number, with the file's name.
    """
    try:
        yield
    except OSError as e:
        unnamed = e.filename is None and e.errno in NO_ROOM
        if e.errno is not None and (unnamed or (partial is not None and e.filename == str(partial))):
            raise OSError(e.errno, os.strerror(e.errno), str(path)) from e
        raise


def os_error(error: OSError) -> str:
    """Spell out the system's error without its number, and what it happened to: the file, or the output."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    return f"standard output: {reason}" if error.errno in NO_ROOM else reason  # files have their names, see `naming`


def end_output(error: OSError) -> None:
    """Drop what is left in standard output's buffer after an error of it, where Python would try it again at exit
    and end with a status of its own."""
    if error.filename is None and error.errno in NO_ROOM:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def check_target(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written there, before the work that fills it.

    Raises:
        OSError: it is a folder, its folder does not exist, or one of the two must not be written to.
    """
    path = Path(path)
    number = 0
    if path.is_dir():
        number = errno.EISDIR
    elif not path.resolve().parent.is_dir():
        path, number = path.parent, errno.ENOENT
    elif not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        number = errno.EACCES
    if number:
        raise OSError(number, os.strerror(number), str(path))


def followed(path: str | os.PathLike[str]) -> Path:
    """Return the path that is written to: symbolic links stay and what they point to is replaced.

    Raises:
        OSError: the links lead in a circle.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def inherit(fd: int, old: os.stat_result | None) -> None:
    """Give a new file the mode of the one that it will replace, and its owner and group where the system allows.

    Args:
        fd: the new file.
        old: the state of the file to be replaced; None: nothing is replaced, the mode stays as it is.
    """
    if old is None:
        return
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def state_of(path: Path) -> os.stat_result | None:
    """Return the state of the file at this path, None if there is no such file."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write what shall be ``path``: a file beside it, which takes its place when the block ends.

    Should the block fail nothing is left of it, and what ``path`` was before stays. A device or a pipe is written to
    itself.

    Raises:
        OSError: with the name of the file, also where there is no room (``naming``).
    """
    path = Path(path)
    check_target(path)
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    path = followed(path)
    partial = beside(path)
    with naming(path, partial):
        old = state_of(path)
        fd = create_locked(partial, 0o600 if old is not None else 0o666)
    with _in_place_of(path, partial, fd):
        inherit(fd, old)
        yield partial


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write what shall be the new folder ``path``: a folder beside it, renamed when the block ends.

    Should the block fail nothing is left of it.

    Raises:
        FileExistsError: there is something of that name.
        OSError: with the name of the folder, also where there is no room (``naming``).
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    with _in_place_of(path, partial, create_locked(partial, 0o777, folder=True)):
        yield partial


# --- what is not whole yet --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_place_of(path: Path, partial: Path, fd: int) -> Iterator[None]:
    """Have a part take the place of `path` when the block ends; should that fail, nothing is left of the part."""
    try:
        with naming(path, partial):
            yield
        partial.replace(path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def beside(path: Path) -> Path:
    """Make a name for what is not whole yet, and remove what killed processes left of the same target."""
    stem = os.fsdecode(os.fsencode(path.name)[:200])  # the longest file name is 255 bytes
    remove_leftovers(path.parent, re.escape(stem))
    return path.with_name(f".{stem}.{secrets.token_hex(4)}{SUFFIX}")


def lock(fd: int) -> bool:
    """Mark a part as in use while this process lives. False if somebody else does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use; or the file system has no locks, then leftovers stay
        return False
    return True


def create_locked(path: Path, mode: int, *, folder: bool = False) -> int:
    """Create a new part and return its descriptor; it counts as in use until that is closed.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        if folder:
            path.mkdir(mode)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
        lock(fd)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process took it for a leftover before it was locked


def remove_leftovers(folder: Path, names: str) -> None:
    """Remove what killed processes left of files and folders. Whatever cannot be removed stays.

    Args:
        names: a regular expression for the names of the targets.
    """
    leftover = re.compile(rf"\.(?:{names})\.[0-9a-f]{{8}}{re.escape(SUFFIX)}")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if not leftover.fullmatch(entry.name) or not (is_folder or entry.is_file(follow_symlinks=False)):
                continue
            with contextlib.suppress(OSError):
                fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if not lock(fd):
                        continue
                    if is_folder:
                        shutil.rmtree(entry.path)
                    else:
                        os.unlink(entry.path)
                finally:
                    os.close(fd)
