"""Reading texts: files, lines of JSON, the corpus of a measurement, and escapes in what a user typed."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError


def read_text(file: Path) -> str:
    """Read a file's text without a byte order mark; decompress a .gz file.

    Raises:
        TilebeamError: it is not UTF-8, or not compressed as its name says.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise TilebeamError(f"{file} is not UTF-8 text.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TilebeamError(f"{file} is no complete gzip file: {error}.") from None


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of a .jsonl file's lines, from 1, and their values; empty lines are left out.

    Raises:
        TilebeamError: the file is not UTF-8, or a line is not JSON.
    """
    for number, line in enumerate(read_text(file).split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TilebeamError(f"{file} line {number} is not JSON: {error}.") from None


def escaped(text: str) -> str:
    """Write a text as it can be typed; `unescaped` gives it back."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_MEANING = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}  # the others stand for themselves


def unescaped(text: str) -> str:
    """Expand a text's escapes as llama.cpp's options do: ``\\n``, ``\\r``, ``\\t``, ``\\'``, ``\\"``, ``\\\\``, and
    ``\\x`` with two digits for a byte. Other backslashes stay.

    Raises:
        TilebeamError: the bytes are no UTF-8.
    """

    def meaning(found: re.Match[bytes]) -> bytes:
        return bytes.fromhex(found[1].decode()) if found[1] else _MEANING.get(found[2], found[2])

    try:
        return _ESCAPE.sub(meaning, text.encode("utf-8", "surrogateescape")).decode("utf-8")
    except UnicodeDecodeError:
        raise TilebeamError(f"{text!r} is not UTF-8 once its escapes (\\x..) are expanded.") from None
