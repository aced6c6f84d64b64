"""Values as JSON and back, and messages in pipes."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebeam.sandbox.plain_data import LONGEST, as_json, decoded, encoded, framed, frames, receive

hashable = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.dates() | st.datetimes() | st.times() | st.timedeltas() | st.fractions() | st.decimals(allow_nan=False)
    | st.complex_numbers(allow_nan=False) | st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)


@given(values)
def test_values_come_back(value: Any) -> None:
    back = decoded(json.loads(json.dumps(encoded(value))))
    assert back == value
    assert type(back) is type(value)


def test_what_is_no_data_is_refused() -> None:
    for value in (object(), print, type, iter([]), [lambda: 0], {1: object()}):
        with pytest.raises(TypeError, match="is not plain data"):
            encoded(value)
    found: list[Any] = []
    assert encoded([iter("ab")], found) == [{"iterator": [0]}]
    assert list(found[0]) == ["a", "b"]
    assert math.isnan(decoded(encoded(float("nan"))))


@pytest.mark.parametrize(
    "raw", [{"any": []}, {}, {"int": ["1"], "tuple": []}, {"iterator": [0]}, {"tuple": 1}, {"dict": [1]}, {"set": [[]]}]
)
def test_what_is_no_such_json_is_refused(raw: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decoded(raw)


def test_messages_in_pieces() -> None:
    raw = as_json({"a": 1}) + framed(b"") + framed(b"xyz")
    assert list(frames(raw)) == [b'{"a": 1}', b"", b"xyz"]
    for end in range(len(raw)):
        assert list(frames(raw[:end])) == [b'{"a": 1}', b"", b"xyz"][: (end >= 16) + (end >= 24)]
    assert list(frames(b"\xff" * 99)) == []


def test_a_message_that_is_too_long_is_not_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, (LONGEST + 1).to_bytes(8) + b"1")
    with pytest.raises(ValueError, match="too long"):
        receive(reading)
    os.write(writing, (5).to_bytes(8) + b"1")
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    with pytest.raises(EOFError):
        receive(reading)
    os.close(reading)
