"""What a drafter is: it guesses the next tokens of samples, so that one step may decode and verify several of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tilebeam.engine.request import Sample

MOST = 16  # tokens that a draft of ours has at most


_SIGNS = 10  # classes of the probability that a draft model gives its token


class PassTimes:
    """Seconds that one more token for some samples takes a draft model, by what passes took."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, samples: int, seconds: float) -> None:
        """Record a pass."""
        was = self._seconds.get(samples, seconds)
        self._seconds[samples] = was + 0.2 * (seconds - was)

    def of(self, samples: int) -> float:
        """Return the seconds for so many samples; 0 before the first pass."""
        if not self._seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda n: abs(n - samples))
        return self._seconds[nearest] * max(1.0, samples / nearest)


def classed(token: int, probability: float) -> tuple[int, int, float]:
    """Return a guessed token, in which class its probability is, and the middle of that class."""
    sign = min(_SIGNS - 1, int(probability * _SIGNS))
    return token, sign, (sign + 0.5) / _SIGNS


class Drafter:
    """Guesses next tokens.

    A step decodes a sample's last token and its draft together, draws at every position with the sample's own sampler,
    and keeps the tokens drawn up to the first that differs from the draft. So a draft never changes a text; a good one
    saves steps. All methods are called between two steps, in the thread that steps.

    Attributes:
        most_samples: a step in which more of them decode has no drafts, and the drafter is not asked.
    """

    most_samples = sys.maxsize

    def propose(self, asked: Sequence[tuple[Sample, int]], rows: int) -> list[list[int]]:
        """Return for each sample the tokens that may follow `sample.tokens`, [] for no guess.

        The engine cuts a draft before a token that is not in the vocabulary.

        Args:
            asked: samples that decode, and for each how many tokens its draft may have at most.
            rows: tokens that the step decodes without drafts, one per sample that decodes.
        """
        raise NotImplementedError

    def rest(self) -> int:
        """Return how many of the next steps it need not be asked in, so that they need not be planned; asked after
        `propose`. A new request ends it."""
        return 0

    def stepped(self, rows: int, seconds: float, planning: float) -> None:
        """Record a step that decoded so many tokens, none of a prompt.

        Args:
            rows: the tokens.
            seconds: that it took, planning left out.
            planning: seconds that its plan took, with `propose`; 0: it was the last plan again.
        """

    def verified(self, sample: Sample, accepted: int) -> None:
        """Record that the first `accepted` of the tokens proposed last for a sample were drawn."""

    def finished(self, sample: Sample) -> None:
        """Forget a sample that is complete; it will not be asked for again."""
