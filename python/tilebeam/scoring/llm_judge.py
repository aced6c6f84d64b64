"""A generative model as the judge of candidates: any instruction-tuned GGUF model, also the one that wrote them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from tilebeam.chat.chat_prompt import filled_text
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Usage, check_complete
from tilebeam.prompt import Prompt, PromptLike
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.scorers import Rating, Scorer
from tilebeam.scoring.scoring_defaults import VERDICT, Verdict

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

VERDICT_TEMPLATE = (
    "Here is a question and a proposed answer.\n\n"
    "Question:\n{prompt}\n\nProposed answer:\n{answer}\n\n"
    "Is the proposed answer correct? Reply with Yes or No.\nReply:"
)
NUMBER_TEMPLATE = (
    "Here is a question and a proposed answer.\n\n"
    "Question:\n{prompt}\n\nProposed answer:\n{answer}\n\n"
    "How good is the proposed answer, from {low} (wrong) to {high} (correct and complete)? Reply with a number.\nReply:"
)

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class LLMJudge(Scorer):
    """Asks a model what it thinks of a candidate; scores lie between 0 and 1, so they can also weigh votes.

    - "probability": P(good) / (P(good) + P(bad)) of the verdict's first token (Zheng et al., "Judging LLM-as-a-Judge",
      read off the logits): one position per candidate, nothing is generated.
    - "number": the model writes a number between `low` and `high`. The last one in a reply counts, of several replies
      (`samples`) their mean, scaled to 0..1. A reply without a number in that range does not count; a candidate
      without any reply that counts has 0.

    May be used from any thread. The beginning that all its questions share is decoded once per call. Control tokens
    that a candidate or a question spells out are text.

    Args:
        lm: the judge.
        verdict: "probability" or "number".
        template: with "{answer}", and "{prompt}" if it is to see the question (`Prompt.asked`); {low} and {high} are
            the numbers' range. None: one in English.
        chat: put the template into the model's chat template, as the user's turn.
        good, bad: spellings of the verdicts, for "probability"; of each the first token counts.
        low, high: the range of numbers.
        samples: replies per candidate, for "number".
        sampling: how replies are drawn. None: greedily if there is one, at temperature 0.7 if there are several; 64
            tokens at most; with seed 0.

    Raises:
        TilebeamError: options that do not fit, or verdicts that begin with the same token.
    """

    def __init__(
        self,
        lm: LM,
        *,
        verdict: Verdict = VERDICT,
        template: str | None = None,
        chat: bool = False,
        good: Sequence[str] = ("Yes", " Yes"),
        bad: Sequence[str] = ("No", " No"),
        low: float = 0,
        high: float = 10,
        samples: int = 1,
        sampling: SamplingParams | None = None,
    ) -> None:
        if verdict not in get_args(Verdict):
            raise TilebeamError(f'verdict must be "probability" or "number", not {verdict!r}.')
        if not low < high:
            raise TilebeamError(f"low must be less than high, not {low!r} and {high!r}.")
        self.lm = lm
        self.verdict = verdict
        self.template = template or (VERDICT_TEMPLATE if verdict == "probability" else NUMBER_TEMPLATE)
        self.chat = chat
        self.low, self.high = low, high
        self.samples = checked_integer("samples", samples)
        drawn = sampling or SamplingParams(temperature=0.0 if samples == 1 else 0.7, max_tokens=64, seed=0)
        self.sampling = replace(drawn, n=samples, logprobs=False)
        if "{answer}" not in self.template:
            raise TilebeamError('The template of a judge needs "{answer}", where the candidate stands.')
        self._labels: list[int] = []
        self._good = 0  # so many of the labels are good ones
        if verdict == "probability":
            kinds = [_first_tokens(lm, spellings) for spellings in (good, bad)]
            common = kinds[0] & kinds[1]  # such as the mark of a word's beginning
            if not kinds[0] - common or not kinds[1] - common:
                raise TilebeamError(
                    f"The verdicts {list(good)} and {list(bad)} begin with the same token: choose others."
                )
            self._labels = sorted(kinds[0] - common) + sorted(kinds[1] - common)
            self._good = len(kinds[0] - common)

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
        values = {
            "prompt": Prompt.of(prompt).asked,
            "answer": answer,
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
        }
        if not self.chat:
            return self.lm.filled_prompt(self.template, values)
        return self.lm.chat_prompt([{"role": "user", "content": filled_text(self.template, values)}])

    def _judge(self, asked: list[Prompt]) -> list[tuple[float, Usage]]:
        """Return the verdict on each of the judge's prompts, and what that cost."""
        return self.probabilities(asked) if self.verdict == "probability" else self._numbers(asked)

    def probabilities(self, asked: Sequence[PromptLike]) -> list[tuple[float, Usage]]:
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

    def _numbers(self, asked: list[Prompt]) -> list[tuple[float, Usage]]:
        outputs = self.lm.generate(asked, self.sampling)
        check_complete(outputs)
        found = []
        for output in outputs:
            cost = output.usage
            decoded = cost.total_tokens - cost.cached_tokens + cost.recomputed_tokens
            usage = Usage(scored_tokens=decoded, full_scoring_tokens=cost.total_tokens, scoring_seconds=cost.seconds)
            numbers = [n for reply in output.outputs if (n := self._number(reply.text)) is not None]
            found.append((sum(numbers) / len(numbers) if numbers else 0.0, usage))
        return found

    def _number(self, reply: str) -> float | None:
        """Read the last number of a reply, scaled; None if there is none, or it lies outside."""
        numbers = _NUMBER.findall(reply)
        value = float(numbers[-1]) if numbers else None
        if value is None or not self.low <= value <= self.high:
            return None
        return (value - self.low) / (self.high - self.low)


def _first_tokens(lm: LM, spellings: Sequence[str]) -> set[int]:
    if isinstance(spellings, str):
        spellings = [spellings]
    first = {lm.tokenize(text, add_special=False)[0] for text in spellings if text}
    if not first:
        raise TilebeamError("A judge needs spellings of both verdicts.")
    return first
