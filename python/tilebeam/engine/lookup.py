"""Guesses from texts: what followed the last tokens where they stood before, in the sample's own text and prompt, in
the other samples of the prompt, and in what earlier requests generated.

Texts are indexed by their n-grams of two lengths (Saxena's prompt look-up; that other samples' texts count is from
Oliaro et al., "SuffixDecoding"). The places where the last tokens stood are compared further back, the longest match
leads, and places that agree with it vote on: a guess ends where no place is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilebeam.engine.request import Request, Sample

_LONG, _SHORT = 4, 2  # tokens of the n-grams
_PLACES = 16  # of one n-gram that are kept: the latest
_FURTHEST = 16  # tokens that a match may have
_HISTORY = 1 << 16  # tokens of earlier requests: between this and half of it are kept


@dataclass(frozen=True)
class Guess:
    """Tokens that may come.

    Attributes:
        tokens: one after the other.
        signs: of each, what tells how likely it is: how long the match before it was, and how many places agreed.
    """

    tokens: list[int] = field(default_factory=list)
    signs: list[tuple[int, int]] = field(default_factory=list)


class TextIndex:
    """Where n-grams stood in texts that may still grow.

    Args:
        lengths: of the n-grams, in tokens.
    """

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self._places: dict[tuple[int, ...], list[tuple[Sequence[int], int]]] = {}
        self.size = 0  # tokens

    def add(self, text: Sequence[int], start: int, before: Sequence[int] = ()) -> None:
        """Index what a text has from `start` on: its tokens, each behind the n-grams in front of it.

        Args:
            text: kept, not copied; tokens may be appended to it.
            before: what stands before it: n-grams may begin there.
        """
        end, places = len(text), self._places
        self.size += end - start
        lead = list(before[-_LONG:])
        for at in range(start, end):
            for n in self._lengths:
                if at >= n:
                    gram = tuple(text[at - n : at])
                elif at + len(lead) >= n:
                    gram = (*lead[len(lead) + at - n :], *text[:at])
                else:
                    continue
                held = places.setdefault(gram, [])
                held.append((text, at))
                if len(held) > _PLACES:
                    del held[0]

    def places(self, gram: tuple[int, ...]) -> list[tuple[Sequence[int], int]]:
        """Return texts, and in them the index of what followed the n-gram; the latest last."""
        return self._places.get(gram, [])


@dataclass(eq=False)
class _Shared:
    """What the samples of one request share."""

    index: TextIndex
    seen: dict[Sample, int]  # tokens that are indexed


class Lookup:
    """Indexes the texts of samples as they grow, and guesses from them.

    A token is indexed once, and a guess looks at no more than `_PLACES` places: both take the same time however long
    and however many the texts are.
    """

    def __init__(self) -> None:
        self._requests: dict[Request, _Shared] = {}
        self._history = TextIndex(_LONG)
        self._older = TextIndex(_LONG)

    def guess(self, asked: Sequence[tuple[Sample, int]]) -> list[Guess]:
        """Guess what may follow the tokens of samples: of each at most so many."""
        shared = [self._read(sample) for sample, _ in asked]
        return [self._guess(sample, most, of.index) for (sample, most), of in zip(asked, shared, strict=True)]

    def _read(self, sample: Sample) -> _Shared:
        """Index what is new of a sample's text; first of all the prompt."""
        request = sample.request
        shared = self._requests.get(request)
        if shared is None:
            shared = self._requests[request] = _Shared(TextIndex(_LONG, _SHORT), {})
            shared.index.add(request.prompt_ids, 0)
        seen = shared.seen.get(sample, 0)
        shared.index.add(sample.tokens, seen, request.prompt_ids)
        shared.seen[sample] = len(sample.tokens)
        return shared

    def _guess(self, sample: Sample, most: int, index: TextIndex) -> Guess:
        tail = _tail(sample)
        long, least = tuple(tail[-_LONG:]), _LONG
        found = index.places(long) + self._history.places(long) + self._older.places(long)
        if not found or len(tail) < _LONG:
            found, least = index.places(tuple(tail[-_SHORT:])), _SHORT
        return _vote([(max(least, _matched(text, at, tail)), text, at) for text, at in found], most)

    def finished(self, sample: Sample) -> None:
        """Keep a complete sample's text for the other samples and for later requests."""
        request = sample.request
        if request in self._requests:
            self._read(sample)
        self._history.add(list(sample.tokens), 0)
        if self._history.size > _HISTORY // 2:
            self._older, self._history = self._history, TextIndex(_LONG)
        if request.unfinished == 0:
            self._requests.pop(request, None)


def _tail(sample: Sample) -> list[int]:
    tokens = sample.tokens[-_FURTHEST:]
    missing = _FURTHEST - len(tokens)
    return [*sample.request.prompt_ids[-missing:], *tokens] if missing else tokens


def _matched(text: Sequence[int], at: int, tail: list[int]) -> int:
    """Count the tokens before `at` that are the last ones of the tail."""
    most = min(at, len(tail))
    for i in range(1, most + 1):
        if text[at - i] != tail[-i]:
            return i - 1
    return most


def _vote(places: list[tuple[int, Sequence[int], int]], most: int) -> Guess:
    """Return the tokens that go on from places (length of the match, text, index), each of those that agreed so far."""
    guess = Guess()
    while len(guess.tokens) < most and places:
        if len(places) == 1:
            [(length, text, at)] = places
            rest = text[at : at + most - len(guess.tokens)]
            guess.tokens.extend(rest)
            guess.signs.extend((min(length + i, _FURTHEST), 2) for i in range(len(rest)))
            break
        longest: dict[int, int] = {}
        votes: dict[int, int] = {}
        for length, text, at in places:
            token = text[at]
            longest[token] = max(length, longest.get(token, 0))
            votes[token] = votes.get(token, 0) + 1
        best = max(longest, key=lambda t: (longest[t], votes[t]))
        guess.tokens.append(best)
        agreed = 2 if len(votes) == 1 else 1 if 2 * votes[best] > len(places) else 0
        guess.signs.append((min(longest[best], _FURTHEST), agreed))
        places = [(length + 1, text, at + 1) for length, text, at in places if text[at] == best and at + 1 < len(text)]
    return guess
