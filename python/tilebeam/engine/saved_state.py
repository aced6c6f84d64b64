"""KV cells of a text on disk.

A file is a head (magic, version, what made the cells, counts), token ids, llama.cpp's own bytes of the sequence, and a
digest of all of that. Nothing of it reaches llama.cpp before the digest, the model and the kind of cache are found to
be right.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tilebeam.engine.engine import Engine
from tilebeam.engine.kv_cache import Sequence
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_file

_MAGIC, VERSION = b"tilebeam state\n", 2
_HEAD = struct.Struct("<15sB16sQQ")
_DIGEST = 32


class DamagedState(TilebeamError):
    """A file that was read, and holds nothing that can be used."""


@dataclass(frozen=True)
class SavedState:
    """Cells of a text.

    Attributes:
        maker: 16 hex digits for all that made the cells, which alone can go on from them: model, kind of cache, and
            llama.cpp.
        tokens: int32, one for each cell.
        cells: uint8, llama.cpp's bytes of the sequence.
    """

    maker: str
    tokens: npt.NDArray[np.int32]
    cells: npt.NDArray[np.uint8]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, which appears when it is complete, for this user only: the tokens tell what was asked.

        Raises:
            TilebeamError: it cannot be written.
        """
        head = _HEAD.pack(_MAGIC, VERSION, self.maker.encode(), len(self.tokens), len(self.cells))
        digest = hashlib.blake2b(digest_size=_DIGEST)
        try:
            with whole_file(path, private=True) as partial, partial.open("wb") as file:
                for part in (head, self.tokens.data, self.cells.data):
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
        except OSError as error:
            raise TilebeamError(f"{path} cannot be written: {error.strerror or error}.") from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SavedState:
        """Read the file's content.

        Raises:
            TilebeamError: it is missing, no such file, or damaged.
        """
        try:
            with _opened(path) as file:
                data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise TilebeamError(f"{path} cannot be read: {error.strerror or error}.") from None
        maker, n_tokens, n_bytes = _head(data[: _HEAD.size].tobytes(), path)
        start = _HEAD.size + 4 * n_tokens
        if len(data) != start + n_bytes + _DIGEST:
            raise DamagedState(f"{path} is damaged: it has {len(data)} bytes of {start + n_bytes + _DIGEST}.")
        if hashlib.blake2b(data[:-_DIGEST].data, digest_size=_DIGEST).digest() != data[-_DIGEST:].tobytes():
            raise DamagedState(f"{path} is damaged: its digest does not fit its content.")
        return cls(maker, data[_HEAD.size : start].copy().view(np.int32), data[start:-_DIGEST])


def tokens_in(path: str | os.PathLike[str]) -> list[int]:
    """Return the tokens that a file says it holds, without reading its cells.

    Raises:
        TilebeamError: it is missing, no such file, or its beginning is damaged.
    """
    try:
        with _opened(path) as file:
            _, n_tokens, _ = _head(file.read(_HEAD.size), path)
            data = file.read(min(4 * n_tokens, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise TilebeamError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(data) != 4 * n_tokens:
        raise DamagedState(f"{path} is damaged: it ends within its tokens.")
    return [int(token) for token in np.frombuffer(data, np.int32)]


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. A pipe would wait for a writer, and a device need not end.

    Raises:
        TilebeamError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise TilebeamError(f"{path} is not a regular file.")


def _head(data: bytes, path: str | os.PathLike[str]) -> tuple[str, int, int]:
    """Return what made a file's cells, and how many tokens and bytes of cells it holds."""
    if len(data) != _HEAD.size or not data.startswith(_MAGIC):
        raise DamagedState(f"{path} is no saved state of Tilebeam.")
    _, version, maker, n_tokens, n_bytes = _HEAD.unpack(data)
    if version != VERSION:
        raise DamagedState(f"{path} has the format {version}, this version reads {VERSION}.")
    if not n_tokens or not n_bytes:
        raise DamagedState(f"{path} is damaged: it holds no cells.")
    return maker.decode("ascii", "replace"), n_tokens, n_bytes


def put_cells(engine: Engine, state: SavedState) -> Sequence:
    """Put the cells of a file into the cache, which has room for them, as a sequence of the cache.

    Raises:
        TilebeamError: llama.cpp does not take them.
    """
    kv = engine.kv
    seq = kv.open()
    if not engine.context.load_sequence(seq.id, state.cells):
        kv.close(seq)
        raise TilebeamError("llama.cpp does not take the saved cells: they were made by another kind of cache.")
    kv.extend(seq, state.tokens.tolist())
    return seq
