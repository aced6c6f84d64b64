"""Voting that stops when it is decided, and lets go of candidates that lead nowhere.

The stopping rule is that of Aggarwal et al., "Let's Sample Step by Step: Adaptive-Consistency for Efficient Reasoning
and Coding with LLMs" (section 3.2, Beta criterion): with v1 and v2 votes for the two leading answers, the probability
that the leader would still lead after any number of samples is that of p > 1/2 under Beta(v1 + 1, v2 + 1).
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from tilebeam.answers.extract import Extractor, equality_of, last_number, weight_of
from tilebeam.answers.extractors import as_extractor
from tilebeam.answers.normalize import Equal, merged
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, check_complete
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scoring_defaults import STEP_STOP
from tilebeam.search.contract import Algorithm, SearchCall, SearchProgress, StepGenerator, Trajectory, VoteResult
from tilebeam.search.events import EventHook, Fate, RunningVote, candidate_event
from tilebeam.search.limits import ENDED, standings
from tilebeam.search.sampled import elected, whole_trajectories
from tilebeam.search.search_defaults import CONFIDENCE, GIVE_UP, LOOKAHEAD, MAX_STEP_TOKENS, MAX_STEPS, WAVE
from tilebeam.search.steps import Beam, Branch, PromptTask, StepExpander, tasks_of


@dataclass(repr=False)
class AdaptiveResult(VoteResult):
    """What an adaptive vote found; ``scores`` are the reward model's aggregates, 1 without one.

    Attributes:
        confidence: that the winner would stay ahead, by the Beta criterion.
        settled: the vote was decided before the budget was spent.
        give_up: the aggregate below which candidates were given up; None without a reward model.
    """

    confidence: float
    settled: bool
    give_up: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; see `SearchResult.as_dict`."""
        more = {"confidence": self.confidence, "settled": self.settled, "give_up": self.give_up}
        return super().as_dict() | more


@dataclass(eq=False)
class _Poll:
    """One prompt's vote so far."""

    task: PromptTask
    number: int
    vote: RunningVote  # for events
    candidates: list[CompletionOutput] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    settled: bool = False

    def elected(self) -> tuple[dict[str, float], VotedAnswer | None, int]:
        """Count the votes, which weigh what the extractor says; see `tilebeam.search.sampled.elected`."""
        weights = [weight_of(self.vote.extract, c.text) for c in self.candidates]
        return elected(self.candidates, self.answers, weights, self.totals)


class Adaptive(Algorithm[AdaptiveResult]):
    """Draw candidates in waves and stop once their vote is settled; give up candidates that look hopeless.

    A vote is settled when its leader is ahead with the wanted confidence, or when the candidates that are left could
    not overtake it; where all that voted were cut, one that ends always could. Without a scorer, candidates draw with
    the same seeds as those of `SelfConsistency`.

    With a scorer, candidates grow step by step, and one whose aggregate falls below ``give_up`` is given up: it has no
    vote, but counts against the budget. The best candidate is the one that the scorer likes best among those with the
    winning answer (without a scorer: the first of them).

    Args:
        extract, equal: see `SelfConsistency`.
        scorer: rates steps.
        confidence: between 1/2 and 1; 1 stops only when nothing could change any more.
        wave: candidates of a prompt that are drawn at a time. More use the hardware better, fewer stop earlier.
        give_up: with a scorer: an unfinished candidate whose aggregate is below this is given up.
        max_steps, step_stop, max_step_tokens: with a scorer: see `BeamSearch`.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(
        self,
        extract: Extractor | str = last_number,
        *,
        scorer: StepScorer | None = None,
        equal: Equal | None = None,
        confidence: float = CONFIDENCE,
        wave: int = WAVE,
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
        by_steps = {
            "give_up": give_up,
            "max_steps": max_steps,
            "step_stop": step_stop,
            "max_step_tokens": max_step_tokens,
        }
        given = [option for option, value in by_steps.items() if value is not None]
        if scorer is None and given:
            raise TilebeamError(f"{given[0]} works only with a scorer: without one, candidates are drawn in one go.")
        self.extract = as_extractor(extract)
        self.equal = equal or equality_of(self.extract)
        self.confidence = confidence
        self.wave = checked_integer("wave", wave)
        self.give_up = GIVE_UP if give_up is None else give_up
        self.max_steps = checked_integer("max_steps", MAX_STEPS if max_steps is None else max_steps)
        self._expander: StepExpander | None = None
        if scorer is not None:
            stop = STEP_STOP if step_stop is None else step_stop
            most = MAX_STEP_TOKENS if max_step_tokens is None else max_step_tokens
            self._expander = StepExpander(scorer, stop, most, LOOKAHEAD)

    def search(self, lm: StepGenerator, call: SearchCall) -> list[AdaptiveResult]:
        """See `Algorithm.search`."""
        budget = call.budget
        polls = [
            _Poll(task, number, RunningVote(self.extract, self.equal))
            for number, task in enumerate(tasks_of(lm if self._expander else None, call))
        ]
        tell = SearchProgress(call.progress, budget * len(polls))
        with ExitStack() as stack:
            stack.enter_context(self._expander.session(lm) if self._expander else lm.keep_prefixes())
            while open_polls := [p for p in polls if not p.settled and len(p.candidates) < budget]:
                drawn = sum(budget if p.settled else len(p.candidates) for p in polls)
                if self._expander:
                    self._wave_by_steps(lm, call, self._expander, open_polls, tell, drawn)
                else:
                    self._wave(lm, call, open_polls, tell, drawn)
                for poll in open_polls:
                    self._count(poll, budget)
        return [self._result(p, budget) for p in polls]

    def _wave(self, lm: StepGenerator, call: SearchCall, polls: list[_Poll], tell: SearchProgress, drawn: int) -> None:
        """Draw a wave of whole candidates for each prompt."""
        params = [
            replace(
                p.task.params,
                n=min(self.wave, call.budget - len(p.candidates)),
                seed=p.task.params.sample_seed(len(p.candidates)),
            )
            for p in polls
        ]
        told = {} if call.events is None else {"on_sample": partial(_tell_ended, call.events, polls)}
        outputs = lm.generate([p.task.prompt for p in polls], params, progress=tell.call(drawn), **told)
        check_complete(outputs)
        for poll, output in zip(polls, outputs, strict=True):
            poll.task.account(output.usage)
            first = len(poll.candidates)
            fresh = [replace(c, index=first + i) for i, c in enumerate(output.outputs)]
            poll.candidates += fresh
            poll.trajectories += whole_trajectories(fresh)
            poll.totals += [1.0] * len(fresh)

    def _wave_by_steps(
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
                    n = min(self.wave, call.budget - first)
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
            first = len(poll.candidates)
            for i, beam in enumerate(beams):
                poll.candidates.append(beam.candidate(first + i, given_up=self._hopeless(expander, beam)))
            poll.trajectories += [beam.trajectory() for beam in beams]
            poll.totals += [expander.total(beam) for beam in beams]
            if call.events is not None:
                for candidate, total in zip(poll.candidates[first:], poll.totals[first:], strict=True):
                    _tell_candidate(call.events, poll, candidate, total)

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
        return not beam.done and expander.total(beam) < self.give_up

    def _count(self, poll: _Poll, budget: int) -> None:
        """Take the new candidates' answers, and see whether more could change the outcome."""
        poll.answers += [
            self.extract(c.text) if c.finish_reason != "aborted" else None for c in poll.candidates[len(poll.answers) :]
        ]
        poll.answers = merged(poll.answers, self.equal)
        left = (budget - len(poll.candidates)) * getattr(self.extract, "heaviest", 1.0)
        votes, _, best = poll.elected()
        leader, second = _leaders(votes)
        surely = leader > second + left and standings(poll.candidates)[best] == ENDED  # as all that voted
        likely = leader > second and majority_confidence(leader, second) >= self.confidence
        poll.settled = left > 0 and (surely or (likely and self.confidence < 1))

    def _result(self, poll: _Poll, budget: int) -> AdaptiveResult:
        votes, winner, best = poll.elected()
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
            confidence=majority_confidence(*_leaders(votes)),
            settled=poll.settled,
            give_up=self.give_up if self._expander else None,
        )


def _tell_ended(events: EventHook, polls: list[_Poll], which: int, sample: CompletionOutput) -> None:
    """Report that a candidate of a wave is complete."""
    poll = polls[which]
    _tell_candidate(events, poll, replace(sample, index=len(poll.candidates) + sample.index), 1.0)


def _tell_candidate(events: EventHook, poll: _Poll, candidate: CompletionOutput, total: float) -> None:
    answer: str | None = None
    votes: dict[str, float] | None = poll.vote.votes()
    if candidate.finish_reason != "aborted":
        answer, votes = poll.vote.add(candidate, weight_of(poll.vote.extract, candidate.text))
    events(candidate_event(poll.number, candidate, score=total, answer=answer, votes=votes))


def majority_confidence(leader: int, second: int) -> float:
    """Return P(p > 1/2) under Beta(leader + 1, second + 1): how sure it is that the answer with the most votes stays
    ahead.

    For whole numbers of votes this is the chance that of leader + second + 1 fair coins at most `leader` show heads.
    """
    coins = leader + second + 1
    return sum(math.comb(coins, heads) for heads in range(leader + 1)) / (1 << coins)


def _leaders(votes: dict[str, float]) -> tuple[int, int]:
    """Return the votes of the two leading answers."""
    counts = [*map(int, votes.values()), 0, 0]
    return counts[0], counts[1]
