"""Spend more compute on a prompt: Best-of-N and self-consistency.

Every search takes one prompt or a list (which share batches), a budget in candidates, and returns a typed result that
keeps all candidates and what they cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar, overload

from tilebeam.errors import TilebeamError
from tilebeam.extract import Extractor, last_number
from tilebeam.outputs import CompletionOutput, ProgressHook, RequestOutput, Usage
from tilebeam.sampling import SamplingParams
from tilebeam.scorers import Scorer, Verifier, checked_scores, log_probability

Weighting = Literal["plain", "logprob", "reward"]


class Generator(Protocol):
    """What a search asks of a model; `tilebeam.LM` is one."""

    def generate(
        self, prompts: Sequence[str], sampling: SamplingParams, *, progress: ProgressHook | None = None
    ) -> list[RequestOutput]:
        """Samples for each prompt."""
        ...


@dataclass
class SearchResult:
    """What a search found for one prompt.

    Attributes:
        prompt: the prompt.
        candidates: all samples, in the order of their seeds.
        scores: one per candidate.
        best_index: of the chosen candidate.
        usage: tokens and seconds spent on this prompt.
        seed: what the candidates' seeds derive from.
    """

    prompt: str
    candidates: list[CompletionOutput]
    scores: list[float]
    best_index: int
    usage: Usage
    seed: int

    @property
    def the_one(self) -> CompletionOutput:
        """The chosen candidate."""
        return self.candidates[self.best_index]


@dataclass
class VoteResult(SearchResult):
    """What a vote found; ``scores`` are the candidates' weights.

    Attributes:
        answers: each candidate's answer, None where there was none.
        votes: total weight per answer, heaviest first.
        answer: the winner, None if no candidate has an answer.
    """

    answers: list[str | None]
    votes: dict[str, float]
    answer: str | None


Result = TypeVar("Result", bound=SearchResult)


class Search(Generic[Result]):
    """What all searches share: sampling, scoring, and the accounts. Subclasses choose."""

    scorer: Scorer | None = None
    needs_logprobs: bool = False

    @overload  # a str is a Sequence[str] too: the first signature that fits counts
    def infer(  # type: ignore[overload-overlap]
        self,
        lm: Generator,
        prompt: str,
        budget: int = ...,
        *,
        sampling: SamplingParams | None = ...,
        progress: ProgressHook | None = ...,
    ) -> Result: ...
    @overload
    def infer(
        self,
        lm: Generator,
        prompt: Sequence[str],
        budget: int = ...,
        *,
        sampling: SamplingParams | None = ...,
        progress: ProgressHook | None = ...,
    ) -> list[Result]: ...
    def infer(
        self,
        lm: Generator,
        prompt: str | Sequence[str],
        budget: int = 16,
        *,
        sampling: SamplingParams | None = None,
        progress: ProgressHook | None = None,
    ) -> Result | list[Result]:
        """Search.

        Args:
            lm: the model.
            prompt: one prompt, or several that share batches.
            budget: candidates per prompt.
            sampling: how to draw them; its ``n`` is replaced by the budget.
            progress: as for `LM.generate`.

        Returns:
            One result for one prompt, a list for a list.

        Raises:
            TilebeamError: a budget below 1, a cancelled search, a scorer that misbehaves, or what `generate` raises.
        """
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise TilebeamError(f"budget must be a whole number of at least 1, not {budget!r}.")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        params = sampling or SamplingParams()
        wants = self.needs_logprobs or (self.scorer is not None and self.scorer.needs_logprobs)
        params = replace(params, n=budget, logprobs=params.logprobs or wants)
        outputs = lm.generate(prompts, params, progress=progress)
        if any(c.finish_reason == "aborted" for o in outputs for c in o.outputs):
            raise TilebeamError("The search was cancelled.")
        began = time.perf_counter()
        groups: list[list[float] | None] = [None] * len(outputs)
        if self.scorer is not None:
            scored = self.scorer.score_many([o.prompt for o in outputs], [o.outputs for o in outputs])
            groups = [checked_scores(s, o.outputs, self.scorer) for s, o in zip(scored, outputs, strict=True)]
        share = (time.perf_counter() - began) / max(1, len(outputs))
        results = []
        for output, scores in zip(outputs, groups, strict=True):
            usage = output.usage + Usage(scoring_seconds=share)
            results.append(self._choose(output, scores, usage))
        return results[0] if isinstance(prompt, str) else results

    def _choose(self, output: RequestOutput, scores: list[float] | None, usage: Usage) -> Result:
        raise NotImplementedError


class BestOfN(Search[SearchResult]):
    """Draw N candidates, keep the one that the scorer likes best; of equals, the first.

    Args:
        scorer: a `Scorer`, or a function of prompt and text (see `Verifier`).
    """

    def __init__(self, scorer: Scorer | Callable[[str, str], float | bool]) -> None:
        self.scorer = _scorer(scorer)

    def _choose(self, output: RequestOutput, scores: list[float] | None, usage: Usage) -> SearchResult:
        assert scores is not None
        best = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return SearchResult(output.prompt, output.outputs, scores, best, usage, output.seed)


class SelfConsistency(Search[VoteResult]):
    """Draw N candidates and let their answers vote.

    The heaviest answer wins, of equals the one seen first. `the_one` is the heaviest candidate with that answer, of
    equals the first; without any answer it is the heaviest candidate.

    Args:
        extract: from a text to its answer, None if it holds none. Answers are compared as strings; the extractors of
            `tilebeam.extract` normalize them.
        weighting: "plain": one vote each. "logprob": exp of the mean log-probability per token. "reward": the
            scorer's scores, which must not be negative.
        scorer: for "reward".
    """

    def __init__(
        self,
        extract: Extractor = last_number,
        *,
        weighting: Weighting = "plain",
        scorer: Scorer | Callable[[str, str], float | bool] | None = None,
    ) -> None:
        if weighting not in ("plain", "logprob", "reward"):
            raise TilebeamError(f'weighting must be "plain", "logprob" or "reward", not {weighting!r}.')
        if (weighting == "reward") != (scorer is not None):
            raise TilebeamError('weighting="reward" needs a scorer, and only it takes one.')
        self.extract = extract
        self.weighting = weighting
        self.scorer = _scorer(scorer) if scorer is not None else None
        self.needs_logprobs = weighting == "logprob"

    def _choose(self, output: RequestOutput, scores: list[float] | None, usage: Usage) -> VoteResult:
        candidates = output.outputs
        if scores is not None:
            if any(s < 0 or math.isinf(s) for s in scores):
                raise TilebeamError(f"Reward-weighted votes need finite scores >= 0, not {min(scores)}.")
            weights = scores
        elif self.weighting == "logprob":
            weights = [math.exp(log_probability(c, per_token=True)) for c in candidates]
        else:
            weights = [1.0] * len(candidates)
        answers = [self.extract(c.text) for c in candidates]
        totals: dict[str, float] = {}
        for answer, weight in zip(answers, weights, strict=True):
            if answer is not None:
                totals[answer] = totals.get(answer, 0.0) + weight
        # sorted() is stable: of equal totals the one seen first stays first.
        votes = dict(sorted(totals.items(), key=lambda item: -item[1]))
        winner = next(iter(votes), None)
        eligible = [i for i, a in enumerate(answers) if winner is None or a == winner]
        best = max(eligible, key=lambda i: (weights[i], -i))
        return VoteResult(output.prompt, candidates, weights, best, usage, output.seed, answers, votes, winner)


def _scorer(scorer: Scorer | Callable[[str, str], float | bool]) -> Scorer:
    if isinstance(scorer, Scorer):
        return scorer
    if callable(scorer):
        return Verifier(scorer)
    raise TilebeamError(f"A scorer must be a tilebeam.Scorer or a function of prompt and text, not {scorer!r}.")
