"""What says how good a candidate is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

from tilebeam.errors import TilebeamError
from tilebeam.extract import Extractor, last_number
from tilebeam.outputs import CompletionOutput


class Scorer(ABC):
    """Rates candidates; higher is better.

    Attributes:
        needs_logprobs: candidates must carry ``cumulative_logprob``.
    """

    needs_logprobs: bool = False

    @abstractmethod
    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:
        """One score per candidate of a prompt, in their order."""

    def score_many(self, prompts: Sequence[str], groups: Sequence[Sequence[CompletionOutput]]) -> list[list[float]]:
        """Scores for the candidates of several prompts. Scorers that can batch over prompts override it."""
        return [self.score(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]


class LogProb(Scorer):
    """The model's own log-probability of what it wrote.

    Args:
        per_token: divide by the number of tokens, so that short candidates have no advantage.
    """

    needs_logprobs = True

    def __init__(self, *, per_token: bool = True) -> None:
        self.per_token = per_token

    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Mean (or sum) of the tokens' natural log-probabilities."""
        return [log_probability(c, per_token=self.per_token) for c in candidates]


class Verifier(Scorer):
    """A function that knows: a checker of answers, unit tests, a rule.

    Args:
        check: gets the prompt and a candidate's text; returns a number, or True or False for 1 and 0.
    """

    def __init__(self, check: Callable[[str, str], float | bool]) -> None:
        self.check = check

    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:
        """What the function says of each text."""
        return [float(self.check(prompt, c.text)) for c in candidates]


class Majority(Scorer):
    """The share of candidates with the same answer; 0 for candidates without one.

    Args:
        extract: from a text to its answer, None if it holds none.
    """

    def __init__(self, extract: Extractor = last_number) -> None:
        self.extract = extract

    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Votes for each candidate's answer, divided by the number of candidates."""
        answers = [self.extract(c.text) for c in candidates]
        votes = Counter(a for a in answers if a is not None)
        return [votes[a] / len(candidates) if a is not None else 0.0 for a in answers]


def log_probability(candidate: CompletionOutput, *, per_token: bool) -> float:
    """Log-probability of a candidate, in total or per token.

    Raises:
        TilebeamError: it was sampled without logprobs.
    """
    if candidate.cumulative_logprob is None:
        raise TilebeamError("A candidate has no log-probability: sample with SamplingParams(logprobs=True).")
    if not per_token:
        return candidate.cumulative_logprob
    return candidate.cumulative_logprob / max(1, len(candidate.token_ids))


def checked_scores(scores: Sequence[float], candidates: Sequence[CompletionOutput], scorer: Scorer) -> list[float]:
    """The scores as floats.

    Raises:
        TilebeamError: a scorer returned another number of scores than it was given candidates, or NaN.
    """
    result = [float(s) for s in scores]
    name = type(scorer).__name__
    if len(result) != len(candidates):
        raise TilebeamError(f"{name} returned {len(result)} scores for {len(candidates)} candidates.")
    if any(math.isnan(s) for s in result):
        raise TilebeamError(f"{name} returned a score that is not a number.")
    return result
