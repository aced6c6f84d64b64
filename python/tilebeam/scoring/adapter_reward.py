"""A reward adapter: LoRA in the generator's own upper layers, and a head on the hidden state behind a text.

The generator reads its samples once more, with the adapter in force in a context of its own: the weights are in memory
once. `tilebeam reward adapter` makes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.prompt import Prompt
from tilebeam.scoring.own_reward import check_maker
from tilebeam.scoring.reward_heads import Head
from tilebeam.scoring.reward_model import HeadReward
from tilebeam.scoring.scoring_defaults import STEP_STOP

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


class AdapterReward(HeadReward):
    """Rates texts by their model's own hidden state, computed with a LoRA adapter in force.

    A step's score is that of the text up to it, and a candidate's is that of all of it. Several threads may use one.

    Args:
        lm: the model that writes the texts; it stays the caller's.
        head: what `tilebeam.load_head` reads of the adapter's file.
        step_stop: see `StepScorer`.

    Raises:
        TilebeamError: the adapter was made for another model, or there is no memory for another KV cache.
    """

    def __init__(self, lm: LM, head: Head, *, step_stop: str = STEP_STOP) -> None:
        if head.adapter is None:
            raise TilebeamError("This reward head has no adapter: it is for OwnReward or a reward model.")
        check_maker(head, lm)
        super().__init__(lm.beside(head.adapter), head, outcome=True, step_stop=step_stop)
        self.about = "its own reward adapter"

    def close(self) -> None:
        """Close nothing: the model is the caller's."""

    def _texts(
        self, prompt: Prompt, steps: tuple[str, ...], whole: bool
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """List the beginnings to read, as the model wrote them: tokens of a prompt, then those of a text."""
        ids, names = prompt.tokens(self.lm), self._names(prompt, steps)
        for n, name in enumerate(names, 1):
            if whole and n < len(names):
                continue
            text = "".join(steps[:n])
            tokens = ids + self.lm.tokenize(text, add_special=False, parse_special=False)
            del tokens[self.lm.n_ctx - 1 :]  # of a text that filled the context
            if not tokens:
                raise TilebeamError("There is nothing to rate: prompt and text are empty.")
            yield tokens, [(len(tokens) - 1, name)]
