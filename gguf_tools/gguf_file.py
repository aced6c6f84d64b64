"""Strict GGUF reader: everything in the header is checked before it is believed.

Keeps each key-value pair's raw bytes, so that a file written from them has the very metadata of its source. Reads
with ``pread``, the header as far as it turns out to go and tensors in pieces: never holds a whole file, and a file
that is cut while it is read is an error, not a SIGBUS. Counts and sizes have limits far above real models', so that a
lying header costs bounded time and memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from .closing import Closing
from .errors import GGUFError

Bytes = npt.NDArray[np.uint8]
Q = gguf.GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_NAME = 63  # bytes, as ggml
MAX_KEY = 65535  # bytes, as the format's document
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 48
MAX_HEADER = 64 << 20  # bytes; the largest real ones, vocabulary and merges, have about 20 MiB
MAX_ENTRIES = 1 << 16  # keys, and tensors
READ_AHEAD = 1 << 18
ARCHITECTURE = re.compile(r"[A-Za-z0-9_.+-]{1,64}")

STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
# value type -> struct format, which numpy knows too
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def pad(n: int, alignment: int) -> int:
    """Return ``n`` rounded up to a multiple of ``alignment``."""
    return -(-n // alignment) * alignment


def is_alignment(n: int) -> bool:
    """Tell whether the tensors of a file may begin at multiples of so many bytes."""
    return 0 < n <= MAX_ALIGNMENT and n & (n - 1) == 0


class _Cursor:
    """Bounds-checked reads from the start of a file, which is read as far as they go."""

    def __init__(self, data: bytearray, end: int, name: str, more: Callable[[int, int], Bytes] | None = None) -> None:
        """Read from ``data``, the first bytes of ``end``; ``more(offset, n)`` reads further ones."""
        self.data, self.end, self.name, self.more, self.pos = data, end, name, more, 0

    def fill(self, upto: int) -> None:
        """Have the bytes before ``upto``."""
        if upto > self.end:
            raise GGUFError(f"{self.name} is truncated: its header goes on to byte {upto}, the file has {self.end}")
        if upto <= len(self.data):
            return
        if upto > MAX_HEADER:
            raise GGUFError(f"{self.name}: a header of more than {MAX_HEADER >> 20} MiB")
        assert self.more is not None
        n = min(max(upto - len(self.data), READ_AHEAD), self.end - len(self.data))
        self.data += self.more(len(self.data), n).data

    def need(self, n: int) -> int:
        """Return position of the next ``n`` bytes, which are skipped."""
        at = self.pos
        self.fill(at + n)
        self.pos = at + n
        return at

    def number(self, fmt: str) -> Any:
        return struct.unpack_from("<" + fmt, self.data, self.need(struct.calcsize("<" + fmt)))[0]

    def string(self, limit: int, what: str) -> str:
        n = self.number("Q")
        if n > limit:
            raise GGUFError(f"{self.name}: {what} claims {n} bytes, at most {limit} are allowed")
        at = self.need(n)
        try:
            return bytes(self.data[at : at + n]).decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self.name}: {what} is not UTF-8") from None

    def value(self, type: int, key: str) -> Any:
        """Read a value; an array gives None (its bounds are checked, see :meth:`KeyValue.value`)."""
        if type == STRING:
            n = self.number("Q")
            at = self.need(n)
            return bytes(self.data[at : at + n]).decode("utf-8", "replace")
        if type == ARRAY:
            return self.skip_array(key)
        if type not in SCALARS:
            raise GGUFError(f"{self.name}: key {key!r} has the unknown value type {type}")
        v = self.number(SCALARS[type])
        if type == BOOL and v > 1:
            raise GGUFError(f"{self.name}: key {key!r} is a bool of value {v}")
        return bool(v) if type == BOOL else v

    def skip_array(self, key: str) -> None:
        type, n = self.number("I"), self.number("Q")
        if type == STRING:
            if n > (self.end - self.pos) // 8:
                raise GGUFError(f"{self.name} is truncated: key {key!r} claims {n} strings")
            unpack, pos, have = struct.Struct("<Q").unpack_from, self.pos, len(self.data)
            for _ in range(n):
                if pos + 8 > have:
                    self.fill(pos + 8)
                    have = len(self.data)
                pos += 8 + unpack(self.data, pos)[0]
            self.fill(pos)
            self.pos = pos
        elif type in SCALARS:
            self.need(n * struct.calcsize("<" + SCALARS[type]))
        else:
            raise GGUFError(f"{self.name}: key {key!r} is an array of the unsupported type {type}")


@dataclass(frozen=True)
class KeyValue:
    """A metadata entry. ``raw`` is the whole record as in the file; ``body`` where its value begins in it."""

    key: str
    type: int
    raw: bytes
    body: int

    @property
    def value(self) -> Any:
        """The value; arrays as lists. Bytes that are not UTF-8 in strings are replaced."""
        c = _Cursor(bytearray(self.raw), len(self.raw), self.key)
        c.pos = self.body
        if self.type != ARRAY:
            return c.value(self.type, self.key)
        type, n = c.number("I"), c.number("Q")
        if type == STRING:
            return [c.value(STRING, self.key) for _ in range(n)]
        values = np.frombuffer(self.raw, np.dtype("<" + SCALARS[type]), n, c.pos)
        return values.astype(bool).tolist() if type == BOOL else values.tolist()

    @property
    def array(self) -> tuple[int, int] | None:
        """``(element type, length)`` of an array, without reading its elements; None for any other value."""
        return None if self.type != ARRAY else struct.unpack_from("<IQ", self.raw, self.body)


def value_of(kv: Mapping[str, KeyValue], key: str) -> Any:
    """Return the value under a key, None if there is none."""
    found = kv.get(key)
    return None if found is None else found.value


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: ``ne`` as ggml counts (fastest first), ``offset`` and ``nbytes`` absolute in the file."""

    name: str
    type: gguf.GGMLQuantizationType
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0  # which file of a split model

    @property
    def k(self) -> int:
        """Elements of a row."""
        return self.ne[0]

    @property
    def rows(self) -> int:
        """All rows, over all further dimensions."""
        return math.prod(self.ne[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of `k` elements in the file."""
        return self.nbytes // self.rows


def tensor_bytes(type: gguf.GGMLQuantizationType, ne: tuple[int, ...]) -> int:
    """Return size of a tensor; ``ne[0]`` must be whole blocks."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    return math.prod(ne) // int(block) * int(size)


class GGUFFile(Closing):
    """An open GGUF file, header parsed and checked.

    Raises:
        GGUFError: the file is not a GGUF, is damaged or truncated, or has something this reader does not know.
        OSError: it cannot be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # a named pipe would wait for a writer
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError(f"{self.path} is not a regular file")
            self.size, self._modified = status.st_size, status.st_mtime_ns
            if self.size == 0:
                raise GGUFError(f"{self.path} is empty")
            self._parse(_Cursor(bytearray(), self.size, str(self.path), self.read))
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the file; what was read of it stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _parse(self, c: _Cursor) -> None:
        c.fill(min(9, c.end))
        magic = bytes(c.data[:4])
        if magic != MAGIC:
            if c.end > 8 and not any(c.data[5:8]) and c.data[8:9] == b"{":  # the length of a header, and the JSON of it
                raise GGUFError(f"{self.path} is a safetensors file: convert it with llama.cpp's convert_hf_to_gguf.py")
            raise GGUFError(f"{self.path} is not a GGUF file (it begins with {magic!r})")
        c.pos = 4
        self.version = c.number("I")
        if self.version not in VERSIONS:
            if self.version & 0xFFFF == 0:
                raise GGUFError(f"{self.path} is a big-endian GGUF, which is not supported")
            raise GGUFError(f"{self.path} has GGUF version {self.version}; 2 and 3 are supported")
        n_tensors, n_kv = c.number("Q"), c.number("Q")
        # the smallest key-value pair has 13 bytes, the smallest tensor 33: a larger count cannot be true
        if n_kv * 13 + n_tensors * 33 > c.end:
            raise GGUFError(f"{self.path} is truncated: it claims {n_kv} metadata keys and {n_tensors} tensors")
        if max(n_kv, n_tensors) > MAX_ENTRIES:
            raise GGUFError(f"{self.path}: {n_kv} metadata keys and {n_tensors} tensors, at most {MAX_ENTRIES} of each")
        self.kv: dict[str, KeyValue] = {}
        for _ in range(n_kv):
            self._parse_kv(c)
        self.alignment = self._alignment()
        infos = self._parse_tensors(c, n_tensors)
        self.header_end = c.pos
        self.data_start = pad(c.pos, self.alignment)
        self.tensors: dict[str, TensorInfo] = {}
        expected = 0
        for name, type, ne, offset in infos:
            # ggml takes no other order either, so offsets need not be kept
            if offset != expected:
                raise GGUFError(f"{self.path}: tensor {name!r} has offset {offset}, expected {expected}")
            t = TensorInfo(name, type, ne, self.data_start + offset, tensor_bytes(type, ne))
            if t.offset + t.nbytes > self.size:
                raise GGUFError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {t.offset + t.nbytes}, the file has "
                    f"{self.size}"
                )
            self.tensors[name] = t
            expected += pad(t.nbytes, self.alignment)

    def _parse_kv(self, c: _Cursor) -> None:
        start = c.pos
        key = c.string(MAX_KEY, "a metadata key")
        type = c.number("I")
        body = c.pos - start
        c.value(type, key)
        if not key or key in self.kv:
            raise GGUFError(f"{self.path}: metadata key {key!r} is empty or occurs twice")
        self.kv[key] = KeyValue(key, type, bytes(c.data[start : c.pos]), body)

    def _alignment(self) -> int:
        kv = self.kv.get("general.alignment")
        if kv is None:
            return DEFAULT_ALIGNMENT
        a = kv.value if kv.type == UINT32 else 0
        if not is_alignment(a):
            raise GGUFError(f"{self.path}: general.alignment is not a power of two up to {MAX_ALIGNMENT}")
        return int(a)

    def _parse_tensors(self, c: _Cursor, n: int) -> list[tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]]:
        found, names = [], set()
        for _ in range(n):
            name = c.string(MAX_NAME, "a tensor name")
            if not name or name in names:
                raise GGUFError(f"{self.path}: tensor name {name!r} is empty or occurs twice")
            names.add(name)
            n_dims = c.number("I")
            if not 1 <= n_dims <= MAX_DIMS:
                raise GGUFError(f"{self.path}: tensor {name!r} has {n_dims} dimensions")
            ne = tuple(c.number("Q") for _ in range(n_dims))
            elements = 1
            for d in ne:
                elements *= d
                if d == 0 or elements > MAX_ELEMENTS:
                    raise GGUFError(f"{self.path}: tensor {name!r} has the impossible shape {list(ne)}")
            number, offset = c.number("I"), c.number("Q")
            try:
                type = Q(number)
                block, _ = gguf.GGML_QUANT_SIZES[type]
            except (ValueError, KeyError):
                raise GGUFError(f"{self.path}: tensor {name!r} has the unknown type {number}") from None
            if ne[0] % block != 0:
                raise GGUFError(f"{self.path}: tensor {name!r} has rows of {ne[0]}, not whole {type.name} blocks")
            found.append((name, type, ne, offset))
        return found

    @cached_property
    def architecture(self) -> str:
        """``general.architecture``. Raises GGUFError if it is missing or no name."""
        return self.name("general.architecture")

    def name(self, key: str) -> str:
        """Return the name of an architecture. Raises GGUFError if the key is missing or the value no name."""
        name = self.text(key)
        if not ARCHITECTURE.fullmatch(name):
            raise GGUFError(f"{self.path}: {key} is {name[:60]!r}, which is not a valid name")
        return name

    def text(self, key: str) -> str:
        """Return a string value. Raises GGUFError if the key is missing or no string."""
        return str(self._typed(key, STRING, "text"))

    def number(self, key: str) -> int:
        """Return an unsigned 32-bit value. Raises GGUFError if the key is missing or of another type."""
        return int(self._typed(key, UINT32, "number"))

    def truth(self, key: str) -> bool:
        """Return a boolean. Raises GGUFError if the key is missing or of another type."""
        return bool(self._typed(key, BOOL, "boolean"))

    def _typed(self, key: str, type: int, what: str) -> Any:
        kv = self.kv.get(key)
        if kv is None or kv.type != type:
            raise GGUFError(f"{self.path}: the metadata has no {what} {key!r}")
        return kv.value

    def read(self, offset: int, n: int) -> Bytes:
        """Return ``n`` bytes at ``offset`` as uint8. Raises GGUFError if the file has become shorter."""
        out = np.empty(n, np.uint8)
        self.read_into(offset, out)
        return out

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill ``out``, contiguous, with the bytes at ``offset``. Raises GGUFError as :meth:`read` does."""
        view, n, done = out.data, out.size, 0
        while done < n:
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if got == 0:
                raise GGUFError(f"{self.path} became shorter while it was read")
            done += got

    def read_tensor(self, t: TensorInfo, at: int, out: Bytes) -> None:
        """Fill ``out`` with a tensor's bytes from its byte ``at`` on."""
        self.read_into(t.offset + at, out)

    def require_unchanged(self) -> None:
        """Raise GGUFError if the file was written to since it was opened."""
        status = os.fstat(self.fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._modified):
            raise GGUFError(f"{self.path} was changed while it was read")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that the tensors lie in."""
        return (self.path,)

    def padding(self) -> Iterator[tuple[int, int]]:
        """Yield ``(offset, length)`` of the gaps that alignment leaves, the last one up to the file's end."""
        at = self.header_end
        for t in self.tensors.values():
            yield at, t.offset - at
            at = t.offset + t.nbytes
        yield at, self.size - at
