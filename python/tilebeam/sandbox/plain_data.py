"""Values and messages that processes exchange: plain data as JSON, in frames with their length in front.

Whoever reads a frame has not seen who wrote it: nothing that is read runs code, and nothing longer than agreed is read.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

LONGEST = 64 << 20  # bytes of a message

# What the zygote is asked with: whether for a judge, whether confined; seconds of CPU time; bytes of memory. With it
# come descriptors: the control, the channel between program and judge, the program's output or the judge's verdicts.
REQUEST = struct.Struct("=??IQ")
END = struct.Struct("=id")  # what a control says at the end: the status that wait() gives, seconds of CPU time

Json = dict[str, Any]


def encoded(value: Any, iterators: list[Iterator[Any]] | None = None) -> Any:
    """Turn a value into JSON: what has no form there is an object of one key. Subclasses lose what they add.

    Args:
        iterators: takes the iterators found, which become their places in it; None: there may be none.

    Raises:
        TypeError: it is not data.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else {"int": [hex(value)]}  # digits would take quadratic time
    if isinstance(value, list):
        return [encoded(v, iterators) for v in value]
    for name, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return {name: [encoded(v, iterators) for v in parts(value)]}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy
        return encoded(value.tolist(), iterators)
    if isinstance(value, Integral):  # numbers of libraries, such as sympy's
        return encoded(int(value))
    if isinstance(value, Rational):
        return encoded(Fraction(int(value.numerator), int(value.denominator)))
    if isinstance(value, Real):
        return encoded(float(value))
    if iterators is not None and isinstance(value, Iterator):
        iterators.append(value)
        return {"iterator": [len(iterators) - 1]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def decoded(value: Any, iterator: Callable[[int], Iterator[Any]] | None = None) -> Any:
    """Turn JSON that `encoded` made into the value.

    Args:
        iterator: makes one of its place.

    Raises:
        ValueError: it is no such JSON; TypeError, KeyError and others, too.
    """
    if isinstance(value, list):
        return [decoded(v, iterator) for v in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    parts = [decoded(v, iterator) for v in parts]
    if name == "iterator" and iterator is not None:
        return iterator(*parts)
    return _KINDS[name][2](*parts)


# By name: the type, its parts, and what makes one of parts. A subclass stands before its base.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[..., Any]]] = {
    "int": (int, lambda v: [hex(v)], lambda text: int(text, 16)),
    "dict": (dict, lambda v: [[*item] for item in v.items()], lambda *items: dict(items)),
    "tuple": (tuple, list, lambda *v: v),
    "set": (set, list, lambda *v: set(v)),
    "frozenset": (frozenset, list, lambda *v: frozenset(v)),
    "deque": (deque, list, lambda *v: deque(v)),
    "keys": (type({}.keys()), list, lambda *v: dict.fromkeys(v).keys()),
    "values": (type({}.values()), list, lambda *v: dict(enumerate(v)).values()),
    "items": (type({}.items()), lambda v: [[*item] for item in v], lambda *v: dict(v).items()),
    "bytes": (bytes, lambda v: [v.decode("latin-1")], lambda text: text.encode("latin-1")),
    "bytearray": (bytearray, lambda v: [v.decode("latin-1")], lambda text: bytearray(text, "latin-1")),
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "fraction": (Fraction, lambda v: [v.numerator, v.denominator], Fraction),
    "decimal": (Decimal, lambda v: [str(v)], Decimal),
    "datetime": (datetime, lambda v: [v.isoformat()], datetime.fromisoformat),
    "date": (date, lambda v: [v.isoformat()], date.fromisoformat),
    "time": (time, lambda v: [v.isoformat()], time.fromisoformat),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], timedelta),
}


def framed(raw: bytes) -> bytes:
    """Put a message's length in front of it."""
    return len(raw).to_bytes(8) + raw


def as_json(message: Any) -> bytes:
    """Turn a message into JSON with its length in front."""
    return framed(json.dumps(message).encode())


def write(pipe: int, raw: bytes) -> None:
    """Write all of some bytes.

    Raises:
        OSError: nobody reads.
    """
    left = memoryview(raw)
    while left:
        left = left[os.write(pipe, left) :]


def send(pipe: int, message: Any) -> None:
    """Write a message as JSON.

    Raises:
        ValueError: it is longer than `LONGEST`; or it is no JSON. RecursionError, too.
        OSError: nobody reads.
    """
    raw = as_json(message)
    if len(raw) > LONGEST:
        raise ValueError("the message is too long")
    write(pipe, raw)


def receive(pipe: int) -> Any:
    """Read a message of at most `LONGEST` bytes.

    Raises:
        EOFError: the other side has ended.
        ValueError: the message is too long, or no JSON; RecursionError, too.
    """
    length = int.from_bytes(_exactly(pipe, 8))
    if length > LONGEST:
        raise ValueError("the message is too long")
    return json.loads(_exactly(pipe, length))


def _exactly(pipe: int, length: int) -> bytearray:
    raw = bytearray()
    while len(raw) < length:
        piece = os.read(pipe, min(length - len(raw), 1 << 20))
        if not piece:
            raise EOFError("the other side has ended")
        raw += piece
    return raw


def frames(raw: bytes) -> Iterator[bytes]:
    """Yield the whole messages, without their lengths, at the beginning of what came through a pipe."""
    while len(raw) >= 8 and len(raw) >= (end := 8 + int.from_bytes(raw[:8])):
        yield raw[8:end]
        raw = raw[end:]
