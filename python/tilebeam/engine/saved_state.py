"""KV cells of a text on disk.

A file is a head (magic, version, length), a description in JSON, token ids, llama.cpp's own bytes of the sequence, and
a digest of all of that. Nothing of it reaches llama.cpp before the digest, the model and the kind of cache are found to
be right.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tilebeam.engine.engine import Engine
from tilebeam.engine.kv_cache import Sequence
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_file

_MAGIC, VERSION = b"tilebeam state\n", 1
_HEAD = struct.Struct("<15sBQ")
_DIGEST = 32
_LONGEST_DESCRIPTION = 1 << 16


class DamagedState(TilebeamError):
    """A file that was read, and holds nothing that can be used."""


@dataclass(frozen=True)
class Origin:
    """What made the cells, and what alone can go on from them.

    Attributes:
        model: its fingerprint.
        name: of its file, for messages.
        cache: types of K and V and how they lie, such as "f16 f16 flash".
    """

    model: str
    name: str
    cache: str


@dataclass(frozen=True)
class SavedState:
    """Cells of a text.

    Attributes:
        origin: where they come from.
        tokens: int32, one for each cell.
        cells: uint8, llama.cpp's bytes of the sequence.
    """

    origin: Origin
    tokens: npt.NDArray[np.int32]
    cells: npt.NDArray[np.uint8]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, which appears when it is complete, for this user only: the tokens tell what was asked.

        Raises:
            TilebeamError: it cannot be written.
        """
        about = json.dumps(asdict(self.origin) | {"tokens": len(self.tokens), "bytes": len(self.cells)}).encode()
        parts = (_HEAD.pack(_MAGIC, VERSION, len(about)), about, self.tokens.data, self.cells.data)
        digest = hashlib.blake2b(digest_size=_DIGEST)
        try:
            with whole_file(path, private=True) as partial, partial.open("wb") as file:
                for part in parts:
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
        about = _description(data, path)
        start = _HEAD.size + about.pop("length")
        n_tokens, n_bytes = about.pop("tokens"), about.pop("bytes")
        end = start + 4 * n_tokens + n_bytes
        if len(data) != end + _DIGEST:
            raise DamagedState(f"{path} is damaged: it has {len(data)} bytes of {end + _DIGEST}.")
        if hashlib.blake2b(data[:end].data, digest_size=_DIGEST).digest() != data[end:].tobytes():
            raise DamagedState(f"{path} is damaged: its digest does not fit its content.")
        tokens = data[start : start + 4 * n_tokens].copy().view(np.int32)
        return cls(Origin(**about), tokens, data[start + 4 * n_tokens : end])


def tokens_in(path: str | os.PathLike[str]) -> list[int]:
    """Return the tokens that a file says it holds, without reading its cells.

    Raises:
        TilebeamError: it is missing, no such file, or its beginning is damaged.
    """
    try:
        with _opened(path) as file:
            head = np.frombuffer(file.read(_HEAD.size + _LONGEST_DESCRIPTION), np.uint8)
            about = _description(head, path)
            file.seek(_HEAD.size + about["length"])
            data = file.read(min(4 * about["tokens"], os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise TilebeamError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(data) != 4 * about["tokens"]:
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


def _description(data: npt.NDArray[np.uint8], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the file says of itself, and the length of that."""
    head = data[: _HEAD.size].tobytes()
    magic, version, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise DamagedState(f"{path} is no saved state of Tilebeam.")
    if version != VERSION:
        raise DamagedState(f"{path} has the format {version}, this version reads {VERSION}: save the state anew.")
    kinds = {"model": str, "name": str, "cache": str, "tokens": int, "bytes": int}
    try:
        text = data[_HEAD.size : _HEAD.size + min(length, _LONGEST_DESCRIPTION)].tobytes()
        about = json.loads(text)
        sound = about.keys() == kinds.keys() and all(type(about[k]) is kind for k, kind in kinds.items())
    except (ValueError, RecursionError, AttributeError):
        sound = False
    if not sound or about["tokens"] < 1 or about["bytes"] < 1:
        raise DamagedState(f"{path} is damaged: its description cannot be read.")
    return {**about, "length": length}


def cells_of(engine: Engine, tokens: list[int]) -> npt.NDArray[np.uint8]:
    """Return llama.cpp's bytes of a text whose cells are in the cache.

    Raises:
        TilebeamError: they are not, or llama.cpp does not give them.
    """
    kv = engine.kv
    source, shared = kv.longest_prefix(tokens, len(tokens))
    if source is None or shared < len(tokens):
        raise TilebeamError("The text's cells did not stay in the cache; load the model with a larger n_ctx.")
    engine.scheduler.vacate(0, 1, spare=source)
    seq = kv.fork(source, len(tokens))
    try:
        return engine.context.save_sequence(seq.id)
    finally:
        kv.close(seq)


def put_cells(engine: Engine, state: SavedState) -> Sequence:
    """Put the cells of a file into the cache as a sequence of the cache.

    Raises:
        TilebeamError: there is no room for them, or llama.cpp does not take them.
    """
    kv, count = engine.kv, len(state.tokens)
    if not engine.scheduler.vacate(count, 1):
        raise TilebeamError(
            f"The saved text has {count} tokens, {kv.free} KV cells are free: load the model with a larger n_ctx."
        )
    seq = kv.open()
    if not engine.context.load_sequence(seq.id, state.cells):
        kv.close(seq)
        raise TilebeamError("llama.cpp does not take the saved cells: they were made by another kind of cache.")
    kv.extend(seq, state.tokens.tolist())
    return seq
