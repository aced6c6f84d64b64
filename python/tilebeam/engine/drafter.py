"""What a drafter is: it guesses the next tokens of a sample, so that one step may decode and verify several of them."""

from __future__ import annotations

from typing import Protocol

from tilebeam.engine.request import Sample


class Drafter(Protocol):
    """Guesses next tokens.

    A step decodes a sample's last token and its draft together, draws at every position with the sample's own sampler,
    and keeps the tokens drawn up to the first that differs from the draft. So a draft never changes a text; a good one
    saves steps.
    """

    def propose(self, sample: Sample) -> list[int]:
        """The tokens that may follow `sample.tokens`, [] for no guess.

        Called between two steps, in the thread that steps, for each sample that decodes. The engine cuts a draft short
        where cells, batch, logits or the sample's limit leave no room for it, and before a token that is not in the
        vocabulary. `sample.drafted` and `sample.accepted` tell what became of earlier drafts.
        """
        ...
