"""Voting that stops when it is decided.

The stopping rule is that of Aggarwal et al., "Let's Sample Step by Step: Adaptive-Consistency for Efficient Reasoning
and Coding with LLMs" (section 3.2, Beta criterion), for a budget that ends: with v1 and v2 votes for the two leading
answers, the share p of the leader's among theirs is Beta(v1 + 1, v2 + 1), and the vote is settled when the leader would
still lead with the wanted probability if all candidates that are left voted for the two.

The rule looks at candidates in the order of their seeds, each drawn like any other. In the order in which they end,
short ones would come first, and which votes count would depend on what else the model decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any, ClassVar, cast

from tilebeam.answers.extract import Extractor, last_number
from tilebeam.answers.normalize import Equal
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, RequestOutput, Usage, check_complete
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.scorers import Scorer
from tilebeam.search.contract import Algorithm, Generator, SearchCall, SearchProgress, StepGenerator, VoteResult
from tilebeam.search.events import RunningVote
from tilebeam.search.limits import ENDED, leaders, standings, voters
from tilebeam.search.sampled import SelfConsistency, Teller
from tilebeam.search.search_defaults import BUDGET, CONFIDENCE, WAVE, Weighting
from tilebeam.search.steps import PromptTask


@dataclass(repr=False)
class AdaptiveResult(VoteResult):
    """What an adaptive vote found; ``scores`` are the candidates' weights.

    Attributes:
        confidence: that the leader by number stays ahead: among all candidates of the budget where the vote was
            settled, else however many more were drawn.
        settled: the vote was decided before the budget was spent.
    """

    confidence: float
    settled: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; see `SearchResult.as_dict`."""
        return super().as_dict() | {"confidence": self.confidence, "settled": self.settled}


class Adaptive(Algorithm[AdaptiveResult]):
    """Vote, but draw no more candidates than it takes to settle the vote.

    A vote is settled when its leader would still lead after all candidates of the budget with the wanted confidence, or
    for sure; where all that voted were cut, one that ends always could overtake them. The rule counts candidates,
    whatever they weigh. Candidates draw with the seeds of those of `SelfConsistency`, and the result is the vote of the
    first of them, as many as it takes.

    One prompt's candidates start together, as many as the model has slots; once the vote is settled, those that run
    are cancelled. Many prompts have few candidates under way each, and slots go to the next prompts.

    Args:
        extract, sharpness, equal: see `SelfConsistency`.
        weighting: see `SelfConsistency`. None: "reward" with a scorer, else "plain".
        scorer: weighs votes.
        confidence: between 1/2 and 1; 1 stops only when nothing could change any more: never, where votes have weights.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(
        self,
        extract: Extractor | str = last_number,
        *,
        weighting: Weighting | None = None,
        scorer: Scorer | None = None,
        sharpness: float | None = None,
        equal: Equal | None = None,
        confidence: float = CONFIDENCE,
    ) -> None:
        if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0.5 <= confidence <= 1:
            raise TilebeamError(f"confidence must be a number between 0.5 and 1, not {confidence!r}.")
        weighting = weighting or ("plain" if scorer is None else "reward")
        self._vote = _EarlyVote(extract, weighting=weighting, scorer=scorer, sharpness=sharpness, equal=equal)
        self._vote.confidence = confidence

    def search(self, lm: StepGenerator, call: SearchCall) -> list[AdaptiveResult]:
        """See `Algorithm.search`."""
        found = []
        for vote in self._vote.search(lm, call):  # over the first candidates
            left = call.budget - len(vote.candidates)
            sure = _confidence_of(vote.answers, vote.candidates, left)
            found.append(AdaptiveResult(**vars(vote) | {"budget": call.budget}, confidence=sure, settled=left > 0))
        return found


class _EarlyVote(SelfConsistency):
    """A vote over the first candidates, as many as settle it.

    Attributes:
        confidence: see `Adaptive`.
    """

    confidence = CONFIDENCE

    def _drawn(
        self, lm: Generator, call: SearchCall, params: list[SamplingParams], teller: Teller | None
    ) -> list[RequestOutput]:
        """Draw in groups until each vote is settled; what is not needed any more is cancelled."""
        budget = call.budget
        groups = queued(len(call.prompts), budget, WAVE, int(getattr(lm, "n_seq_max", BUDGET)))
        own: dict[int, list[int]] = {}  # groups of each prompt
        for group, (number, _) in enumerate(groups):
            own.setdefault(number, []).append(group)
        counts = [_Count(self._vote()) for _ in call.prompts]
        weighed = self.weighting != "plain" or hasattr(self.extract, "weight")
        if teller is not None:
            teller.votes = [count.vote for count in counts]

        def ended(group: int, sample: CompletionOutput) -> Sequence[int]:
            number, first = groups[group]
            count = counts[number]
            count.came[first + sample.index] = replace(sample, index=first + sample.index)
            while not count.settled and (candidate := count.came.pop(count.size, None)) is not None:
                count.size += 1
                if teller is None:
                    count.vote.add(candidate, None)
                else:
                    teller.ended(number, candidate)
                count.settled = _settled(count.vote, budget - count.size, self.confidence, weighed)
            return own[number] if count.settled else ()

        firsts = [(params[number], first) for number, first in groups]
        wanted = [replace(p, n=min(WAVE, budget - first), seed=p.sample_seed(first)) for p, first in firsts]
        hook = SearchProgress(call.progress, budget * len(call.prompts)).call(0)
        with cast(StepGenerator, lm).keep_prefixes():  # groups of a prompt have its cells in common
            parts = lm.generate([call.prompts[number] for number, _ in groups], wanted, progress=hook, on_sample=ended)
        outputs = []
        for number, (count, prompt) in enumerate(zip(counts, call.prompts, strict=True)):
            task = PromptTask(prompt, [], params[number], Usage())
            candidates: list[CompletionOutput] = []
            for part in (parts[group] for group in own[number]):
                task.account(part.usage)
                candidates += [replace(c, index=len(candidates) + i) for i, c in enumerate(part.outputs)]
            kept = candidates[: count.size if count.settled else budget]
            first = parts[own[number][0]]
            outputs.append(replace(first, outputs=kept, usage=task.usage))
        check_complete(outputs)
        return outputs


@dataclass(eq=False)
class _Count:
    """One prompt's vote while its candidates come.

    Attributes:
        came: those that have ended before one of an earlier seed, by their index.
        size: candidates that have voted.
    """

    vote: RunningVote
    came: dict[int, CompletionOutput] = field(default_factory=dict)
    size: int = 0
    settled: bool = False


def queued(prompts: int, budget: int, size: int, slots: int) -> list[tuple[int, int]]:
    """Put groups of candidates in the order in which they wait for slots: by prompt's number and first candidate.

    Where all find a slot, the order does not matter. Where they do not, a prompt's next group stands behind the first
    groups of so many others as fill the slots, so that it starts when most of the group before it has ended.
    """
    ahead = max(1, slots // size)
    firsts = range(0, budget, size)
    places = [(p + ahead * group, -group, p, first) for p in range(prompts) for group, first in enumerate(firsts)]
    return [(p, first) for _, _, p, first in sorted(places)]


def _settled(vote: RunningVote, left: int, confidence: float, weighed: bool) -> bool:
    """Return whether a vote is decided while so many candidates are left."""
    leader, second = vote.leaders()
    if left <= 0 or leader <= second:
        return False
    if vote.standing < ENDED:  # one that ends could overtake any number of them
        return majority_confidence(leader, second) >= confidence and confidence < 1
    if confidence == 1:
        return leader > second + left and not weighed
    return stays_ahead(leader, second, left) >= confidence


def majority_confidence(leader: int, second: int) -> float:
    """Return P(p > 1/2) under Beta(leader + 1, second + 1): how sure it is that the answer with the most votes stays
    ahead, however many more vote.

    For whole numbers of votes this is the chance that of leader + second + 1 fair coins at most `leader` show heads.
    """
    coins = leader + second + 1
    return sum(comb(coins, heads) for heads in range(leader + 1)) / (1 << coins)


def stays_ahead(leader: int, second: int, left: int) -> float:
    """Return how sure it is that the leader has more votes than the second after `left` more, all for one of the two,
    where the share of the leader's is Beta(leader + 1, second + 1); exactly 1 if it is certain."""
    ways, term = 0, comb(second + left, left)  # the term of `more`: C(leader + more, more) C(second + rest, rest)
    for more, rest in enumerate(range(left, -1, -1)):
        if leader + more > second + rest:
            ways += term
        term = term * (leader + more + 1) * rest // ((more + 1) * max(1, second + rest))
    return ways / comb(leader + second + left + 1, left)


def _confidence_of(answers: Sequence[str | None], candidates: Sequence[CompletionOutput], left: int) -> float:
    """Return how sure a vote is; see `AdaptiveResult`."""
    ends = standings(candidates)
    voting = voters(answers, ends)
    leader, second = leaders(voting)
    final = all(end == ENDED for answer, end in zip(voting, ends, strict=True) if answer is not None)
    return stays_ahead(leader, second, left) if left and final else majority_confidence(leader, second)
