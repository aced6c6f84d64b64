"""Search by steps under a process reward model: beam search and DVTS (diverse verifier tree search).

Both follow Snell et al., "Scaling LLM Test-Time Compute Optimally" and Hugging Face's search-and-learn: a budget of N
beams, a width of M. Every round each survivor is forked into M continuations of one step; the reward model rates all;
N / M survive. Beam search lets the best of all survive, DVTS the best of each of N / M independent trees. A beam that
has ended competes with the others and, if it wins, holds its place without growing; if it loses, it stays a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tilebeam.answers.extract import Extractor, equality_of
from tilebeam.answers.extractors import as_extractor
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import Usage
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scoring_defaults import STEP_STOP
from tilebeam.search.contract import (
    Algorithm,
    Pruned,
    SearchCall,
    SearchProgress,
    SearchResult,
    StepGenerator,
    Trajectory,
    VoteResult,
)
from tilebeam.search.events import EventHook, Fate, candidate_event
from tilebeam.search.limits import best_index, standings
from tilebeam.search.sampled import vote_weights, voted, weighed
from tilebeam.search.search_defaults import BEAM_WIDTH, MAX_STEP_TOKENS, MAX_STEPS
from tilebeam.search.steps import Beam, Branch, PromptTask, StepExpander


@dataclass(repr=False)
class StepResult(SearchResult):
    """What a search by steps found; ``scores`` are the aggregates of the steps' scores.

    Attributes:
        rounds: steps taken.
        duplicates: continuations that repeated a sibling, token by token, and were dropped unrated.
    """

    rounds: int
    duplicates: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; see `SearchResult.as_dict`."""
        return super().as_dict() | {"rounds": self.rounds, "duplicates": self.duplicates}


@dataclass(repr=False)
class StepVote(StepResult, VoteResult):
    """What a search by steps found whose candidates voted; ``scores`` are the weights of their votes."""


def width_for(beam_width: int, budget: int) -> int:
    """Return the width M of a search: a budget below it is one survivor's continuations.

    Raises:
        TilebeamError: the budget is no multiple of the width.
    """
    width = min(beam_width, checked_integer("budget", budget))
    if budget % width:
        raise TilebeamError(f"budget must be a multiple of beam_width ({width}), not {budget}.")
    return width


@dataclass(eq=False)
class _Search(PromptTask):
    """One prompt's state: the survivors, all that are done (survivors or not), and what was dropped."""

    number: int = 0
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    pool: list[Beam] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    rounds: int = 0
    duplicates: int = 0


class _StepSearch(Algorithm[StepResult]):
    """What both searches share.

    Args:
        scorer: rates steps.
        beam_width: M, continuations of each survivor; a smaller budget is one beam search's whole width.
        max_steps: rounds at most; what has not ended then is a candidate as it is.
        step_stop: what ends a step.
        max_step_tokens: a step that grows longer is rated as it is and goes on in the next round.
        extract: from a text to its answer, or the name of such a function: the candidates' answers vote, weighted by
            their scores, or by "softmax" of them where one is negative. None: the best candidate is chosen.
    """

    trees_apart: ClassVar[bool] = False  # beams compete with those of their own tree only

    def __init__(
        self,
        scorer: StepScorer,
        beam_width: int = BEAM_WIDTH,
        max_steps: int = MAX_STEPS,
        step_stop: str = STEP_STOP,
        *,
        max_step_tokens: int = MAX_STEP_TOKENS,
        extract: Extractor | str | None = None,
    ) -> None:
        self.extract = None if extract is None else as_extractor(extract)
        self.beam_width = checked_integer("beam_width", beam_width)
        self.max_steps = checked_integer("max_steps", max_steps)
        self._expander = StepExpander(scorer, step_stop, max_step_tokens)

    def search(self, lm: StepGenerator, call: SearchCall) -> list[StepResult]:
        """See `Algorithm.search`. The budget is N, a multiple of beam_width or less than it. The best candidate has the
        best aggregate, those that ended before those that did not."""
        width = width_for(self.beam_width, call.budget)
        asked = enumerate(zip(call.prompts, call.sampling, strict=True))
        searches = [_Search(p, p.tokens(lm), params, Usage(), number=i) for i, (p, params) in asked]
        tell = SearchProgress(call.progress, self.max_steps * call.budget * len(searches))
        with self._expander.session(lm):
            for round in range(self.max_steps):
                if not self._advance(lm, call, searches, round, width, tell):
                    break
        return [self._result(search, call.budget) for search in searches]

    def _advance(
        self, lm: StepGenerator, call: SearchCall, searches: list[_Search], round: int, width: int, tell: SearchProgress
    ) -> bool:
        """Do a round for all prompts. False: nothing is left to do."""
        budget = call.budget
        active = [(search, i) for search in searches for i, beam in enumerate(search.beams) if not beam.done]
        if not active:
            return False
        # Rounds, beams of a prompt, and continuations each draw with a seed of their own. For the beginnings of all
        # trees, the prompt itself is sent once.
        n = budget if round == 0 else width
        branches = [Branch(s, s.beams[i], n, s.params.sample_seed(round * budget + i * width)) for s, i in active]
        done = round * budget * len(searches) + budget * len(searches) - n * len(branches)
        expanded = self._expander.expand(lm, branches, tell.call(done))
        fresh: dict[_Search, list[Beam]] = {}
        for (search, _), children in zip(active, expanded, strict=True):
            if round == 0:
                for i, child in enumerate(children):
                    child.tree = i // width
            different: dict[tuple[int, ...], Beam] = {}
            for child in children:
                different.setdefault((child.tree, *child.tokens), child)
            fresh.setdefault(search, []).extend(different.values())
            search.duplicates += len(children) - len(different)
        self._expander.rate(fresh)
        for search, children in fresh.items():
            search.rounds += 1
            search.pool += [b for b in children if b.done]
            rivals = [b for b in search.beams if b.done] + children
            # In the last round nobody has to make room.
            search.beams = rivals if round + 1 == self.max_steps else self._survivors(rivals, budget // width)
            search.pruned += [self._pruned(search, b) for b in children if not b.done and b not in search.beams]
            if call.events is not None:
                self._tell(call.events, search, children, last=round + 1 == self.max_steps)
        return True

    def _tell(self, events: EventHook, search: _Search, children: list[Beam], last: bool) -> None:
        """Report what became of a round's continuations. Candidates are numbered as in the result: those that are done
        in the order in which they were, then those that the last round cut."""
        cut = [b for b in search.beams if not b.done] if last else []
        order = search.pool + cut
        for beam in children:
            fate: Fate = "kept" if beam in search.beams else "dropped"
            if beam.done or last:
                fate = "ended" if beam.ended else "cut"
            self._expander.tell(events, search.number, beam, fate, search.rounds)
            if beam in order:
                candidate, total = beam.candidate(order.index(beam)), self._expander.total(beam)
                events(candidate_event(search.number, candidate, round=search.rounds, score=total))

    def _pruned(self, search: _Search, beam: Beam) -> Pruned:
        """Describe a beam that was dropped after the present round."""
        bar = min(self._expander.total(b) for b in search.beams if not self.trees_apart or b.tree == beam.tree)
        return Pruned(
            tuple(beam.steps),
            tuple(beam.scores),
            tree=beam.tree,
            finished=False,
            round=search.rounds,
            score=self._expander.total(beam),
            bar=bar,
            tokens=len(beam.tokens),
            step_tokens=beam.fresh,
        )

    def _survivors(self, rivals: list[Beam], count: int) -> list[Beam]:
        """Choose the beams that grow on after a round, at most `count`: the best, of equals the first."""
        best = sorted(rivals, key=lambda b: -self._expander.total(b))
        if not self.trees_apart:
            return best[:count]
        return [next(b for b in best if b.tree == tree) for tree in sorted({b.tree for b in rivals})]

    def _result(self, search: _Search, budget: int) -> StepResult:
        beams = search.pool + [b for b in search.beams if not b.done]
        totals = [self._expander.total(b) for b in beams]
        found: dict[str, Any] = {
            "prompt": search.prompt.text,
            "candidates": (candidates := [b.candidate(i) for i, b in enumerate(beams)]),
            "usage": search.usage,
            "seed": search.params.seed or 0,
            "budget": budget,
            "trajectories": [Trajectory(tuple(b.steps), tuple(b.scores), b.ended, b.tree) for b in beams],
            "pruned": search.pruned,
            "rounds": search.rounds,
            "duplicates": search.duplicates,
        }
        if self.extract is None:
            return StepResult(scores=totals, best_index=best_index(standings(candidates), totals), **found)
        relative = vote_weights("reward" if min(totals) >= 0 else "softmax", totals)
        weights = weighed(candidates, self.extract, relative)
        answers, votes, winner, best = voted(candidates, weights, self.extract, equality_of(self.extract))
        return StepVote(scores=weights, best_index=best, answers=answers, votes=votes, answer=winner, **found)


class BeamSearch(_StepSearch):
    """The best N / M of all beams survive each round."""

    name: ClassVar[str] = "beam"


class DVTS(_StepSearch):
    """N / M trees grow side by side, and of each the best beam survives: diversity that one good start cannot crowd
    out."""

    name: ClassVar[str] = "dvts"
    trees_apart = True
