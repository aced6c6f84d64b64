"""Writes GGUF: raw key-value records, tensor headers, and an output file that exists only when it is complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import gguf

from .errors import GGUFError
from .gguf_file import ARRAY, BOOL, MAGIC, STRING, UINT32, pad, tensor_bytes
from .whole_file import NO_ROOM, beside, create_locked, followed, inherit, lock, naming, state_of, whole_file


def _string(s: str) -> bytes:
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def kv_text(key: str, value: str) -> bytes:
    """Make a string record."""
    return _string(key) + struct.pack("<I", STRING) + _string(value)


def kv_u32(key: str, value: int) -> bytes:
    """Make an unsigned 32-bit record."""
    return _string(key) + struct.pack("<II", UINT32, value)


def kv_bool(key: str, value: bool) -> bytes:
    """Make a bool record."""
    return _string(key) + struct.pack("<IB", BOOL, value)


def kv_texts(key: str, values: Iterable[str]) -> bytes:
    """Make a record of an array of strings."""
    items = [_string(v) for v in values]
    return _string(key) + struct.pack("<IIQ", ARRAY, STRING, len(items)) + b"".join(items)


def kv_u32s(key: str, values: Iterable[int]) -> bytes:
    """Make a record of an array of unsigned 32-bit numbers."""
    items = list(values)
    return _string(key) + struct.pack(f"<IIQ{len(items)}I", ARRAY, UINT32, len(items), *items)


def tensor_header(name: str, type: gguf.GGMLQuantizationType, ne: tuple[int, ...], offset: int) -> bytes:
    """Return one tensor's entry in the header; ``offset`` counts from the start of the data."""
    return _string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type, offset)


def header(
    version: int,
    kv: Iterable[bytes],
    tensors: Iterable[tuple[str, gguf.GGMLQuantizationType, tuple[int, ...]]],
    alignment: int,
) -> tuple[bytes, list[int], int]:
    """Make a whole header, padded.

    Returns:
        Its bytes; each tensor's absolute offset; the file's whole size.
    """
    records, infos = list(kv), list(tensors)
    parts, offsets, offset = [], [], 0
    for name, type, ne in infos:
        parts.append(tensor_header(name, type, ne, offset))
        offsets.append(offset)
        offset += pad(tensor_bytes(type, ne), alignment)
    head = MAGIC + struct.pack("<IQQ", version, len(infos), len(records)) + b"".join(records) + b"".join(parts)
    start = pad(len(head), alignment)
    return head.ljust(start, b"\0"), [start + o for o in offsets], start + offset


@contextlib.contextmanager
def small_gguf(path: str | os.PathLike[str], architecture: str) -> Iterator[gguf.GGUFWriter]:
    """Yield a writer of the gguf package for a file whose tensors fit into memory; it writes all that was added when
    the block ends, and the file appears when it is complete.

    Raises:
        OSError: as :func:`whole_file`.
    """
    with whole_file(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        try:
            yield writer
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Find the system call, which Python does not offer; None where there is none."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: Callable[[int, int, int, int], int] = call
    return found


def start_writeback(fd: int, offset: int, n: int) -> None:
    """Let the disk begin with bytes just written while the next ones are made, so that the sync at the end is short.

    Only a hint: file systems that cannot do it are left alone, and errors are for the sync to report.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, n, SYNC_FILE_RANGE_WRITE)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "file exists; overwrite=True replaces it", str(path))


@contextlib.contextmanager
def complete_file(
    path: Path, size: int, *, sources: Iterable[Path] = (), overwrite: bool = False
) -> Iterator[BinaryIO]:
    """Open an output file of ``size`` bytes that gets its name only when the block ends without an exception.

    Written in the target's folder without a name where the file system can do that, so that even a killed process
    leaves nothing; else under a temporary name, removed on failure, or by the next run for the same target. Synced,
    then renamed over the target.

    Args:
        overwrite: replace a file that has this name, which hands its mode on. A symbolic link stays, and the file it
            points to is replaced.

    Raises:
        GGUFError: the target is one of the ``sources``, or not a regular file.
        FileExistsError: the target exists, or came into being meanwhile, and ``overwrite`` is off.
        OSError: no space, no permission, no such folder.
    """
    given = Path(path)
    if given.exists():
        if any(os.path.samefile(given, s) for s in sources):
            raise GGUFError(f"{given} is the source itself; give another output name")
        if not given.is_file():
            raise GGUFError(f"{given} exists and is not a regular file")
        if not overwrite:
            raise _exists(given)
    path = followed(given)
    folder = path.parent if given.is_symlink() else given.parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    temporary = beside(path)
    old = state_of(path)
    with naming(given, temporary):
        fd, named = _open_output(temporary, 0o666 if old is None else 0o600)
    try:
        with naming(given), os.fdopen(fd, "w+b") as f:
            inherit(fd, old)
            # no space is found out now, not after minutes of work
            try:
                os.posix_fallocate(f.fileno(), 0, size)
            except OSError as e:
                if e.errno in NO_ROOM:
                    raise OSError(e.errno, f"{os.strerror(e.errno)}: {size} bytes are needed", str(given)) from None
                f.truncate(size)
            yield f
            f.flush()
            os.fsync(f.fileno())
            if not named:
                # src_dir_fd makes Python call linkat, which follows the link in /proc; link would not
                os.link(f"/proc/self/fd/{f.fileno()}", temporary, src_dir_fd=f.fileno(), follow_symlinks=True)
            # while it is open, and locked: to others it would be a leftover of the same target
            if overwrite:
                temporary.replace(path)
            else:
                _rename_if_free(temporary, path, given)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _rename_if_free(temporary: Path, path: Path, given: Path) -> None:
    """Rename, but not over a file that came into being meanwhile: a link is made only where nothing is.

    Args:
        given: how the user named the path, for the error.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _exists(given) from None
    except OSError:  # a file system without hard links; what is made in this very moment is lost
        if path.exists():
            raise _exists(given) from None
        temporary.replace(path)
    else:
        temporary.unlink()


def _open_output(temporary: Path, mode: int) -> tuple[int, bool]:
    """Open a new file, locked: ``(descriptor, has it a name)``; nameless if the file system and /proc allow it."""
    if os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = os.open(temporary.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
            lock(fd)
            return fd, False
    return create_locked(temporary, mode), True
