"""Every search algorithm over a scripted model, against what its paper says it must choose, worked out naively.

The oracles know nothing of batches, caches or accounts: they draw texts one by one and read them from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import END, Drawn, ScriptedLM, ScriptedPRM
from tilebeam import SamplingParams, SearchResult, VoteResult, last_number
from tilebeam.search import algorithms as methods
from tilebeam.search.adaptive import AdaptiveResult, majority_confidence, queued, stays_ahead
from tilebeam.search.beam import StepResult

PROMPTS = ["a", "b1", "2 a"]
STOPS = st.sampled_from([(), ("#",), ("\n\n",), ("a\n",), ("b1", "2\n1"), ("\n",)])
EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def models(draw: st.DrawFn) -> ScriptedLM:
    return ScriptedLM(
        draw(st.integers(0, 9999)), draw(st.integers(8, 40)), draw(st.sampled_from([0.0, 0.15, 0.5, 1.0]))
    )


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        seed=draw(st.integers(0, 99)),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 14))),
        stop=draw(STOPS),
        temperature=draw(st.sampled_from([0.0, 0.8])),
    )


def check_result(result: SearchResult, lm: ScriptedLM, sampling: SamplingParams, budget: int) -> None:
    """What holds for all algorithms."""
    assert result.budget == budget
    assert len(result.candidates) == len(result.scores) == len(result.trajectories) > 0
    assert result.best is result.candidates[result.best_index]
    assert [c.index for c in result.candidates] == list(range(len(result.candidates)))
    for candidate, trajectory in zip(result.candidates, result.trajectories, strict=True):
        assert "".join(trajectory.steps) == candidate.text
        assert trajectory.finished == (candidate.finish_reason == "stop")
        assert lm.detokenize(candidate.token_ids).startswith(candidate.text)
        assert not any(s in candidate.text for s in sampling.stop)
        assert len(candidate.token_ids) <= (sampling.max_tokens or lm.n_ctx)
        assert END not in candidate.token_ids[:-1]
    assert result.as_dict()["text"] == result.best.text


def check_calls(lm: ScriptedLM, prompts: Sequence[str], budget: int, results: Sequence[SearchResult]) -> None:
    """The budget is kept in every call, no draw is repeated, and the accounts are right."""
    for call in lm.calls:
        for prompt in prompts:
            assert sum(p.n for text, p in call if text.startswith(prompt)) <= budget
        assert sum(p.n for _, p in call) <= budget * len(prompts)
    assert sum(r.usage.completion_tokens for r in results) == lm.drawn
    for prompt, result in zip(prompts, results, strict=True):
        ids = lm.tokenize(prompt)
        n = len(ids)
        asked = [len(request) for request in lm.requests if request[:n] == ids]
        # The prompt counts once; of what later requests begin with, the scripted model decodes the second half again.
        assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (n, n // 2)
        assert result.usage.recomputed_tokens == sum(m - m // 2 for m in asked[1:])
    assert lm.kept == 0


def draw_all(lm: ScriptedLM, prompt: str, sampling: SamplingParams, budget: int) -> list[str]:
    """The texts of a Best-of-N."""
    assert sampling.seed is not None
    return [lm.draw(lm.tokenize(prompt), sampling, sampling.seed + i).text for i in range(budget)]


# --- whole candidates -------------------------------------------------------------------------------------------------


@given(models(), samplings(), st.integers(1, 9), st.integers(0, 99))
@EXAMPLES
def test_best_of_n(lm: ScriptedLM, sampling: SamplingParams, budget: int, world: int) -> None:
    prm = ScriptedPRM(world, aggregate="min")
    results = methods.create("best-of-n", scorer=prm).run(lm, PROMPTS, budget, sampling=sampling)
    check_calls(lm, PROMPTS, budget, results)
    for prompt, result in zip(PROMPTS, results, strict=True):
        check_result(result, lm, sampling, budget)
        texts = draw_all(lm, prompt, sampling, budget)
        assert [c.text for c in result.candidates] == texts
        steps = [t.splitlines(keepends=True) for t in texts]
        scores = [min((prm.score_of(prompt, s[: i + 1]) for i in range(len(s))), default=0.0) for s in steps]
        assert result.scores == scores
        ended = [c.finish_reason == "stop" for c in result.candidates]
        best = max(s for s, e in zip(scores, ended, strict=True) if e or not any(ended))
        assert (result.scores[result.best_index], ended[result.best_index]) == (best, any(ended))
        assert (best, any(ended)) not in list(zip(scores, ended, strict=True))[: result.best_index]
    assert sum(r.usage.scored_tokens for r in results) == prm.rated


def ballots(answers: Sequence[str | None], ended: Sequence[bool]) -> list[str | None]:
    """The answers that count: those of texts that were cut only if no other has one."""
    whole = [a if e else None for a, e in zip(answers, ended, strict=True)]
    return whole if any(a is not None for a in whole) else list(answers)


def first_with_most(answers: Sequence[str | None], weights: Sequence[float]) -> str | None:
    known = list(dict.fromkeys(a for a in answers if a is not None))
    totals = [math.fsum(w for a, w in zip(answers, weights, strict=True) if a == k) for k in known]
    return known[max(range(len(known)), key=lambda i: (round(totals[i], 9), -i))] if known else None


@given(models(), samplings(), st.integers(1, 9), st.sampled_from(["plain", "logprob", "reward"]), st.integers(0, 99))
@EXAMPLES
def test_self_consistency(lm: ScriptedLM, sampling: SamplingParams, budget: int, weighting: str, world: int) -> None:
    prm = ScriptedPRM(world)
    options: dict[str, Any] = {"scorer": prm} if weighting == "reward" else {}
    method = methods.create("vote", weighting=weighting, extract="last-number", **options)
    results = method.run(lm, PROMPTS, budget, sampling=sampling)
    check_calls(lm, PROMPTS, budget, results)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert isinstance(result, VoteResult)
        check_result(result, lm, sampling, budget)
        texts = draw_all(lm, prompt, sampling, budget)
        assert [c.text for c in result.candidates] == texts
        answers = [last_number(t) for t in texts]
        weights = [1.0] * budget
        if weighting == "logprob":
            chances = [[-((t * 7 + c.seed) % 5) / 4 for t in c.token_ids] for c in result.candidates]
            weights = [math.exp(sum(c) / len(c)) for c in chances]
        elif weighting == "reward":
            steps = [t.splitlines(keepends=True) for t in texts]
            weights = [prm.score_of(prompt, s) if s else 0.0 for s in steps]
        assert result.answers == answers
        assert result.scores == pytest.approx(weights)
        ended = [c.finish_reason == "stop" for c in result.candidates]
        voting = ballots(answers, ended)
        assert sum(result.votes.values()) == pytest.approx(
            sum(w for a, w in zip(voting, weights, strict=True) if a is not None)
        )
        if weighting != "logprob":  # sums of other numbers may tie in other bits
            assert result.answer == first_with_most(voting, weights)
        mates = [i for i, a in enumerate(voting) if result.answer in (None, a)]
        if result.answer is None:
            mates = [i for i in mates if ended[i]] or mates
        assert result.best_index in mates
        assert result.scores[result.best_index] == max(result.scores[i] for i in mates)


# --- by steps ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOptions:
    width: int
    max_steps: int
    step_stop: str
    max_step_tokens: int


@st.composite
def step_options(draw: st.DrawFn) -> StepOptions:
    return StepOptions(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["\n", "b", "\n\n"])),
        draw(st.integers(1, 6)),
    )


@dataclass
class Node:
    """A text of the oracle: tokens, and where its steps end."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    bounds: list[int] = field(default_factory=list)
    done: bool = False
    ended: bool = False
    tree: int = 0

    def steps(self) -> list[str]:
        at = [0, *(b for b in self.bounds if b < len(self.text)), len(self.text)]
        return [self.text[a:b] for a, b in pairwise(at) if a < b] or [""]


@dataclass
class Oracle:
    """Texts by steps, one at a time."""

    lm: ScriptedLM
    prm: ScriptedPRM
    prompt: str
    sampling: SamplingParams
    options: StepOptions

    def grow(self, node: Node, seed: int) -> Node:
        ids = self.lm.tokenize(self.prompt)
        most = self.sampling.max_tokens if self.sampling.max_tokens is not None else 10**6
        limit = min(self.options.max_step_tokens, most - len(node.tokens))
        params = replace(self.sampling, max_tokens=limit, stop=(self.options.step_stop, *self.sampling.stop))
        got = self.lm.draw(ids + node.tokens, params, seed)
        tokens = node.tokens + got.tokens
        text = self.lm.detokenize(tokens)
        cuts = [text.find(s) for s in self.sampling.stop if s in text]
        step_over = got.stop_reason == self.options.step_stop and not cuts
        if cuts:
            text = text[: min(cuts)]
        ended = bool(cuts) or (got.finish_reason == "stop" and not step_over)
        full = len(tokens) >= most or len(ids) + len(tokens) >= self.lm.n_ctx
        return Node(tokens, text, node.bounds + [len(text)] * step_over, ended or full, ended, node.tree)

    def scores(self, node: Node) -> list[float]:
        steps = node.steps()
        return [self.prm.score_of(self.prompt, steps[: i + 1]) for i in range(len(steps))]

    def worth(self, node: Node) -> float:
        return self.prm.total(self.scores(node))

    def search(self, budget: int, diverse: bool) -> tuple[list[Node], list[float], int]:
        """Candidates, what they are worth, and the best."""
        width = min(self.options.width, budget)
        assert self.sampling.seed is not None
        beams, pool = [Node()], []
        for round in range(self.options.max_steps):
            if all(b.done for b in beams):
                break
            children: list[Node] = []
            for i, beam in enumerate(beams):
                if beam.done:
                    continue
                for j in range(budget if round == 0 else width):
                    child = self.grow(beam, self.sampling.seed + round * budget + i * width + j)
                    child.tree = j // width if round == 0 else beam.tree
                    if (child.tree, child.tokens) not in [(c.tree, c.tokens) for c in children]:
                        children.append(child)
            pool += [c for c in children if c.done]
            rivals = [b for b in beams if b.done] + children
            if round + 1 < self.options.max_steps:
                best_first = sorted(rivals, key=self.worth, reverse=True)
                if diverse:
                    trees = sorted({b.tree for b in rivals})
                    rivals = [next(b for b in best_first if b.tree == t) for t in trees]
                else:
                    rivals = best_first[: budget // width]
            beams = rivals
        found = pool + [b for b in beams if not b.done]
        worth = [self.worth(n) for n in found]
        return found, worth, max(range(len(found)), key=lambda i: (found[i].ended, worth[i], -i))


@given(
    models(),
    samplings(),
    step_options(),
    st.integers(1, 4),
    st.sampled_from(["beam", "dvts"]),
    st.sampled_from(["last", "min", "prod", "mean"]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_beam_search_and_dvts(
    lm: ScriptedLM,
    sampling: SamplingParams,
    options: StepOptions,
    trees: int,
    name: str,
    aggregate: Any,
    votes: bool,
    world: int,
) -> None:
    prm = ScriptedPRM(world, aggregate=aggregate)
    budget = options.width * trees
    extract: dict[str, Any] = {"extract": "last-number"} if votes else {}
    method = methods.create(
        name,
        scorer=prm,
        beam_width=str(options.width),
        max_steps=options.max_steps,
        step_stop=options.step_stop,
        max_step_tokens=options.max_step_tokens,
        **extract,
    )
    results = method.run(lm, PROMPTS, budget, sampling=sampling)
    check_calls(lm, PROMPTS, budget, results)
    assert all(p.max_tokens is not None and p.max_tokens <= options.max_step_tokens for c in lm.calls for _, p in c)
    assert len(lm.calls) <= options.max_steps
    for prompt, result in zip(PROMPTS, results, strict=True):
        check_result(result, lm, sampling, budget)
        nodes, worth, best = Oracle(lm, prm, prompt, sampling, options).search(budget, name == "dvts")
        assert [c.token_ids for c in result.candidates] == [n.tokens for n in nodes]
        assert [c.text for c in result.candidates] == [n.text for n in nodes]
        assert [list(t.steps) for t in result.trajectories] == [n.steps() for n in nodes]
        assert [t.finished for t in result.trajectories] == [n.ended for n in nodes]
        assert result.scores == worth
        assert isinstance(result, VoteResult) == votes
        if isinstance(result, VoteResult):
            assert result.answers == [last_number(n.text) for n in nodes]
            voting = ballots(result.answers, [n.ended for n in nodes])
            assert result.answer == first_with_most(voting, worth)
            mates = [i for i, a in enumerate(voting) if result.answer in (None, a)]
            best = max(mates, key=lambda i: (nodes[i].ended, worth[i], -i))
        assert result.best_index == best
        assert all(len(t.scores) == len(t.steps) for t in [*result.trajectories, *result.pruned])
        check_pruned(result, prm, options, one_tree=name == "beam")
    assert sum(r.usage.scored_tokens for r in results) == prm.rated


def check_pruned(result: SearchResult, prm: ScriptedPRM, options: StepOptions, one_tree: bool) -> None:
    """Each was worth no more than any that stayed, and every beam is either a candidate or dropped."""
    assert isinstance(result, StepResult)
    for beam in result.pruned:
        assert beam.score == prm.total(list(beam.scores)) <= beam.bar
        assert 1 <= beam.round < options.max_steps
        assert 0 < beam.step_tokens <= options.max_step_tokens
        assert (beam.step_tokens == beam.tokens) == (beam.round == 1)
        assert not beam.finished
    assert sum(beam.step_tokens for beam in result.pruned) <= result.usage.completion_tokens
    trees = {t.tree for t in result.trajectories}
    assert trees <= set(range(result.budget // options.width))
    if not one_tree:
        assert {p.tree for p in result.pruned} <= trees  # the best of each tree stays


@given(models(), samplings(), st.sampled_from(["beam", "dvts"]), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_budget_below_the_width_is_the_width(
    lm: ScriptedLM, sampling: SamplingParams, name: str, budget: int
) -> None:
    wide = methods.create(name, scorer=ScriptedPRM(), beam_width=4).run(lm, PROMPTS, budget, sampling=sampling)
    own = methods.create(name, scorer=ScriptedPRM(), beam_width=budget).run(lm, PROMPTS, budget, sampling=sampling)
    assert [r.as_dict() | {"usage": 0} for r in wide] == [r.as_dict() | {"usage": 0} for r in own]


# --- adaptive ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("leader", "second"), [(0, 0), (1, 0), (4, 0), (3, 2), (7, 3), (40, 12), (2000, 1900)])
def test_the_beta_criterion_is_the_integral_of_the_posterior(leader: int, second: int) -> None:
    p = np.linspace(0, 1, 400_001)[1:-1]
    log_density = leader * np.log(p) + second * np.log1p(-p)
    density = np.exp(log_density - log_density.max())
    half = len(density) // 2
    upper = density[half + 1 :].sum() + density[half] / 2
    assert majority_confidence(leader, second) == pytest.approx(upper / density.sum(), abs=2e-5)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_budget_that_ends_is_the_mean_over_the_posterior(leader: int, second: int, left: int) -> None:
    """Of the binomial chance of staying ahead, given the leader's share."""
    p = np.linspace(0, 1, 20_001)[1:-1]
    density = p**leader * (1 - p) ** second
    chance = sum(
        math.comb(left, k) * p**k * (1 - p) ** (left - k) for k in range(left + 1) if leader + k > second + left - k
    )
    assert stays_ahead(leader, second, left) == pytest.approx(float((density * chance).sum() / density.sum()), abs=2e-4)
    assert (stays_ahead(leader, second, left) == 1.0) == (leader - second > left)


def settled(
    given: Sequence[str | None], ended: Sequence[bool], budget: int, confidence: float, *, weighted: bool = False
) -> bool:
    """Whether the vote is decided, by the rule's words. One that ends can overtake any number that were cut."""
    answers = ballots(given, ended)
    final = all(e for a, e in zip(answers, ended, strict=True) if a is not None)
    counts = [*sorted((answers.count(a) for a in set(answers) if a is not None), reverse=True), 0, 0]
    left = budget - len(answers)
    if left == 0:
        return False
    certain = counts[0] - counts[1] > left and final
    sure = stays_ahead(*counts[:2], left) if final else majority_confidence(*counts[:2])
    return (certain and not weighted) or (confidence < 1 and counts[0] > counts[1] and sure >= confidence)


@given(
    models(),
    samplings(),
    st.integers(1, 16),
    st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    st.sampled_from(["plain", "logprob", "reward"]),
)
@settings(max_examples=150, deadline=None)
def test_adaptive_stops_when_the_vote_is_settled(
    lm: ScriptedLM, sampling: SamplingParams, budget: int, confidence: float, weighting: str
) -> None:
    options: dict[str, Any] = {"weighting": weighting} | ({"scorer": ScriptedPRM()} if weighting == "reward" else {})
    method = methods.create("adaptive", confidence=str(confidence), **options)
    results = method.run(lm, PROMPTS, budget, sampling=sampling)
    check_calls(lm, PROMPTS, budget, results)
    assert all(p.n <= 4 for call in lm.calls for _, p in call)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert isinstance(result, AdaptiveResult)
        check_result(result, lm, sampling, budget)
        texts = draw_all(lm, prompt, sampling, budget)
        answers = [last_number(t) for t in texts]
        assert sampling.seed is not None
        drawn = [lm.draw(lm.tokenize(prompt), sampling, sampling.seed + i) for i in range(budget)]
        ended = [d.finish_reason == "stop" for d in drawn]
        weighted = weighting != "plain"
        n = next(
            (k for k in range(1, budget) if settled(answers[:k], ended[:k], budget, confidence, weighted=weighted)),
            budget,
        )
        voting = ballots(answers[:n], ended[:n])
        assert [c.text for c in result.candidates] == texts[:n]
        assert result.answers == answers[:n]
        assert (result.settled, result.budget) == (n < budget, budget)
        vote = methods.create("vote", **options)
        plain = vote.infer(ScriptedLM(lm.world, lm.n_ctx, lm.ends), prompt, n, sampling=sampling)
        assert isinstance(plain, VoteResult)
        assert (result.answer, result.votes, result.scores) == (plain.answer, plain.votes, plain.scores)
        assert result.best_index == plain.best_index
        if not weighted:
            assert result.answer == first_with_most(voting, [1.0] * n)
        if confidence == 1.0 and result.settled:
            assert result.answer == first_with_most(ballots(answers, ended), [1.0] * budget)


def test_full_confidence_is_not_reached_by_rounding() -> None:
    class Unanimous(ScriptedLM):
        def draw(self, before: Sequence[int], params: SamplingParams, seed: int) -> Drawn:  # noqa: ARG002
            return Drawn([3, END], "1", "stop", None)

    assert majority_confidence(60, 0) == 1.0  # in floating point
    for confidence, n in ((0.95, 4), (1.0, 101)):
        [result] = methods.create("adaptive", confidence=confidence).run(Unanimous(), ["a"], 200)
        assert len(result.candidates) == n


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 9), st.integers(1, 32))
def test_candidates_wait_in_an_order_that_fills_the_slots(prompts: int, budget: int, size: int, slots: int) -> None:
    order = queued(prompts, budget, size, slots)
    assert sorted(order) == [(p, first) for p in range(prompts) for first in range(0, budget, size)]
    for p, first in order:
        if first and p + slots // size < prompts:  # the slots were filled once more since its group before
            between = order[order.index((p, first - size)) : order.index((p, first))]
            assert len(between) * size >= slots - size + 1
    assert queued(2, 8, 4, 8) == [(0, 0), (1, 0), (0, 4), (1, 4)]
    assert queued(4, 8, 4, 8) == [(0, 0), (1, 0), (0, 4), (2, 0), (1, 4), (3, 0), (2, 4), (3, 4)]
