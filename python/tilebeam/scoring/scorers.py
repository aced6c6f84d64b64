"""What says how good a candidate is."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilebeam.answers.extract import Equal, Extractor, equality_of, last_number, merged
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, RequestOutput, Usage

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


class Scorer(ABC):
    """Rates candidates; higher is better.

    Attributes:
        needs_logprobs: candidates must carry ``cumulative_logprob``.
    """

    needs_logprobs: bool = False

    @property
    def usage(self) -> Usage:
        """What scoring has cost in the calling thread since it was last set; scorers that run a model add to it."""
        return getattr(self._accounts, "usage", None) or Usage()

    @usage.setter
    def usage(self, value: Usage) -> None:
        self._accounts.usage = value

    @property
    def _accounts(self) -> threading.local:
        accounts: threading.local = self.__dict__.setdefault("_usage_of_threads", threading.local())
        return accounts

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
        equal: whether two answers are the same; see `tilebeam.SelfConsistency`.
    """

    def __init__(self, extract: Extractor = last_number, *, equal: Equal | None = None) -> None:
        self.extract = extract
        self.equal = equal or equality_of(extract)

    def score(self, prompt: str, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Votes for each candidate's answer, divided by the number of candidates."""
        answers = merged([self.extract(c.text) for c in candidates], self.equal)
        votes = Counter(a for a in answers if a is not None)
        return [votes[a] / len(candidates) if a is not None else 0.0 for a in answers]


def named_scorer(name: str, lm: LM | None = None) -> Scorer:
    """A scorer by name: "logprob", "logprob-sum", "majority", or "judge": a model asked about the candidates.

    Args:
        name: the scorer's.
        lm: the judge.

    Raises:
        TilebeamError: there is none of that name, or no judge.
    """
    known: dict[str, Callable[[], Scorer]] = {
        "logprob": LogProb,
        "logprob-sum": lambda: LogProb(per_token=False),
        "majority": Majority,
    }
    if name in known:
        return known[name]()
    if name != "judge":
        raise TilebeamError(f"There is no scorer {name!r}: there are {', '.join(known)}, judge.")
    if lm is None:
        raise TilebeamError("A judge needs a model: make it with tilebeam.LLMJudge(lm).")
    from tilebeam.scoring.judge import LLMJudge

    return LLMJudge(lm)


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


def rate(scorer: Scorer, outputs: Sequence[RequestOutput]) -> tuple[list[list[float]], list[Usage]]:
    """The scores of all candidates of several prompts, and what they cost each prompt.

    Raises:
        TilebeamError: as `checked_scores`.
    """
    began = time.perf_counter()
    scorer.usage = Usage()
    scored = scorer.score_many([o.prompt for o in outputs], [o.outputs for o in outputs])
    if len(scored) != len(outputs):
        raise TilebeamError(f"{type(scorer).__name__} scored {len(scored)} of {len(outputs)} prompts.")
    scores = [checked_scores(s, o.outputs, scorer) for s, o in zip(scored, outputs, strict=True)]
    return scores, shared_costs(scorer, time.perf_counter() - began, [len(o.outputs) for o in outputs])


def shared_costs(scorer: Scorer, seconds: float, counts: Sequence[int]) -> list[Usage]:
    """What a scorer has spent, shared out over prompts by the number of texts that it rated for each."""
    names, left = ("scored_tokens", "full_scoring_tokens"), sum(counts)
    tokens = {name: getattr(scorer.usage, name) for name in names}
    costs = []
    for count in counts:
        shares = {name: tokens[name] * count // left if left else 0 for name in names}
        costs.append(Usage(**shares, scoring_seconds=seconds * count / max(1, sum(counts))))
        tokens, left = {name: tokens[name] - shares[name] for name in names}, left - count
    return costs


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
