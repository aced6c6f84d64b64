"""Texts that grow step by step under a process reward model: what beam search and DVTS have in common.

A fork shares the KV cells of its beginning, in the model and in the reward model: nothing is sent or decoded twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, FinishReason, ProgressHook, Usage, check_complete
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scorers import checked_scores, shares
from tilebeam.search.contract import StepGenerator
from tilebeam.search.events import EventHook, Fate, SearchEvent

if TYPE_CHECKING:
    from tilebeam.text_state import TextState


@dataclass(eq=False)
class Beam:
    """A text so far.

    Attributes:
        tokens: sampled, also those behind a stop string.
        fresh: how many of them were sampled last, in one round.
        steps: the text in pieces.
        scores: of the steps; empty before they are rated.
        tree: which of a prompt's beginnings it descends from.
        seed: its last tokens were drawn with.
        open: the last step goes on, it was too long for one round.
        done: nothing follows.
        ended: and it came to an end by itself, not at a limit.
        logprobs: of the tokens, if asked for.
        states: the model's hidden states where each step ends, if the scorer reads them.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    tree: int = 0
    seed: int = 0
    open: bool = False
    done: bool = False
    ended: bool = False
    logprobs: list[float] | None = None
    states: list[TextState] = field(default_factory=list)
    fresh: int = 0

    @property
    def text(self) -> str:
        """Return all steps as one text."""
        return "".join(self.steps)

    def candidate(self, index: int) -> CompletionOutput:
        """Describe it for the result."""
        reason: FinishReason = "stop" if self.ended else "length"
        total = None if self.logprobs is None else sum(self.logprobs)
        hidden = self.states[-1] if self.states else None
        return CompletionOutput(index, self.text, self.tokens, reason, self.seed, total, self.logprobs, hidden=hidden)


@dataclass(eq=False)
class PromptTask:
    """One prompt's search: its accounts, and what bounds its texts."""

    prompt: Prompt
    prompt_ids: list[int]
    params: SamplingParams
    usage: Usage
    calls: int = 0  # to the model, for this prompt

    def account(self, usage: Usage) -> None:
        """Add what one more call cost. The prompt counts once; what a call decoded again was decoded before."""
        own = replace(usage, prompt_tokens=0, cached_tokens=0)
        if self.calls:
            own.recomputed_tokens += usage.prompt_tokens - usage.cached_tokens
        else:
            own.prompt_tokens, own.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self.usage += own
        self.calls += 1


Task = TypeVar("Task", bound=PromptTask)


@dataclass(frozen=True)
class Branch:
    """A request for continuations of a beam by one step: `n` of them, drawn with consecutive seeds."""

    task: PromptTask
    beam: Beam
    n: int
    seed: int


class StepExpander:
    """Draws steps and has them rated.

    Args:
        scorer: rates steps.
        step_stop: what ends a step.
        max_step_tokens: a step that grows longer is rated as it is and goes on in the next round.
    """

    def __init__(self, scorer: StepScorer, step_stop: str, max_step_tokens: int) -> None:
        if not isinstance(scorer, StepScorer):
            raise TilebeamError(f"A search by steps needs a StepScorer (a process reward model), not {scorer!r}.")
        if not isinstance(step_stop, str) or not step_stop:
            raise TilebeamError(f"step_stop must be a text that is not empty, not {step_stop!r}.")
        self.scorer = scorer
        self.step_stop = step_stop
        self.max_step_tokens = checked_integer("max_step_tokens", max_step_tokens)

    @contextmanager
    def session(self, lm: StepGenerator) -> Iterator[None]:
        """Last while texts grow: their cells are kept."""
        with lm.keep_prefixes(), self.scorer.session():
            yield

    def expand(self, lm: StepGenerator, branches: Sequence[Branch], hook: ProgressHook | None) -> list[list[Beam]]:
        """Draw the continuations of each branch, in the order of their seeds. They are not rated yet."""
        params = [self._params(branch) for branch in branches]
        outputs = lm.generate([b.task.prompt_ids + b.beam.tokens for b in branches], params, progress=hook)
        check_complete(outputs)
        for branch, output in zip(branches, outputs, strict=True):
            branch.task.account(output.usage)
        return [[self._child(lm, b, c) for c in o.outputs] for b, o in zip(branches, outputs, strict=True)]

    def rate(self, fresh: Mapping[Task, list[Beam]]) -> None:
        """Give each new beam the scores of its steps.

        Raises:
            TilebeamError: the scorer returned something else than a number for every step.
        """
        flat = [(task, beam) for task, beams in fresh.items() for beam in beams]
        began = time.perf_counter()
        if self.scorer.needs_hidden:
            ratings = self.scorer.rate_states([beam.states for _, beam in flat])
        else:
            ratings = self.scorer.rate_steps([task.prompt for task, _ in flat], [beam.steps for _, beam in flat])
        if len(ratings) != len(flat):
            raise TilebeamError(f"{type(self.scorer).__name__} rated {len(ratings)} of {len(flat)} solutions.")
        for (task, beam), rating in zip(flat, ratings, strict=True):
            beam.scores = checked_scores(rating.scores, len(beam.steps), self.scorer)
            task.usage += replace(rating.usage, scoring_seconds=0.0)
        seconds = shares(time.perf_counter() - began, [len(beams) for beams in fresh.values()])
        for task, own in zip(fresh, seconds, strict=True):
            task.usage.scoring_seconds += own

    def total(self, beam: Beam) -> float:
        """Return what the beam is worth."""
        return self.scorer.total(beam.scores)

    def tell(self, events: EventHook, prompt: int, beam: Beam, fate: Fate, round: int) -> None:
        """Report what becomes of a prompt's beam after a round."""
        facts: dict[str, Any] = {"text": beam.steps[-1], "tokens": len(beam.tokens), "score": self.total(beam)}
        events(SearchEvent(event="step", prompt=prompt, fate=fate, round=round, **facts))

    def _params(self, branch: Branch) -> SamplingParams:
        """Return those for one step, within what the whole text may have."""
        params = branch.task.params
        if params.constrained:
            raise TilebeamError(
                "A search by steps cannot hold its texts to a grammar, a JSON schema or a regular expression, because "
                "each step would begin it anew: use best-of-n or a vote."
            )
        if params.min_tokens:
            raise TilebeamError("A search by steps ends its texts itself: no min_tokens.")
        limit, answer = self.max_step_tokens, 0
        if params.max_tokens is not None:
            left = params.max_tokens - len(branch.beam.tokens)
            limit = min(limit, left)
            answer = max(0, params.answer_tokens - (left - limit))  # before the end of the whole text
        continues = params.continues + len(branch.beam.tokens)
        changes: dict[str, Any] = {"n": branch.n, "seed": branch.seed, "answer_tokens": answer, "continues": continues}
        if self.scorer.needs_hidden:  # the token drawn last is decoded now
            changes |= {"hidden": True, "hidden_prompt": bool(branch.beam.tokens)}
        return replace(params, max_tokens=limit, stop=(self.step_stop, *(params.stop or ())), **changes)

    def _child(self, lm: StepGenerator, branch: Branch, sample: CompletionOutput) -> Beam:
        """Make a beam with one more step, or more of the step that was too long for one round."""
        task, beam = branch.task, branch.beam
        tokens = beam.tokens + sample.token_ids
        params = self._params(branch)
        full = len(task.prompt_ids) + len(tokens) >= lm.n_ctx
        full = full or (task.params.max_tokens is not None and len(tokens) >= task.params.max_tokens)
        step_ended = sample.stop_reason == self.step_stop
        ended = sample.finish_reason == "stop" and not step_ended
        # With the separator, and what the token that ends it holds more; without a token of `stop_tokens`, and a
        # character that the next token completes.
        stopped = tokens[-1:] and tokens[-1] in task.params.stop_tokens
        text = text_of(lm, tokens[:-1] if stopped else tokens, params.shown_tokens).rstrip("\ufffd")
        before = beam.text
        # A stop string may span steps: "\n\n" where steps end at "\n".
        longest = max(map(len, task.params.stop or ()), default=0)
        found = [at for s in task.params.stop or () if (at := text.find(s, max(0, len(before) - longest + 1))) >= 0]
        if found:
            text, ended = text[: min(found)], True
        assert params.max_tokens is not None
        begun = beam.open or not beam.steps or len(text) > len(before)  # else only a part of a character has come
        steps = _steps(beam.steps, text, beam.open)
        done = ended or full or (not step_ended and len(sample.token_ids) < params.max_tokens)
        return Beam(
            tokens,
            steps,
            tree=beam.tree,
            seed=sample.seed,
            open=begun and not done and not step_ended,
            done=done,
            ended=ended,
            logprobs=None if sample.logprobs is None else (beam.logprobs or []) + sample.logprobs,
            states=_states(beam, len(steps), sample.hidden),
            fresh=len(sample.token_ids),
        )


def text_of(lm: Any, tokens: Sequence[int], shown: Sequence[int]) -> str:
    """Return the text of tokens, with the names of those control tokens that are shown."""
    runs = groupby(tokens, lambda token: token in shown)
    return "".join(b"".join(map(lm.spelling, run)).decode() if names else lm.detokenize([*run]) for names, run in runs)


def _states(beam: Beam, steps: int, new: TextState | None) -> list[TextState]:
    """List the states where each step ends, of a beam that went on with `new`; none if none are wanted."""
    if new is None:
        return []
    return [*beam.states[: steps - 1], beam.states[-1].then(new) if beam.states else new]


def _steps(steps: Sequence[str], text: str, joined: bool) -> list[str]:
    """Split a text that begins with the steps given, or is cut within them.

    Args:
        steps: of its beginning.
        text: all of it.
        joined: what is new belongs to the last step.
    """
    known = list(steps[:-1] if joined else steps)
    start = sum(map(len, known))
    while known and start > len(text):
        start -= len(known.pop())
    rest = text[start:]
    return known + ([rest] if rest or not known else [])
