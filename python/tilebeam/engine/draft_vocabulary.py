"""A draft model's vocabulary beside the model's: the same, or a part of it in another order, as gguf-trim-vocab leaves.
Fewer tokens make a smaller output matrix, which is much of a small model."""

from __future__ import annotations

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab


class DraftVocabulary:
    """Turns the model's tokens into the draft model's, and back.

    Args:
        ours: of the draft model.
        theirs: of the model that it guesses for.

    Raises:
        TilebeamError: the draft model has a token that the model does not have.
    """

    def __init__(self, ours: Vocab, theirs: Vocab) -> None:
        self._ours, self._theirs = ours, theirs
        size = min(ours.size, theirs.size)  # some pad the matrix behind the last token
        differs = next((t for t in range(size) if ours.entry(t) != theirs.entry(t)), None)
        self._number: dict[int, int] | None = None  # in the draft model's vocabulary; None: the same
        self._written: list[int] = []
        self._cut: dict[int, list[int]] = {}  # tokens that it lacks, and what it reads instead
        if differs is not None:
            numbers = {theirs.entry(t): t for t in range(theirs.size)}
            self._written = [numbers.get(ours.entry(t), -1) for t in range(ours.size)]
            if -1 in self._written:
                missing = self._written.index(-1)
                raise TilebeamError(
                    f"The draft model has another vocabulary than the model: token {missing} is "
                    f"{ours.spelling(missing)!r} there and {theirs.spelling(missing)!r} here."
                )
            self._number = {number: t for t, number in enumerate(self._written)}
        self._same = differs is None and ours.size >= theirs.size

    def read(self, tokens: list[int]) -> list[int]:
        """Return the model's tokens as the draft model reads them: those that it lacks as several smaller ones."""
        if self._same:
            return tokens
        found: list[int] = []
        for token in tokens:
            own = self._own(token)
            if own is not None:
                found.append(own)
                continue
            if token not in self._cut:
                self._cut[token] = self._smaller(token)
            found += self._cut[token]
        return found

    def written(self, token: int) -> int:
        """Return the model's token for a token of the draft model."""
        return token if self._number is None else self._written[token]

    def _own(self, token: int) -> int | None:
        if self._number is not None:
            return self._number.get(token)
        return token if token < self._ours.size else None

    def _smaller(self, token: int) -> list[int]:
        if not self._ours.has_text:
            return []
        piece = self._theirs.piece(token).decode("utf-8", "replace")
        return self._ours.tokenize(piece, add_special=False, parse_special=False)
