"""Text from bytes that come piece by piece, against decoding them whole."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tilebeam.engine.detokenizer import Detokenizer


@given(st.text(), st.lists(st.integers(0, 400)))
def test_text_comes_out_whole_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    raw = text.encode("utf-8", "replace")
    text = raw.decode()
    stream = Detokenizer()
    edges = [0, *sorted(c for c in cuts if c < len(raw)), len(raw)]
    for a, b in pairwise(edges):
        assert not stream.feed(raw[a:b])
        assert text.startswith(stream.text)
    assert stream.text == text


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_first_stop_string_to_appear_cuts_the_text(text: str, stop: list[str]) -> None:
    stream = Detokenizer(stop)
    for byte in text.encode():
        if stream.feed(bytes([byte])):
            break
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    if not ends:
        assert (stream.stopped, stream.text) == (False, text)
    else:
        end = min(ends)[0]
        assert stream.stopped
        assert stream.text == text[: min(at for e, at in ends if e == end)]


def test_bytes_that_are_no_text_show_and_half_a_character_does_not() -> None:
    stream = Detokenizer()
    stream.feed(b"a\xff")
    stream.feed("é".encode()[:1])
    assert stream.text == "a\ufffd"
    stream.feed(b"b")
    assert stream.text == "a\ufffd\ufffdb"
