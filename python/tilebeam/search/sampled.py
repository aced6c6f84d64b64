"""Spend more compute on a prompt: Best-of-N and self-consistency."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from tilebeam.answers.extract import Extractor, equality_of, last_number, weight_of
from tilebeam.answers.extractors import as_extractor
from tilebeam.answers.normalize import Equal, merged
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.checks import is_finite
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, RequestOutput, check_complete
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.scoring.scorers import LogProb, Scorer, Verifier, log_probability, rate_outputs
from tilebeam.search.contract import (
    Algorithm,
    Generator,
    Result,
    SearchCall,
    SearchProgress,
    SearchResult,
    Trajectory,
    VoteResult,
)
from tilebeam.search.events import EventHook, RunningVote, candidate_event, tally
from tilebeam.search.limits import best_index, standings, voters
from tilebeam.search.search_defaults import SHARPNESS, Weighting


class _WholeSearch(Algorithm[Result]):
    """Draws all candidates in one go, has them scored, and lets the subclass choose."""

    scorer: Scorer | None = None
    needs_logprobs: bool = False

    def search(self, lm: Generator, call: SearchCall) -> list[Result]:
        """See `Algorithm.search`; of the model, only `generate` is asked."""
        wanted: dict[str, Any] = {"logprobs": True} if self.needs_logprobs else {}
        wanted |= self.scorer.needs() if self.scorer is not None else {}
        params = [replace(p, n=call.budget, **wanted) for p in call.sampling]
        if not call.prompts:
            return []
        teller = None
        if call.events is not None:
            teller = Teller(call.events, [self._vote() for _ in call.prompts], self._weight)
        outputs = self._drawn(lm, call, params, teller)
        scores: list[list[float]] | list[None] = [None] * len(outputs)
        if self.scorer is not None:
            ratings = rate_outputs(self.scorer, call.prompts, outputs)
            for output, rating in zip(outputs, ratings, strict=True):
                output.usage += rating.usage
            scores = [self._weights(o.outputs, r.scores) for o, r in zip(outputs, ratings, strict=True)]
            if teller is not None:
                teller.rated(outputs, scores)
        return [self._choose(output, s) for output, s in zip(outputs, scores, strict=True)]

    def _drawn(
        self, lm: Generator, call: SearchCall, params: list[SamplingParams], teller: Teller | None
    ) -> list[RequestOutput]:
        """Draw the candidates of all prompts and tell of each."""
        hook = SearchProgress(call.progress, call.budget * len(call.prompts)).call(0)
        told: dict[str, Any] = {} if teller is None else {"on_sample": teller.ended}
        outputs = lm.generate(call.prompts, params, progress=hook, **told)
        check_complete(outputs)
        return outputs

    def _vote(self) -> RunningVote | None:
        """Make the vote that events tell, if there is one."""
        return None

    def _weight(self, candidate: CompletionOutput) -> float | None:  # noqa: ARG002
        """Weigh a candidate, as far as it tells by itself."""
        return None

    def _weights(self, candidates: Sequence[CompletionOutput], scores: list[float]) -> list[float]:  # noqa: ARG002
        """Make what the search chooses by of the scorer's scores of a prompt's candidates."""
        return scores

    @abstractmethod
    def _choose(self, output: RequestOutput, scores: list[float] | None) -> Result:
        """Make the result of a prompt's candidates and, with a scorer, of what `_weights` made of its scores."""


@dataclass
class Teller:
    """Tells what happens to candidates that are drawn in one go.

    Attributes:
        votes: of each prompt; None where nothing votes.
        weight: of a candidate in a vote, None while a scorer has not rated it.
    """

    events: EventHook
    votes: Sequence[RunningVote | None]
    weight: Callable[[CompletionOutput], float | None]

    def ended(self, prompt: int, candidate: CompletionOutput) -> None:
        """Report that a candidate is complete."""
        vote, weight = self.votes[prompt], self.weight(candidate)
        answer, votes = vote.add(candidate, weight) if vote is not None else (None, None)
        self.events(candidate_event(prompt, candidate, score=weight, answer=answer, votes=votes))

    def rated(self, outputs: Sequence[RequestOutput], scores: Sequence[Sequence[float]]) -> None:
        """Report that all candidates have their scores."""
        for prompt, (output, own) in enumerate(zip(outputs, scores, strict=True)):
            for candidate, score in zip(output.outputs, own, strict=True):
                vote = self.votes[prompt]
                answer, votes = vote.rate(candidate.index, score) if vote is not None else (None, None)
                ended = candidate_event(prompt, candidate, score=score, answer=answer, votes=votes)
                self.events(replace(ended, event="score", text="", tokens=0))


class BestOfN(_WholeSearch[SearchResult]):
    """Draw N candidates, keep the one that the scorer likes best, of equals the first. One that was cut is kept only
    where none ended by itself, or where the scorer checks texts and rates it higher (`Scorer.knows`).

    Args:
        scorer: a `Scorer`, a function of prompt and text (see `Verifier`), or a scorer's name. Default: `Consensus`.
    """

    name: ClassVar[str] = "best-of-n"

    def __init__(self, scorer: Scorer | Callable[[str, str], float | bool] | str = "consensus") -> None:
        self.scorer = as_scorer(scorer)

    def _choose(self, output: RequestOutput, scores: list[float] | None) -> SearchResult:
        assert scores is not None
        assert self.scorer is not None
        ends = standings(output.outputs)
        first, then = (scores, ends) if self.scorer.knows else (ends, scores)
        best = best_index(first, then)
        paths = whole_trajectories(output.outputs)
        drawn = output.usage, output.seed, len(output.outputs)
        return SearchResult(output.prompt, output.outputs, scores, best, *drawn, paths)


class SelfConsistency(_WholeSearch[VoteResult]):
    """Draw N candidates and let their answers vote (Wang et al., "Self-Consistency Improves Chain of Thought
    Reasoning").

    The heaviest answer wins, of equals the one seen first, unless the extractor has an ``elect`` of its own, as
    `tilebeam.Structures` has. Candidates that were cut vote only where none that ended has an answer. The best
    candidate is the heaviest that voted for the answer, of equals the first; without any answer it is the heaviest
    candidate, those that ended before those that were cut.

    Args:
        extract: from a text to its answer, None if it holds none, or the name of such a function; see
            `tilebeam.answers.extractors.extractor`.
        weighting: "plain": one vote each. "logprob": exp of the mean log-probability per token. "reward": the
            scorer's scores, which must not be negative. "softmax": see `vote_weights`.
        scorer: for "reward", and for "softmax", where `LogProb` is the default.
        sharpness: for "softmax": how much good scores count. 0: not at all.
        equal: whether two answers are the same. Default: the extractor's own ``equal`` if it has one, as
            `tilebeam.MathAnswer` and those of numbers have; else equal strings.
    """

    name: ClassVar[str] = "self-consistency"

    def __init__(
        self,
        extract: Extractor | str = last_number,
        *,
        weighting: Weighting = "plain",
        scorer: Scorer | Callable[[str, str], float | bool] | str | None = None,
        sharpness: float | None = None,
        equal: Equal | None = None,
    ) -> None:
        if weighting not in get_args(Weighting):
            raise TilebeamError(f"weighting must be one of {', '.join(get_args(Weighting))}, not {weighting!r}.")
        relative = weighting == "softmax"
        if relative and scorer is None:
            scorer = LogProb()
        if (weighting == "reward" or relative) != (scorer is not None):
            raise TilebeamError(f"weighting={weighting!r} {'takes no' if scorer is not None else 'needs a'} scorer.")
        if sharpness is not None and not (relative and is_finite(sharpness) and sharpness >= 0):
            raise TilebeamError(f"sharpness is a number >= 0, of softmax weights, not {sharpness!r}.")
        self.extract = as_extractor(extract)
        self.equal = equal or equality_of(self.extract)
        self.weighting = weighting
        self.sharpness = sharpness
        self.scorer = as_scorer(scorer) if scorer is not None else None
        self.needs_logprobs = weighting == "logprob"

    def _vote(self) -> RunningVote:
        return RunningVote(self.extract, self.equal)

    def _weight(self, candidate: CompletionOutput) -> float | None:
        if self.scorer is not None:
            return None
        likely = math.exp(log_probability(candidate, per_token=True)) if self.weighting == "logprob" else 1.0
        return likely * weight_of(self.extract, candidate.text)

    def _weights(self, candidates: Sequence[CompletionOutput], scores: list[float]) -> list[float]:
        return weighed(candidates, self.extract, vote_weights(self.weighting, scores, self.sharpness))

    def _choose(self, output: RequestOutput, scores: list[float] | None) -> VoteResult:
        candidates = output.outputs
        weights = scores
        if weights is None:
            weights = [w for c in candidates if (w := self._weight(c)) is not None]
        answers, votes, winner, best = voted(candidates, weights, self.extract, self.equal)
        paths = whole_trajectories(candidates)
        drawn = output.usage, output.seed, len(candidates)
        return VoteResult(output.prompt, candidates, weights, best, *drawn, paths, answers, votes, winner)


def vote_weights(weighting: Weighting, scores: Sequence[float], sharpness: float | None = None) -> list[float]:
    """Weigh the votes of a prompt's candidates by their scores, against each other.

    - "reward": the scores themselves.
    - "softmax": in proportion to exp(sharpness * z), where z is how many standard deviations a score is above the
      mean: so one sharpness fits all scorers. The weights add up to 1. Taubenfeld et al., "Confidence Improves
      Self-Consistency in LLMs" (arXiv 2502.06233), with a temperature of 1 / sharpness.

    Raises:
        TilebeamError: scores that cannot weigh so: infinite ones, or negative ones for "reward".
    """
    if any(math.isinf(s) or (s < 0 and weighting == "reward") for s in scores):
        least = "" if weighting == "softmax" else " >= 0"
        raise TilebeamError(f"Votes weighted by {weighting} need finite scores{least}, not {min(scores)}.")
    if weighting != "softmax":
        return list(scores)
    sharp = SHARPNESS if sharpness is None else sharpness
    best, spread = max(scores), statistics.pstdev(scores)
    if spread <= 1e-9 * max(map(abs, scores)):  # rounding is no difference
        spread = 1.0
    shares = [math.exp(sharp * (s - best) / spread) for s in scores]
    total = sum(shares)
    return [share / total for share in shares]


def weighed(candidates: Sequence[CompletionOutput], extract: Extractor, weights: Sequence[float]) -> list[float]:
    """Return the weights of votes with what the extractor makes of each candidate's (`weight_of`)."""
    return [w * weight_of(extract, c.text) for w, c in zip(weights, candidates, strict=True)]


def voted(
    candidates: Sequence[CompletionOutput], weights: Sequence[float], extract: Extractor, equal: Equal
) -> tuple[list[str | None], dict[str, float], VotedAnswer | None, int]:
    """Let candidates vote.

    Returns:
        the answer of each; the votes' total weights; the answer that won; and of the candidates that voted for it
        (without an answer, of those that stand highest) the heaviest, of equals the first.
    """
    answers = merged([extract(c.text) for c in candidates], equal)
    ends = standings(candidates)
    voting = voters(answers, ends)
    votes = tally(voting, weights)
    winner = next(iter(votes), None)
    elect: Callable[[Sequence[str], Sequence[float]], str] | None = getattr(extract, "elect", None)
    if winner is not None and elect is not None:
        heard = [(a, w) for a, w in zip(voting, weights, strict=True) if a is not None]
        winner = elect(*zip(*heard, strict=True))
    eligible = [i for i, a in enumerate(voting) if winner is None or a == winner]
    return answers, votes, None if winner is None else VotedAnswer(winner), best_index(ends, weights, eligible)


def whole_trajectories(candidates: Sequence[CompletionOutput]) -> list[Trajectory]:
    """Make the trajectories of candidates that were drawn in one go: one step each."""
    return [Trajectory((c.text,), finished=c.finish_reason == "stop") for c in candidates]


def as_scorer(scorer: Scorer | Callable[[str, str], float | bool] | str) -> Scorer:
    """Return a scorer as it is, the one of a name, or the `Verifier` of a function.

    Raises:
        TilebeamError: it is none of them.
    """
    if isinstance(scorer, str):
        return named_scorer(scorer)
    if isinstance(scorer, Scorer):
        return scorer
    if callable(scorer):
        return Verifier(scorer)
    raise TilebeamError(
        f"A scorer must be a tilebeam.Scorer, the name of one, or a function of prompt and text, not {scorer!r}."
    )
