"""Output files that appear under their name only when they are complete, and errors that say which file it was.

``gguf_write.complete_file`` is for GGUF files, whose size is known before: it also makes sure of room, and syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], partial: Path | None = None) -> Iterator[None]:
    """Where this file is written: the system's error of a write that finds no room does not say to which file.

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
    """The system's error without its number, and what it happened to: the file, or the output."""
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason}"
    return f"standard output: {reason}" if error.errno in NO_ROOM else reason  # files have their names, see `naming`


def check_target(path: str | os.PathLike[str]) -> None:
    """Whether a file can be written there, before the work that fills it.

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


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what shall be ``path``: a file beside it, which takes its place when the block ends.

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
    path = path.resolve()  # a link stays one
    partial = path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.{secrets.token_hex(4)}.part")
    try:
        with naming(path, partial):
            yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
