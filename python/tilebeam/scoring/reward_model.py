"""Reward models: GGUF models that say how good a solution is, step by step or as a whole.

A reward model reads prompt and steps, and its verdict on a step is a token that it expects behind the step, or what a
small network makes of its hidden state there. Its KV cells are kept, so when a beam grows by a step only that step is
decoded, and a fork shares what came before.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.gguf.closing import Closing
from tilebeam.outputs import CompletionOutput, Usage
from tilebeam.prompt import Prompt
from tilebeam.scoring.reward_formats import Layout, RewardFormat
from tilebeam.scoring.reward_heads import Head, sigmoid
from tilebeam.scoring.scorers import Rating, Scorer
from tilebeam.scoring.scoring_defaults import AGGREGATION, STEP_STOP, Aggregation

if TYPE_CHECKING:
    from tilebeam.engine.reading import Reading
    from tilebeam.model.lm import LM
    from tilebeam.text_state import TextState

_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}

_Solution = tuple[Prompt, tuple[str, ...]]  # a prompt and steps
_Named = tuple[int, int]  # a position of a text, and the beginning of a solution that is judged there

# Tokens of texts that are kept to be read together.
_TOGETHER = 1 << 18


def split_steps(text: str, step_stop: str = STEP_STOP) -> list[str]:
    """Split a solution into steps, each with the separator that ends it; a last step without one is a step too."""
    if not step_stop:
        raise TilebeamError("The separator of steps must not be empty.")
    parts = text.split(step_stop)
    return [part + step_stop for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@dataclass(frozen=True)
class RatedText:
    """A text's steps, their scores, the score of the whole, and what that cost."""

    steps: list[str]
    scores: list[float]
    score: float
    usage: Usage


class StepScorer(Scorer):
    """Rates solutions step by step; as a `Scorer`, it rates a whole candidate by the aggregate of its steps.

    One without costs implements `score_steps`, one that runs a model `rate_steps`, too.

    Args:
        aggregate: of the steps' scores: "last", "min", "prod" or "mean".
        step_stop: what ends a step.
    """

    def __init__(self, *, aggregate: Aggregation = AGGREGATION, step_stop: str = STEP_STOP) -> None:
        if aggregate not in get_args(Aggregation):
            raise TilebeamError(f"aggregate must be one of {', '.join(get_args(Aggregation))}, not {aggregate!r}.")
        self.aggregate = aggregate
        self.step_stop = step_stop

    @abstractmethod
    def score_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Score every step of every solution; solution i answers prompts[i]."""

    def rate_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[Rating]:
        """Do what `score_steps` does, with costs: one rating per solution."""
        return [Rating(scores) for scores in self.score_steps(prompts, solutions)]

    def rate_states(self, solutions: Sequence[Sequence[TextState]]) -> list[Rating]:
        """Rate as `rate_steps` does, by the generator's hidden states where each step of each solution ends; asked
        instead of it if `needs_hidden`."""
        raise NotImplementedError

    @contextmanager
    def session(self) -> Iterator[None]:
        """Last while solutions grow; what was read of them may be kept."""
        yield

    def total(self, scores: Sequence[float]) -> float:
        """Aggregate a solution's step scores; 0 for a solution without steps."""
        return float(_AGGREGATIONS[self.aggregate](scores)) if scores else 0.0

    def rate_text(self, prompt: str | Prompt, text: str) -> RatedText:
        """Rate the steps of a text, and the whole as a candidate with this text."""
        steps = split_steps(text, self.step_stop)
        (rating,) = self.rate_steps([prompt], [steps])
        return RatedText(steps, rating.scores, self.total(rating.scores), rating.usage)

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return one aggregate per candidate."""
        return self.rate([prompt], [candidates])[0].scores

    def rate(self, prompts: Sequence[str | Prompt], groups: Sequence[Sequence[CompletionOutput]]) -> list[Rating]:
        """Return one aggregate per candidate of each prompt, all in one go."""
        flat = [(prompt, c.text) for prompt, group in zip(prompts, groups, strict=True) for c in group]
        with self.session():
            rated = self._rate_texts([prompt for prompt, _ in flat], [text for _, text in flat])
        if len(rated) != len(flat):
            raise TilebeamError(f"{type(self).__name__} rated {len(rated)} of {len(flat)} solutions.")
        left = iter(rated)
        each = [[next(left) for _ in group] for group in groups]
        return [Rating([self.total(r.scores) for r in own], sum((r.usage for r in own), Usage())) for own in each]

    def _rate_texts(self, prompts: Sequence[str | Prompt], texts: Sequence[str]) -> list[Rating]:
        """Rate the steps of whole texts, or what the rating of a text needs of them."""
        return self.rate_steps(prompts, [split_steps(text, self.step_stop) for text in texts])


class RewardModel(StepScorer, Closing):
    """A GGUF model that rates; what its kinds share. Several threads may use one.

    Args:
        lm: the reward model; the search's own model or another.
        format: how it wants prompt and steps to be written.
        outcome: it rates a solution as a whole: the tag closes a text instead of standing between steps, a step's score
            is that of the solution up to it, and a candidate's is that of all of it, whatever the aggregate.
        aggregate, step_stop: see `StepScorer`.

    Attributes:
        about: one line about how it judges, if `tilebeam.load_reward_model` made it.
    """

    about: str = ""

    def __init__(
        self,
        lm: LM,
        format: RewardFormat,
        *,
        outcome: bool = False,
        aggregate: Aggregation = AGGREGATION,
        step_stop: str = STEP_STOP,
    ) -> None:
        super().__init__(aggregate=aggregate, step_stop=step_stop)
        self.lm = lm
        self.format = format
        self.outcome = outcome
        self._layout = Layout(lm, format)
        self._known: dict[int, float] = {}  # by the name of a beginning of a solution
        # Names by what goes before, the prompt or a beginning, and the step: a beginning itself as the name of each
        # would take memory that grows with the square of the steps.
        self._beginnings: dict[tuple[Prompt | int, str], int] = {}
        self._count = itertools.count()
        self._sessions = 0
        self._counting = threading.Lock()

    def close(self) -> None:
        """Close its model. Idempotent."""
        self.lm.close()

    @abstractmethod
    def _read(self, texts: list[list[int]], positions: list[list[int]]) -> list[Reading]:
        """Read what verdicts at these positions are made of."""

    @abstractmethod
    def _verdicts(self, reading: Reading) -> npt.NDArray[np.float64]:
        """Return scores, one per position."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep cells and verdicts."""
        with self.lm.keep_prefixes():
            with self._counting:
                self._sessions += 1
            try:
                yield
            finally:
                with self._counting:
                    self._sessions -= 1
                    if self._sessions == 0:
                        self._known.clear()
                        self._beginnings.clear()

    def score_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Score every step."""
        return [rating.scores for rating in self.rate_steps(prompts, solutions)]

    def rate_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[Rating]:
        """Score every step, with costs; what is known from earlier calls of a session is not read again, and of equal
        solutions the first pays."""
        return self._rated(prompts, solutions)

    def _rate_texts(self, prompts: Sequence[str | Prompt], texts: Sequence[str]) -> list[Rating]:
        if not self.outcome:
            return super()._rate_texts(prompts, texts)
        return self._rated(prompts, [split_steps(text, self.step_stop) or [""] for text in texts], whole=True)

    def _rated(
        self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]], whole: bool = False
    ) -> list[Rating]:
        """Score every step of the solutions, or the last of each only."""
        keys = [(Prompt.of(p), tuple(steps)) for p, steps in zip(prompts, solutions, strict=True)]
        with self.session():
            costs = self._ask(keys, whole)
            names = {key: self._names(*key)[-1 if whole else 0 :] for key in keys}
            return [Rating([self._known[name] for name in names[key]], costs.pop(key, Usage())) for key in keys]

    def total(self, scores: Sequence[float]) -> float:
        """Aggregate scores; of an outcome reward model the last counts."""
        return float(scores[-1]) if self.outcome and scores else super().total(scores)

    def _names(self, prompt: Prompt, steps: Sequence[str]) -> list[int]:
        """Name a solution's beginnings, shortest first; equal beginnings have the same one within a session."""
        found: list[int] = []
        before: Prompt | int = prompt
        for step in steps:
            before = self._beginnings.setdefault((before, step), next(self._count))
            found.append(before)
        return found

    def _ask(self, keys: Sequence[_Solution], whole: bool = False) -> dict[_Solution, Usage]:
        """Let `_known` hold the verdict on every step of these solutions, or on the whole of each; what each cost."""
        asked: set[int] = set()
        costs: dict[_Solution, Usage] = {}
        jobs: list[tuple[_Solution, list[int], list[_Named]]] = []
        waiting = 0
        for key in dict.fromkeys(keys):
            costs[key] = Usage()
            length = 0
            for text, names in self._texts(*key, whole):
                length = len(text)
                new = [(at, n) for at, n in names if n not in self._known and n not in asked]
                if not new:
                    continue
                if waiting + length > _TOGETHER:
                    self._answer(jobs, costs)
                    jobs, waiting = [], 0
                jobs.append((key, text, new))
                waiting += length
                asked.update(n for _, n in new)
            costs[key] += Usage(full_scoring_tokens=length)  # the last text holds the others
        self._answer(jobs, costs)
        return costs

    def _answer(self, jobs: Sequence[tuple[_Solution, list[int], list[_Named]]], costs: dict[_Solution, Usage]) -> None:
        """Read texts, and let `_known` hold the verdicts at their positions; their costs are added."""
        readings = self._read([text for _, text, _ in jobs], [[at for at, _ in names] for _, _, names in jobs])
        for reading, (key, _, names) in zip(readings, jobs, strict=True):
            for (_, name), value in zip(names, self._verdicts(reading), strict=True):
                if not math.isfinite(value):
                    raise TilebeamError("The reward model computed values that are not numbers: it is damaged.")
                self._known[name] = float(value)
            costs[key] += Usage(scored_tokens=reading.decoded_tokens, scoring_seconds=reading.seconds)

    def _texts(self, prompt: Prompt, steps: tuple[str, ...], whole: bool) -> Iterator[tuple[list[int], list[_Named]]]:
        """List the texts to read, shorter ones first, and which position of each judges what.

        Raises:
            TilebeamError: a text is empty or too long, or there are more steps than tokens that the model could read.
        """
        if len(steps) > self.lm.n_ctx:
            raise TilebeamError(
                f"A solution has {len(steps)} steps for the reward model, whose context has {self.lm.n_ctx} tokens: "
                "let solutions be shorter."
            )
        layout = self._layout
        tokens = layout.head(prompt)
        names: list[_Named] = []
        for i, (step, name) in enumerate(zip(steps, self._names(prompt, steps), strict=True)):
            tokens += layout.step(step, first=i == 0)
            length = len(tokens) + len(layout.tag)
            if not length:
                raise TilebeamError(
                    "There is nothing to read before the first verdict: prompt, step and tag are empty."
                )
            if length >= self.lm.n_ctx:
                raise TilebeamError(
                    f"A solution is {length} tokens or more for the reward model, whose context has {self.lm.n_ctx}: "
                    "load it with a larger n_ctx, or let solutions be shorter."
                )
            if not self.outcome:
                tokens += layout.tag
                names.append((length - 1, name))
            elif not whole or i + 1 == len(steps):
                yield tokens + layout.tag, [(length - 1, name)]
        if names:
            yield tokens, names


class TokenReward(RewardModel):
    """A reward model that answers with a token: P(good) against P(bad) behind a tag at the end of each step.

    Math-Shepherd (Wang et al. 2023) reads the verdict at the tag " ки"; RLHFlow's models read a chat in which the
    answer "+" follows each step. `tilebeam.scoring.reward_formats.PRESETS` holds both.

    Args:
        lm: the reward model; the search's own model or another.
        tag: instead of the format's.
        good, bad: the labels; one token each.
        format: how prompt and steps are written; None: one after the other, each step followed by the tag.
        outcome, aggregate, step_stop: see `RewardModel`.

    Raises:
        TilebeamError: a label is not one token of this model, or there is no tag.
    """

    def __init__(
        self,
        lm: LM,
        *,
        tag: str | None = None,
        good: str = "+",
        bad: str = "-",
        format: RewardFormat | None = None,
        outcome: bool = False,
        aggregate: Aggregation = AGGREGATION,
        step_stop: str = STEP_STOP,
    ) -> None:
        form = format or RewardFormat()
        form = form if tag is None else replace(form, tag=tag)
        super().__init__(lm, form, outcome=outcome, aggregate=aggregate, step_stop=step_stop)
        if not self._layout.tag:
            raise TilebeamError("The tag has no tokens: a label is read behind a tag.")
        self._labels = [_one_token(lm, label) for label in (good, bad)]
        if self._labels[0] == self._labels[1]:
            raise TilebeamError(f"The labels {good!r} and {bad!r} are the same token of this reward model.")

    def _read(self, texts: list[list[int]], positions: list[list[int]]) -> list[Reading]:
        return self.lm.read(texts, positions, self._labels)

    def _verdicts(self, reading: Reading) -> npt.NDArray[np.float64]:
        """Return P(good) / (P(good) + P(bad))."""
        return sigmoid(reading.logits[:, 0].astype(np.float64) - reading.logits[:, 1])


class HeadReward(RewardModel):
    """A reward model whose verdict a small network makes of the hidden state behind each step: a value head (Skywork's
    open PRMs), layers over two labels (Qwen2.5-Math-PRM), or the classifier in the model's own file.

    Args:
        lm: the reward model.
        head: the network; see `load_head` and `classifier_of`.
        format: how prompt and steps are written.
        outcome, aggregate, step_stop: see `RewardModel`.

    Raises:
        TilebeamError: the head takes other hidden states than this model has.
    """

    def __init__(
        self,
        lm: LM,
        head: Head,
        *,
        format: RewardFormat | None = None,
        outcome: bool = False,
        aggregate: Aggregation = AGGREGATION,
        step_stop: str = STEP_STOP,
    ) -> None:
        super().__init__(lm, format or RewardFormat(), outcome=outcome, aggregate=aggregate, step_stop=step_stop)
        if head.features or (head.adapter is not None and str(head.adapter) not in dict(lm.info.lora)):
            raise TilebeamError(
                "This reward head reads what its own model wrote: give it without --prm and --orm, to the model that "
                "it was made for."
            )
        if head.n_embd != lm.n_embd:
            raise TilebeamError(
                f"The reward head ({head.shape}) takes hidden states of {head.n_embd} elements, the model's have "
                f"{lm.n_embd}: it belongs to another model."
            )
        self.head = head

    def _read(self, texts: list[list[int]], positions: list[list[int]]) -> list[Reading]:
        return self.lm.hidden(texts, positions)

    def _verdicts(self, reading: Reading) -> npt.NDArray[np.float64]:
        """Apply the head to each hidden state."""
        return self.head(reading.hidden)


def _one_token(lm: LM, label: str) -> int:
    tokens = lm.tokenize(label, add_special=False)
    if len(tokens) != 1:
        raise TilebeamError(f"The label {label!r} is {len(tokens)} tokens of this reward model; it must be one.")
    return tokens[0]
