"""The state of a text: sums over the hidden states and log-probabilities that decoding it produced, which are all that
a reward head of the generator's own may read.

Only sums are kept, so that a text costs the same however long it is, and texts that grow step by step add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError

Floats = npt.NDArray[np.float32]

# A part of a text's state. mean: of all hidden states; recent: the same, the latest weighing most; last: the latest;
# length: the logarithm of their number, one value; confidence: see `Confidence.values`, five values.
Feature = Literal["mean", "recent", "last", "length", "confidence"]
NARROW = {"length": 1, "confidence": 5}  # values of features that no hidden state is in

DECAY = np.float32(1 - 1 / 16)  # of a token's weight in what is recent, by each later one


@dataclass(frozen=True)
class Confidence:
    """Sums over the log-probabilities of a text's tokens under the model's own distribution (temperature 1).

    Attributes:
        count: tokens drawn.
        total, squares: sums of log-probabilities and of their squares.
        recent: their sum with weights: 1 for the last, `DECAY` for the one before, and so on.
        lowest: of a token; 0 before the first.
        ended: the last token ends the text.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    recent: float = 0.0
    lowest: float = 0.0
    ended: bool = False

    def then(self, later: Confidence) -> Confidence:
        """Return the confidence of a text in two parts: this one's and a later one's."""
        return Confidence(
            self.count + later.count,
            self.total + later.total,
            self.squares + later.squares,
            self.recent * float(DECAY) ** later.count + later.recent,
            min(self.lowest, later.lowest),
            later.ended if later.count else self.ended,
        )

    def values(self) -> Floats:
        """Return mean, standard deviation, recent mean, lowest, and 1 if the text has ended, else 0: float32 [5]."""
        n, decay = max(1, self.count), float(DECAY)
        mean = self.total / n
        spread = max(0.0, self.squares / n - mean * mean) ** 0.5
        weights = (1 - decay**self.count) / (1 - decay) or 1.0
        return np.array([mean, spread, self.recent / weights, self.lowest, self.ended], np.float32)


@dataclass(frozen=True, eq=False)
class TextState:
    """Sums over the hidden states of a text's tokens, but for the last: no step decodes it. The states are those behind
    the final norm, or behind the layer that the model was loaded for (``hidden_layer``).

    Attributes:
        count: hidden states.
        total: their sum, float32 [n_embd].
        recent: their sum with weights: 1 for the last, `DECAY` for the one before, and so on; float32 [n_embd].
        last: the last of them, zeros before the first; float32 [n_embd].
        confidence: sums over all tokens' log-probabilities.
    """

    count: int
    total: Floats
    recent: Floats
    last: Floats
    confidence: Confidence = field(default_factory=Confidence)

    def then(self, later: TextState) -> TextState:
        """Return the state of a text in two parts: this one's and a later one's."""
        faded = self.recent * DECAY**later.count
        last = later.last if later.count else self.last
        confidence = self.confidence.then(later.confidence)
        return TextState(self.count + later.count, self.total + later.total, faded + later.recent, last, confidence)

    def features(self, names: Sequence[Feature]) -> Floats:
        """Return the features one after the other: float32 [`width`(names, n_embd)]."""
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
        if name == "confidence":
            return self.confidence.values()
        raise TilebeamError(f"Unknown feature {name!r} of a text's hidden states.")


def width(names: Sequence[Feature], n_embd: int) -> int:
    """Return elements of features together."""
    return sum(NARROW.get(name, n_embd) for name in names)
