"""The syntax of llama.cpp's grammars: literals, classes of characters, repetitions that its parser takes."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_LENGTH = 64 << 10  # characters of a grammar

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Copies that one repetition of the parser may make; it has a limit of 2000.
_COPIES = 500


def literal(text: str) -> str:
    """Quote a text."""
    return '"' + "".join(_ESCAPES.get(c, c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'


def json_literal(value: Any) -> str:
    """Quote a value as JSON writes it."""
    return literal(json.dumps(value, ensure_ascii=False))


def spells(grammar: str, text: str) -> bool:
    """Tell whether a grammar has a text in its literals; those that follow each other are read as one."""
    return literal(text)[1:-1] in re.sub(r'"\s+"', "", grammar)


def in_class(code: int) -> str:
    """Write a character within brackets."""
    if chr(code) in '[]^-\\"' or code < 0x20 or 0x7F <= code <= 0xA0 or code >= 0x2000:
        return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
    return chr(code)


def either(*alternatives: str) -> str:
    """Group alternatives, without parentheses where there is one."""
    return alternatives[0] if len(alternatives) == 1 else f"( {' | '.join(alternatives)} )"


def repeated(item: str, least: int, most: int | None) -> str:
    """Repeat an item `least` to `most` times; None: any number.

    Large numbers are made of blocks, which the parser can hold: it copies what is repeated.

    Args:
        item: one symbol, or a group in parentheses.
    """
    more = f"{item}*" if most is None else _at_most(item, most - least)
    return f"{_exactly(item, least)} {more}".strip()


def _exactly(item: str, count: int) -> str:
    if count <= _COPIES:
        return "" if count == 0 else item if count == 1 else f"{item}{{{count}}}"
    blocks, rest = divmod(count, _COPIES)
    block = f"( {item}{{{_COPIES}}} )"
    return f"{_exactly(block, blocks)} {_exactly(item, rest)}".strip()


def _at_most(item: str, count: int) -> str:
    if count <= _COPIES:
        return "" if count == 0 else f"{item}?" if count == 1 else f"{item}{{0,{count}}}"
    blocks, rest = divmod(count, _COPIES)
    block = f"( {item}{{{_COPIES}}} )"
    fewer = f"{_at_most(block, blocks - 1)} {item}{{0,{_COPIES - 1}}}".strip()
    all_of_them = f"{_exactly(block, blocks)} {_at_most(item, rest)}".strip()
    return either(fewer, all_of_them)
