"""Voting that stops when it is decided, and lets go of candidates that lead nowhere.

The stopping rule is that of Aggarwal et al., "Let's Sample Step by Step: Adaptive-Consistency for Efficient Reasoning
and Coding with LLMs" (section 3.2, Beta criterion), for a budget that ends: with v1 and v2 votes for the two leading
answers, the share p of the leader's among theirs is Beta(v1 + 1, v2 + 1), and the vote is settled when the leader would
still lead with the wanted probability if all candidates that are left voted for the two.

The rule looks at candidates in the order of their seeds, each drawn like any other. In the order in which they end,
short ones would come first, and which votes count would depend on what else the model decodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any, ClassVar, cast

from tilebeam.answers.extract import Extractor, last_number
from tilebeam.answers.normalize import Equal
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, RequestOutput, Usage, check_complete
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scorers import Scorer
from tilebeam.scoring.scoring_defaults import STEP_STOP
from tilebeam.search.contract import (
    Algorithm,
    Generator,
    SearchCall,
    SearchProgress,
    StepGenerator,
    Trajectory,
    VoteResult,
)
from tilebeam.search.events import EventHook, Fate, RunningVote, candidate_event
from tilebeam.search.limits import ENDED, standings, voters
from tilebeam.search.sampled import SelfConsistency, Teller, elected
from tilebeam.search.search_defaults import (
    BUDGET,
    CONFIDENCE,
    LOOKAHEAD,
    MAX_STEP_TOKENS,
    MAX_STEPS,
    WAVE,
    Weighting,
)
from tilebeam.search.steps import Beam, Branch, PromptTask, StepExpander, tasks_of


@dataclass(repr=False)
class AdaptiveResult(VoteResult):
    """What an adaptive vote found; ``scores`` are the candidates' weights, or the aggregates of a scorer of steps.

    Attributes:
        confidence: that the leader by number stays ahead: among all candidates of the budget where the vote was
            settled, else however many more were drawn.
        settled: the vote was decided before the budget was spent.
        give_up: the aggregate below which candidates were given up; None: they were drawn in one go.
    """

    confidence: float
    settled: bool
    give_up: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; see `SearchResult.as_dict`."""
        more = {"confidence": self.confidence, "settled": self.settled, "give_up": self.give_up}
        return super().as_dict() | more


class Adaptive(Algorithm[AdaptiveResult]):
    """Vote, but draw no more candidates than it takes to settle the vote.

    A vote is settled when its leader would still lead after all candidates of the budget with the wanted confidence, or
    for sure; where all that voted were cut, one that ends always could overtake them. The rule counts candidates,
    whatever they weigh. Candidates draw with the seeds of those of `SelfConsistency`, and the result is the vote of the
    first of them, as many as it takes.

    One prompt's candidates start together, as many as the model has slots; once the vote is settled, those that run
    are cancelled. Many prompts have few candidates under way each, and slots go to the next prompts.

    With ``give_up``, candidates grow step by step and have one vote each. One whose aggregate falls below it is given
    up: it has no vote, but counts against the budget. The best candidate is then the one that the scorer likes best
    among those with the winning answer.

    Args:
        extract, sharpness, equal: see `SelfConsistency`.
        weighting: see `SelfConsistency`. None: "reward" with a scorer, else "plain".
        scorer: weighs votes, or rates steps.
        confidence: between 1/2 and 1; 1 stops only when nothing could change any more: never, where votes have weights.
        wave: the vote is looked at after so many candidates, which are drawn together. None: after each.
        give_up: an unfinished candidate whose aggregate under a scorer of steps is below this is given up.
        max_steps, step_stop, max_step_tokens: with ``give_up``: see `BeamSearch`.
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
        wave: int | None = None,
        give_up: float | None = None,
        max_steps: int | None = None,
        step_stop: str | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        for option, value in (("confidence", confidence), ("give_up", give_up)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TilebeamError(f"{option} must be a number, not {value!r}.")
        if not 0.5 <= confidence <= 1:
            raise TilebeamError(f"confidence must be between 0.5 and 1, not {confidence!r}.")
        by_steps = {"max_steps": max_steps, "step_stop": step_stop, "max_step_tokens": max_step_tokens}
        given = [option for option, value in by_steps.items() if value is not None]
        if given and give_up is None:
            raise TilebeamError(f"{given[0]} works only with give_up: without it, candidates are drawn in one go.")
        if give_up is not None and (scorer is None or weighting not in (None, "plain")):
            raise TilebeamError("give_up works only with a scorer, which rates steps, and plain weights.")
        self.confidence = confidence
        self.wave = None if wave is None else checked_integer("wave", wave)
        self.give_up = give_up
        self.max_steps = checked_integer("max_steps", MAX_STEPS if max_steps is None else max_steps)
        weigher = scorer if give_up is None else None
        weighting = weighting or ("plain" if weigher is None else "reward")
        self._vote = _EarlyVote(self.confidence, self.wave, extract, weighting, weigher, sharpness, equal)
        self._expander: StepExpander | None = None
        if give_up is not None:
            stop = STEP_STOP if step_stop is None else step_stop
            most = MAX_STEP_TOKENS if max_step_tokens is None else max_step_tokens
            self._expander = StepExpander(cast(StepScorer, scorer), stop, most, LOOKAHEAD)

    def search(self, lm: StepGenerator, call: SearchCall) -> list[AdaptiveResult]:
        """See `Algorithm.search`."""
        if self._expander is None:
            return [self._of_vote(vote, call.budget) for vote in self._vote.search(lm, call)]
        polls = [
            _Poll(task, number, RunningVote(self._vote.extract, self._vote.equal))
            for number, task in enumerate(tasks_of(lm, call))
        ]
        tell = SearchProgress(call.progress, call.budget * len(polls))
        with self._expander.session(lm):
            while open_polls := [p for p in polls if not p.settled and len(p.candidates) < call.budget]:
                drawn = sum(call.budget if p.settled else len(p.candidates) for p in polls)
                self._wave(lm, call, self._expander, open_polls, tell, drawn)
                for poll in open_polls:
                    poll.settled = _settled(poll.vote, call.budget - len(poll.candidates), self.confidence)
        return [self._of_poll(p, call.budget) for p in polls]

    def _wave(
        self,
        lm: StepGenerator,
        call: SearchCall,
        expander: StepExpander,
        polls: list[_Poll],
        tell: SearchProgress,
        drawn: int,
    ) -> None:
        """Draw a wave of candidates for each prompt, which grow until they end or look hopeless."""
        grown: dict[_Poll, list[Beam]] = {}
        for round in range(self.max_steps):
            branches: list[Branch] = []
            places: list[tuple[_Poll, int]] = []  # where each branch's first beam goes
            for poll in polls:
                first = len(poll.candidates)
                # Rounds and candidates each draw with a seed of their own.
                if round == 0:
                    n = min(self.wave or WAVE, call.budget - first)
                    branches.append(Branch(poll.task, Beam(), n, poll.task.params.sample_seed(first)))
                    places.append((poll, 0))
                    grown[poll] = []
                    continue
                for i, beam in enumerate(grown[poll]):
                    if not beam.done and not self._hopeless(expander, beam):
                        seed = poll.task.params.sample_seed(round * call.budget + first + i)
                        branches.append(Branch(poll.task, beam, 1, seed))
                        places.append((poll, i))
            if not branches:
                break
            fresh: dict[PromptTask, list[Beam]] = {}
            over = sum(map(len, grown.values())) - len(branches) if round else 0
            for (poll, at), beams in zip(places, expander.expand(lm, branches, tell.aside(drawn + over)), strict=True):
                grown[poll][at : at + len(beams)] = beams
                fresh.setdefault(poll.task, []).extend(beams)
            expander.rate(lm, fresh, tell)
            if call.events is not None:
                self._tell_steps(call.events, expander, polls, fresh, round + 1)
        for poll, beams in grown.items():
            poll.trajectories += [beam.trajectory() for beam in beams]
            for beam in beams:
                given_up = self._hopeless(expander, beam)
                poll.add(beam.candidate(len(poll.candidates), given_up=given_up), expander.total(beam), call.events)

    def _tell_steps(
        self,
        events: EventHook,
        expander: StepExpander,
        polls: list[_Poll],
        fresh: dict[PromptTask, list[Beam]],
        round: int,
    ) -> None:
        """Report what became of a round's continuations."""
        for poll in polls:
            for beam in fresh.get(poll.task, ()):
                fate: Fate = "kept"
                if self._hopeless(expander, beam):  # in the last round, too: its candidate has no vote
                    fate = "given up"
                elif beam.done or round == self.max_steps:
                    fate = "ended" if beam.ended else "cut"
                expander.tell(events, poll.number, beam, fate, round)

    def _hopeless(self, expander: StepExpander, beam: Beam) -> bool:
        return not beam.done and self.give_up is not None and expander.total(beam) < self.give_up

    def _of_vote(self, vote: VoteResult, budget: int) -> AdaptiveResult:
        """Make the result of a vote over whole candidates."""
        drawn = len(vote.candidates)
        sure = _confidence_of(vote.answers, vote.candidates, budget - drawn)
        return AdaptiveResult(**vars(vote) | {"budget": budget}, confidence=sure, settled=drawn < budget)

    def _of_poll(self, poll: _Poll, budget: int) -> AdaptiveResult:
        votes, winner, best = elected(poll.candidates, poll.answers, [1.0] * len(poll.answers), poll.totals)
        return AdaptiveResult(
            prompt=poll.task.prompt.text,
            candidates=poll.candidates,
            scores=poll.totals,
            best_index=best,
            usage=poll.task.usage,
            seed=poll.task.params.seed or 0,
            budget=budget,
            trajectories=poll.trajectories,
            answers=poll.answers,
            votes=votes,
            answer=winner,
            confidence=_confidence_of(poll.answers, poll.candidates, budget - len(poll.candidates)),
            settled=poll.settled,
            give_up=self.give_up,
        )


@dataclass(eq=False)
class _Poll:
    """One prompt's vote so far, over candidates that grow step by step."""

    task: PromptTask
    number: int
    vote: RunningVote
    candidates: list[CompletionOutput] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    settled: bool = False

    def add(self, candidate: CompletionOutput, total: float, events: EventHook | None) -> None:
        """Count a candidate that is complete, or was given up, and report it."""
        answer: str | None = None
        votes: dict[str, float] | None = self.vote.votes()
        if candidate.finish_reason != "aborted":
            answer, votes = self.vote.add(candidate, 1.0)
        self.candidates.append(candidate)
        self.totals.append(total)
        self.answers.append(answer)
        if events is not None:
            events(candidate_event(self.number, candidate, score=total, answer=answer, votes=votes))


class _EarlyVote(SelfConsistency):
    """A vote over the first candidates, as many as settle it.

    Args:
        confidence, wave: see `Adaptive`; the others: see `SelfConsistency`.
    """

    def __init__(
        self,
        confidence: float,
        wave: int | None,
        extract: Extractor | str,
        weighting: Weighting,
        scorer: Scorer | None,
        sharpness: float | None,
        equal: Equal | None,
    ) -> None:
        super().__init__(extract, weighting=weighting, scorer=scorer, sharpness=sharpness, equal=equal)
        self._confidence, self._wave = confidence, wave

    def _drawn(
        self, lm: Generator, call: SearchCall, params: list[SamplingParams], teller: Teller | None
    ) -> list[RequestOutput]:
        """Draw in groups until each vote is settled; what is not needed any more is cancelled."""
        budget, size = call.budget, self._wave or WAVE
        groups = queued(len(call.prompts), budget, size, int(getattr(lm, "n_seq_max", BUDGET)))
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
                if count.size % (self._wave or 1) == 0:
                    count.settled = _settled(count.vote, budget - count.size, self._confidence, weighed)
            return own[number] if count.settled else ()

        firsts = [(params[number], first) for number, first in groups]
        wanted = [replace(p, n=min(size, budget - first), seed=p.sample_seed(first)) for p, first in firsts]
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


def _settled(vote: RunningVote, left: int, confidence: float, weighed: bool = False) -> bool:
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
    voting = [(a, e) for a, e in zip(voters(answers, ends), ends, strict=True) if a is not None]
    leader, second = ([n for _, n in Counter(a for a, _ in voting).most_common(2)] + [0, 0])[:2]
    final = all(end == ENDED for _, end in voting)
    return stays_ahead(leader, second, left) if left and final else majority_confidence(leader, second)
