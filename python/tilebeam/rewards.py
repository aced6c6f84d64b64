"""Process reward models: GGUF models that say of every step of a solution how good it is.

A reward model reads prompt and steps, and its verdict on a step is what it expects after the step's end. Its KV cells
are kept, so when a beam grows by a step only that step is decoded, and a fork shares what came before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Usage
from tilebeam.scorers import Scorer

if TYPE_CHECKING:
    from tilebeam.lm import LM

Aggregation = Literal["last", "min", "prod", "mean"]

_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


def split_steps(text: str, step_stop: str = "\n") -> list[str]:
    """The steps of a solution, each with the separator that ends it; a last step without one is a step too."""
    if not step_stop:
        raise TilebeamError("The separator of steps must not be empty.")
    parts = text.split(step_stop)
    return [part + step_stop for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


class StepScorer(Scorer):
    """Rates solutions step by step; as a `Scorer`, it rates a whole candidate by the aggregate of its steps.

    Args:
        aggregate: of the steps' scores: "last", "min", "prod" or "mean".
        step_stop: what ends a step.
    """

    def __init__(self, *, aggregate: Aggregation = "last", step_stop: str = "\n") -> None:
        if aggregate not in get_args(Aggregation):
            raise TilebeamError(f"aggregate must be one of {', '.join(get_args(Aggregation))}, not {aggregate!r}.")
        self.aggregate = aggregate
        self.step_stop = step_stop
        self.usage = Usage()  # spent on scoring since it was last taken

    @abstractmethod
    def score_steps(self, prompts: Sequence[str], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Scores of every step of every solution; solution i answers prompts[i]."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Lasts while solutions grow; what was read of them may be kept."""
        yield

    def total(self, scores: Sequence[float]) -> float:
        """The aggregate of a solution's step scores; 0 for a solution without steps."""
        return float(_AGGREGATIONS[self.aggregate](scores)) if scores else 0.0

    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:
        """One aggregate per candidate."""
        return self.score_many([prompt], [candidates])[0]

    def score_many(self, prompts: Sequence[str], groups: Sequence[Sequence[CompletionOutput]]) -> list[list[float]]:
        """One aggregate per candidate of each prompt, all in one go."""
        flat = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
        with self.session():
            scores = self.score_steps([p for p, _ in flat], [split_steps(c.text, self.step_stop) for _, c in flat])
        totals = iter([self.total(s) for s in scores])
        return [[next(totals) for _ in group] for group in groups]


class TokenReward(StepScorer):
    """A reward model that answers with a token: P(good) against P(bad) behind a tag at the end of each step.

    Math-Shepherd: tag " ки", good "+", bad "-"; the verdict is read at the tag's last token. Models of the RLHFlow
    kind read a chat in which the answer "+" follows each step: give the turn's closing text as `tag`.

    Args:
        lm: the reward model; the search's own model or another.
        tag: appended to every step.
        good, bad: the labels; one token each.
        template: makes the reward model's prompt from the solution's.
        aggregate, step_stop: see `StepScorer`.
    """

    def __init__(
        self,
        lm: LM,
        *,
        tag: str,
        good: str = "+",
        bad: str = "-",
        template: Callable[[str], str] = lambda prompt: prompt,
        aggregate: Aggregation = "last",
        step_stop: str = "\n",
    ) -> None:
        super().__init__(aggregate=aggregate, step_stop=step_stop)
        self._lm = lm
        self._template = template
        self._tag = lm.tokenize(tag, add_special=False)
        self._labels = [_one_token(lm, label) for label in (good, bad)]
        self._known: dict[tuple[str, tuple[str, ...]], float] = {}
        self._sessions = 0
        if not self._tag:
            raise TilebeamError("The tag has no tokens.")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keeps cells and verdicts."""
        with self._lm.keep_prefixes():
            self._sessions += 1
            try:
                yield
            finally:
                self._sessions -= 1
                if self._sessions == 0:
                    self._known.clear()

    def score_steps(self, prompts: Sequence[str], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        """P(good) / (P(good) + P(bad)) of every step."""
        keys = [(p, tuple(steps)) for p, steps in zip(prompts, solutions, strict=True)]
        asked = list(dict.fromkeys(k for k in keys if k[1] and k not in self._known))
        texts: list[list[int]] = []
        wanted: list[list[int]] = []
        found: list[list[tuple[str, tuple[str, ...]]]] = []
        for prompt, steps in asked:
            tokens = self._lm.tokenize(self._template(prompt))
            where, names = [], []
            for i, step in enumerate(steps):
                # Steps are tokenized one by one: so a text's tokens are those of its beginning, and more.
                tokens = tokens + self._lm.tokenize(step, add_special=False) + self._tag
                name = (prompt, steps[: i + 1])
                if name not in self._known:
                    where.append(len(tokens) - 1)
                    names.append(name)
            texts.append(tokens)
            wanted.append(where)
            found.append(names)
        for reading, names in zip(self._lm.read(texts, wanted, self._labels), found, strict=True):
            margin = reading.logits[:, 0].astype(np.float64) - reading.logits[:, 1]
            for name, value in zip(names, margin, strict=True):
                self._known[name] = float(1 / (1 + np.exp(-value)))
            self.usage += Usage(
                scored_tokens=reading.decoded_tokens,
                cached_tokens=reading.cached_tokens,
                scoring_seconds=reading.seconds,
            )
        return [[self._known[p, steps[: i + 1]] for i in range(len(steps))] for p, steps in keys]


def _one_token(lm: LM, label: str) -> int:
    tokens = lm.tokenize(label, add_special=False)
    if len(tokens) != 1:
        raise TilebeamError(f"The label {label!r} is {len(tokens)} tokens of this reward model; it must be one.")
    return tokens[0]
