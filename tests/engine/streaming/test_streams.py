"""Texts while they grow: what deltas make up, and that a stream which is given up loses no KV cell."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from streaming_kit import LONG, PROMPT, add_up, idle, tokens
from tilebeam import LM, SamplingParams, Stream, TilebeamError
from tilebeam.engine.detokenizer import Detokenizer


@pytest.mark.parametrize("n", [1, 3, 11])
def test_deltas_make_up_the_samples(lm: LM, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=25, seed=5, logprobs=True, top_logprobs=3)
    expected = lm.generate(PROMPT, params)[0]
    stream = lm.stream(PROMPT, params)
    with pytest.raises(TilebeamError, match="not ended"):
        _ = stream.output
    deltas = list(stream)
    assert len(deltas) >= sum(len(s.token_ids) for s in expected.outputs) - n
    for got, s in zip(add_up(deltas, n), expected.outputs, strict=True):
        assert (got["text"], got["ids"], got["end"]) == (s.text, s.token_ids, (s.finish_reason, s.stop_reason))
        np.testing.assert_allclose(got["logprobs"], s.logprobs, atol=1e-4)
        assert [list(t) for t in got["top"]] == [list(t) for t in s.top_logprobs or []]
    assert [s.token_ids for s in stream.output.outputs] == [s.token_ids for s in expected.outputs]
    assert stream.output.usage.completion_tokens == expected.usage.completion_tokens
    assert list(stream) == []
    assert idle(lm)


def test_text_is_held_back_only_where_it_may_be_cut() -> None:
    stream = Detokenizer(["aab", "xyz"])
    shown = []
    for piece in ("a", "a", "a", "x", "y", "a", "aq", "xyz"):
        stream.feed(piece.encode())
        shown.append(stream.stable_length())
    assert shown == [0, 0, 1, 3, 3, 5, 8, 8]
    assert stream.text == "aaaxyaaq"
    split = Detokenizer()
    split.feed("é".encode()[:1])
    assert (split.text, split.stable_length()) == ("", 0)
    split.feed("é".encode()[1:])
    assert (split.text, split.stable_length()) == ("é", 1)


def test_bad_requests_are_refused_at_once(lm: LM) -> None:
    with pytest.raises(TilebeamError, match="no tokens"):
        lm.stream([])
    with pytest.raises(TilebeamError, match="grammar"):
        lm.stream(PROMPT, SamplingParams(grammar="root ::= nothing"))
    assert idle(lm)


def leave(stream: Stream) -> None:
    """Read three deltas and drop the iterator."""
    for i, _ in enumerate(stream):
        if i == 2:
            break


@pytest.mark.parametrize("how", ["cancel", "with", "drop"])
def test_a_stream_given_up_frees_its_cells(lm: LM, how: str) -> None:
    expected = tokens(lm, PROMPT, LONG)
    if how == "cancel":
        stream = lm.stream(PROMPT, LONG)
        leave(stream)
        stream.cancel()
        stream.cancel()
        rest = list(stream)
        assert [d.finish_reason for d in rest if d.finish_reason] == ["aborted", "aborted"]
        output = stream.output
        assert [s.finish_reason for s in output.outputs] == ["aborted"] * 2
        for sample, whole in zip(output.outputs, expected, strict=True):
            assert 0 < len(sample.token_ids) < len(whole)
            assert sample.token_ids == whole[: len(sample.token_ids)]
            assert sample.text == lm.detokenize(sample.token_ids).rstrip("\ufffd")
    elif how == "with":
        with lm.stream(PROMPT, LONG) as stream:
            leave(stream)
        assert [s.finish_reason for s in stream.output.outputs] == ["aborted"] * 2
    else:
        leave(lm.stream(PROMPT, LONG))
        gc.collect()
    assert idle(lm)
    assert tokens(lm, PROMPT, LONG) == expected
