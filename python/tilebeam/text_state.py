"""What is known of a text by the hidden states that decoding it produced: all that a reward head of the generator's own
may read.

Only sums are kept, so that a text costs the same however long it is, and texts that grow step by step add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError

Floats = npt.NDArray[np.float32]

# A part of a text's state. mean: of all hidden states; recent: the same, the latest weighing most; last: the latest;
# length: the logarithm of their number, one value.
Feature = Literal["mean", "recent", "last", "length"]

DECAY = np.float32(1 - 1 / 16)  # of a hidden state's weight in `recent`, by a token


@dataclass(frozen=True, eq=False)
class TextState:
    """Sums over the hidden states (behind the final norm) of a text's tokens, but for the last: no step decodes it.

    Attributes:
        count: hidden states.
        total: their sum, float32 [n_embd].
        recent: their sum with weights: 1 for the last, `DECAY` for the one before, and so on; float32 [n_embd].
        last: the last of them, zeros before the first; float32 [n_embd].
    """

    count: int
    total: Floats
    recent: Floats
    last: Floats

    @classmethod
    def empty(cls, n_embd: int) -> TextState:
        """Of a text without tokens."""
        zeros = np.zeros(n_embd, np.float32)
        return cls(0, zeros, zeros, zeros)

    def then(self, later: TextState) -> TextState:
        """Of a text in two parts: this one's and a later one's."""
        if not later.count:
            return self
        faded = self.recent * DECAY**later.count
        return TextState(self.count + later.count, self.total + later.total, faded + later.recent, later.last)

    def features(self, names: Sequence[Feature]) -> Floats:
        """The features one after the other: float32 [`width`(names, n_embd)]."""
        return np.concatenate([self._feature(name) for name in names])

    def _feature(self, name: Feature) -> Floats:
        if name == "mean":
            return self.total / np.float32(max(1, self.count))
        if name == "recent":
            weights = (1 - DECAY**self.count) / (1 - DECAY)
            return self.recent / np.float32(weights or 1)
        if name == "last":
            return self.last
        if name == "length":
            return np.log1p(np.array([self.count], np.float32))
        raise TilebeamError(f"Unknown feature {name!r} of a text's hidden states.")


def width(names: Sequence[Feature], n_embd: int) -> int:
    """Elements of features together."""
    return sum(1 if name == "length" else n_embd for name in names)
