"""The writer's own verdict on its texts, read behind them: P(True) of Kadavath et al., "Language Models (Mostly) Know
What They Know" (arXiv 2207.05221)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Usage
from tilebeam.prompt import Prompt
from tilebeam.scoring.llm_judge import LLMJudge
from tilebeam.scoring.scorers import Rating, Scorer

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

QUESTION = "Is the answer above right? Yes or No:"


class PTrue(Scorer):
    """Asks the model that wrote a candidate about it, as the next turn: P(Yes) / (P(Yes) + P(No)) of the reply's first
    token, 0 to 1.

    A candidate's KV cells are there already, so only the question is read: some 20 tokens, where `LLMJudge` reads the
    candidate again. May be used from any thread.

    Args:
        lm: the model that writes the candidates.
        question: in the user's turn where the prompt is a chat's, else behind an empty line.
        good, bad: spellings of the replies; of each the first token counts.

    Raises:
        TilebeamError: replies that begin with the same token.
    """

    def __init__(
        self,
        lm: LM,
        *,
        question: str = QUESTION,
        good: Sequence[str] = ("Yes", " Yes"),
        bad: Sequence[str] = ("No", " No"),
    ) -> None:
        self._judge = LLMJudge(lm, good=good, bad=bad)
        self.lm = lm
        self._opening, behind = _turns(lm, question)
        self._turn = lm.tokenize(behind, add_special=False)
        self._line = lm.tokenize(f"\n\n{question}", add_special=False)

    def session(self) -> AbstractContextManager[None]:
        """Keep the candidates' KV cells meanwhile."""
        return self.lm.keep_prefixes()

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return one probability per candidate."""
        return self.rate([prompt], [candidates])[0].scores

    def rate(self, prompts: Sequence[str | Prompt], groups: Sequence[Sequence[CompletionOutput]]) -> list[Rating]:
        """Return one probability per candidate of each prompt."""
        asked = [
            self._behind(Prompt.of(prompt), candidate)
            for prompt, group in zip(prompts, groups, strict=True)
            for candidate in group
        ]
        verdicts = iter(self._judge.probabilities(asked))
        found = [[next(verdicts) for _ in group] for group in groups]
        return [Rating([p for p, _ in group], sum((cost for _, cost in group), Usage())) for group in found]

    def _behind(self, prompt: Prompt, candidate: CompletionOutput) -> list[int]:
        """Return the tokens of a prompt, a candidate and the question; a candidate that leaves no room for it is cut.
        The template's own end of a turn takes the place of the one that was drawn."""
        question = self._turn if self._opening and self._opening in prompt.text else self._line
        tokens = candidate.token_ids
        if tokens and self.lm.is_control(tokens[-1]):
            tokens = tokens[:-1]
        ids = prompt.tokens(self.lm)
        return ids + tokens[: max(0, self.lm.n_ctx - 1 - len(ids) - len(question))] + question


def _turns(lm: LM, question: str) -> tuple[str, str]:
    """Return what the chat template puts behind the user's words, and, where the user asks a question next, behind the
    assistant's; two empty texts where there is no such template."""
    if lm.chat_template is None:
        return "", ""
    mark = f"m{secrets.token_hex(12)}m"
    turns = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", mark), ("user", question))]
    try:
        opening = lm.chat_prompt([{"role": "user", "content": mark}]).text.rpartition(mark)[2]
        return opening.strip(), lm.chat_prompt(turns).text.rpartition(mark)[2]
    except TilebeamError:
        return "", ""
