"""Look-up: guesses are what followed the last tokens where they stood before, the longest match first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebeam.engine.lookup import Guess, Lookup, TextIndex
from tilebeam.engine.request import Request, Sample
from tilebeam.outputs import Progress
from tilebeam.sampling_params import SamplingParams


def request(prompt: list[int], n: int = 1) -> Request:
    made = Request("", prompt, SamplingParams(n=n), 0, Progress(), unfinished=n)
    made.samples = [Sample(made, i, i) for i in range(n)]
    return made


def guess(prompt: list[int], *texts: list[int], most: int = 8) -> Guess:
    """For the first sample; the texts of all grow one token at a time, looked at each time."""
    lookup, r = Lookup(), request(prompt, len(texts))
    for i in range(max(map(len, texts))):
        for sample, text in zip(r.samples, texts, strict=True):
            sample.tokens += text[i : i + 1]
        found = lookup.guess([(s, most) for s in r.samples])[0]
    return found


def test_a_prompt_that_comes_again_is_guessed_to_its_end() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 50]
    found = guess(prompt, [1, 2, 3], most=5)
    assert found.tokens == [4, 5, 6, 7, 8]
    assert found.signs == [(3, 2), (4, 2), (5, 2), (6, 2), (7, 2)]
    assert guess(prompt, [1, 2], most=20).tokens == [3, 4, 5, 6, 7, 8, 9, 10, 50]


def test_without_two_known_tokens_there_is_no_guess() -> None:
    assert guess([1, 2, 3], [9, 3]) == Guess()
    assert guess([1, 2, 3], [2]).tokens == []
    assert guess([3], [9, 3]) == Guess()


def test_the_longest_match_leads() -> None:
    prompt = [1, 2, 3, 4, 5, 70, 9, 3, 4, 5, 80, 8, 3, 4, 5, 90]
    for before, after in ((2, 70), (9, 80), (8, 90)):
        assert guess(prompt, [before, 3, 4, 5]).tokens[0] == after


def test_of_equal_matches_most_votes_win_and_disagreement_is_told() -> None:
    prompt = [1, 2, 70, 60, 1, 2, 80, 61, 1, 2, 70, 62]
    found = guess(prompt, [5, 1, 2])
    assert found.tokens[0] == 70
    assert found.signs[0] == (2, 1)  # two of three
    assert found.signs[1][1] == 0  # 60 and 62, one each


def test_other_samples_and_earlier_requests_are_read() -> None:
    sibling = [11, 12, 13, 14, 15, 16]
    lookup, r = Lookup(), request([5], 2)
    r.samples[1].tokens = sibling
    r.samples[0].tokens = [9, 11, 12]
    assert lookup.guess([(s, 3) for s in r.samples])[0].tokens == [13, 14, 15]
    r.unfinished = 0
    for sample in r.samples:
        lookup.finished(sample)
    later = request([6])
    later.samples[0].tokens = [12, 13]
    assert lookup.guess([(later.samples[0], 3)])[0] == Guess()  # of other requests two tokens are too few
    later.samples[0].tokens = [12, 13, 14, 15]
    assert lookup.guess([(later.samples[0], 3)])[0].tokens == [16]


def test_each_token_is_indexed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many samples a prompt has: each reads its own text, and all of them the one index."""
    indexed, add = [], TextIndex.add

    def counted(self: TextIndex, text: list[int], start: int, before: Sequence[int] = ()) -> None:
        indexed.append(len(text) - start)
        add(self, text, start, before)

    monkeypatch.setattr(TextIndex, "add", counted)
    lookup, r = Lookup(), request(list(range(50)), 4)
    for i in range(20):
        for sample in r.samples:
            sample.tokens.append(i)
        lookup.guess([(sample, 4) for sample in r.samples])
    assert sum(indexed) == 50 + 4 * 20


def test_what_is_kept_of_earlier_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebeam.engine.lookup._HISTORY", 100)
    lookup = Lookup()
    for i in range(50):
        r = request([1])
        r.samples[0].tokens = list(range(10 * i, 10 * i + 10))
        r.unfinished = 0
        lookup.guess([(r.samples[0], 1)])
        lookup.finished(r.samples[0])
        assert lookup._history.size + lookup._older.size <= 100 + 10
    assert not lookup._requests
    r = request([1])
    r.samples[0].tokens = [490, 491, 492, 493]
    assert lookup.guess([(r.samples[0], 2)])[0].tokens == [494, 495]
    r.samples[0].tokens = [0, 1, 2, 3]
    assert lookup.guess([(r.samples[0], 2)])[0] == Guess()


def longest_matches(prompt: list[int], texts: list[list[int]], n: int) -> dict[int, int]:
    """By brute force: what followed the last n tokens, and the longest match before it, which counts in one text."""
    tail, found = (prompt + texts[0])[-16:], dict[int, int]()
    for before, text in [([], prompt), *((prompt, text) for text in texts)]:
        for at in range(len(text)):
            if len(tail) >= n and (before + text[:at])[-n:] == tail[-n:]:
                alike = [text[at - 1 - i] == tail[-1 - i] for i in range(min(at, len(tail)))]
                length = max(n, [*alike, False].index(False))
                found[text[at]] = max(length, found.get(text[at], 0))
    return found


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=3),
)
def test_first_guesses_are_those_of_brute_force(prompt: list[int], texts: list[list[int]]) -> None:
    lookup, r = Lookup(), request(prompt, len(texts))
    for sample, text in zip(r.samples, texts, strict=True):
        sample.tokens = text
    found = lookup.guess([(s, 4) for s in r.samples])[0]
    expected = longest_matches(prompt, texts, 4) or longest_matches(prompt, texts, 2)
    if not expected:
        assert found == Guess()
    else:
        best = max(expected.values())
        assert found.signs[0][0] == best
        assert expected[found.tokens[0]] == best
