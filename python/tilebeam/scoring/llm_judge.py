"""A generative model as the judge of candidates: any instruction-tuned GGUF model, also the one that wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilebeam.chat.chat_prompt import filled_text
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Usage
from tilebeam.prompt import Prompt
from tilebeam.scoring.scorers import Rating, Scorer

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

TEMPLATE = (
    "Here is a question and a proposed answer.\n\n"
    "Question:\n{prompt}\n\nProposed answer:\n{answer}\n\n"
    "Is the proposed answer correct? Reply with Yes or No.\nReply:"
)


class LLMJudge(Scorer):
    """Asks a model what it thinks of a candidate. A score is P(good) / (P(good) + P(bad)) of the verdict's first token
    (Zheng et al., "Judging LLM-as-a-Judge", read off the logits), between 0 and 1, so it can also weigh votes. One
    position per candidate is read, nothing is generated.

    May be used from any thread. The beginning that all its questions share is decoded once per call. Control tokens
    that a candidate or a question spells out are text.

    Args:
        lm: the judge.
        template: with "{answer}", and "{prompt}" if it is to see the question (`Prompt.asked`). None: one in English.
        chat: put the template into the model's chat template, as the user's turn.
        good, bad: spellings of the verdicts; of each the first token counts.

    Raises:
        TilebeamError: options that do not fit, or verdicts that begin with the same token.
    """

    def __init__(
        self,
        lm: LM,
        *,
        template: str | None = None,
        chat: bool = False,
        good: Sequence[str] = ("Yes", " Yes"),
        bad: Sequence[str] = ("No", " No"),
    ) -> None:
        self.lm = lm
        self.template = template or TEMPLATE
        self.chat = chat
        if "{answer}" not in self.template:
            raise TilebeamError('The template of a judge needs "{answer}", where the candidate stands.')
        kinds = [_first_tokens(lm, spellings) for spellings in (good, bad)]
        common = kinds[0] & kinds[1]  # such as the mark of a word's beginning
        if not kinds[0] - common or not kinds[1] - common:
            raise TilebeamError(f"The verdicts {list(good)} and {list(bad)} begin with the same token: choose others.")
        self._labels = sorted(kinds[0] - common) + sorted(kinds[1] - common)
        self._good = len(kinds[0] - common)  # so many of the labels are good ones

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return one verdict per candidate."""
        return self.rate([prompt], [candidates])[0].scores

    def rate(self, prompts: Sequence[str | Prompt], groups: Sequence[Sequence[CompletionOutput]]) -> list[Rating]:
        """Return one verdict per candidate of each prompt; equal texts are judged once, at the cost of the first prompt
        that asks."""
        asked = [[self._ask(prompt, c.text) for c in group] for prompt, group in zip(prompts, groups, strict=True)]
        different = list(dict.fromkeys(question for group in asked for question in group))
        verdicts = dict(zip(different, self._judge(different) if different else [], strict=True))
        costs = {question: cost for question, (_, cost) in verdicts.items()}
        return [
            Rating([verdicts[q][0] for q in group], sum((costs.pop(q, Usage()) for q in group), Usage()))
            for group in asked
        ]

    def _ask(self, prompt: str | Prompt, answer: str) -> Prompt:
        """Make the judge's prompt."""
        values = {"prompt": Prompt.of(prompt).asked, "answer": answer}
        if not self.chat:
            return self.lm.filled_prompt(self.template, values)
        return self.lm.chat_prompt([{"role": "user", "content": filled_text(self.template, values)}])

    def _judge(self, asked: list[Prompt]) -> list[tuple[float, Usage]]:
        """Return how probable the good verdict is behind each text, against the bad one, and what reading it cost."""
        found = []
        for reading in self.lm.read(asked, [[-1]] * len(asked), self._labels):
            logits = reading.logits[0].astype(np.float64)
            chances = np.exp(logits - logits.max())
            length = reading.decoded_tokens + reading.cached_tokens
            usage = Usage(
                scored_tokens=reading.decoded_tokens, full_scoring_tokens=length, scoring_seconds=reading.seconds
            )
            found.append((float(chances[: self._good].sum() / chances.sum()), usage))
        return found


def _first_tokens(lm: LM, spellings: Sequence[str]) -> set[int]:
    if isinstance(spellings, str):
        spellings = [spellings]
    first = {lm.tokenize(text, add_special=False)[0] for text in spellings if text}
    if not first:
        raise TilebeamError("A judge needs spellings of both verdicts.")
    return first
