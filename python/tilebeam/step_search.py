"""Search by steps under a process reward model: beam search and DVTS (diverse verifier tree search).

Both follow Snell et al., "Scaling LLM Test-Time Compute Optimally" and Hugging Face's search-and-learn: a budget of N
beams, a width of M. Every round each survivor is forked into M continuations of one step; the reward model rates all;
N / M survive. Beam search lets the best of all survive, DVTS the best of each of N / M independent trees. A beam that
has ended competes with the others and, if it wins, holds its place without growing; if it loses, it stays a candidate.

A fork shares the KV cells of its beginning, in the model and in the reward model: nothing is sent or decoded twice.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, overload

from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, ProgressHook, RequestOutput, Usage
from tilebeam.rewards import StepScorer
from tilebeam.sampling import SamplingParams
from tilebeam.search import SearchResult


class StepGenerator(Protocol):
    """What a search by steps asks of a model; `tilebeam.LM` is one."""

    @property
    def n_ctx(self) -> int:
        """Tokens of prompt and text at most."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        progress: ProgressHook | None = None,
    ) -> list[RequestOutput]:
        """Samples for each prompt."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Their text."""
        ...

    def keep_prefixes(self) -> AbstractContextManager[None]:
        """Prompts that continue earlier samples fork them while this lasts."""
        ...


@dataclass
class StepResult(SearchResult):
    """What a search by steps found.

    Attributes:
        steps: of each candidate: its steps' texts.
        step_scores: of each candidate: its steps' scores.
        finished: of each candidate: whether it came to an end by itself.
        rounds: steps taken.
    """

    steps: list[list[str]]
    step_scores: list[list[float]]
    finished: list[bool]
    rounds: int


@dataclass(eq=False)
class _Beam:
    tree: int
    tokens: list[int]
    steps: list[str]
    scores: list[float]
    open: bool = False  # the last step goes on
    done: bool = False  # nothing follows
    ended: bool = False  # and it came to an end by itself
    seed: int = 0
    logprobs: list[float] | None = None


@dataclass(eq=False)
class _Task:
    """One prompt's search."""

    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    beams: list[_Beam]  # the survivors
    usage: Usage
    pool: list[_Beam] = field(default_factory=list)  # all that are done, survivors or not
    rounds: int = 0


class _StepSearch(ABC):
    """What both searches share.

    Args:
        scorer: rates steps.
        beam_width: M, continuations of each survivor.
        max_steps: rounds at most; what has not ended then is a candidate as it is.
        step_stop: what ends a step.
        max_step_tokens: a step that grows longer ends there.
        lookahead: rate a continuation by what it leads to: this many further steps are drawn greedily and rated in its
            stead, then thrown away (Snell et al., "lookahead search").
    """

    def __init__(
        self,
        scorer: StepScorer,
        beam_width: int = 4,
        max_steps: int = 10,
        step_stop: str = "\n",
        *,
        max_step_tokens: int = 256,
        lookahead: int = 0,
    ) -> None:
        for name, value, least in (
            ("beam_width", beam_width, 1),
            ("max_steps", max_steps, 1),
            ("max_step_tokens", max_step_tokens, 1),
            ("lookahead", lookahead, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TilebeamError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        if not isinstance(scorer, StepScorer):
            raise TilebeamError(f"A search by steps needs a StepScorer (a process reward model), not {scorer!r}.")
        if not step_stop:
            raise TilebeamError("step_stop must not be empty.")
        self.scorer = scorer
        self.beam_width = beam_width
        self.max_steps = max_steps
        self.step_stop = step_stop
        self.max_step_tokens = max_step_tokens
        self.lookahead = lookahead

    @overload  # a str is a Sequence[str] too: the first signature that fits counts
    def infer(  # type: ignore[overload-overlap]
        self,
        lm: StepGenerator,
        prompt: str,
        budget: int = ...,
        *,
        sampling: SamplingParams | None = ...,
        progress: ProgressHook | None = ...,
    ) -> StepResult: ...
    @overload
    def infer(
        self,
        lm: StepGenerator,
        prompt: Sequence[str],
        budget: int = ...,
        *,
        sampling: SamplingParams | None = ...,
        progress: ProgressHook | None = ...,
    ) -> list[StepResult]: ...
    def infer(
        self,
        lm: StepGenerator,
        prompt: str | Sequence[str],
        budget: int = 16,
        *,
        sampling: SamplingParams | None = None,
        progress: ProgressHook | None = None,
    ) -> StepResult | list[StepResult]:
        """Search.

        Args:
            lm: the model.
            prompt: one prompt, or several that share batches.
            budget: N, beams per prompt; a multiple of beam_width.
            sampling: how to draw; its ``n`` and ``max_tokens`` are the search's, its ``stop`` strings end a solution.
            progress: as for `LM.generate`, per round.

        Returns:
            One result for one prompt, a list for a list. `the_one` is the candidate with the best aggregate, those
            that ended before those that did not.

        Raises:
            TilebeamError: a budget that does not fit, a cancelled search, a scorer that misbehaves, or what
                `generate` raises.
        """
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1 or budget % self.beam_width:
            raise TilebeamError(f"budget must be a multiple of beam_width ({self.beam_width}), not {budget!r}.")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        base = (sampling or SamplingParams()).resolved()
        tasks = [self._task(lm, text, base, budget) for text in prompts]
        with lm.keep_prefixes(), self.scorer.session():
            for round in range(self.max_steps):
                if not self._advance(lm, tasks, round, budget, progress):
                    break
        results = [self._result(task) for task in tasks]
        return results[0] if isinstance(prompt, str) else results

    def _task(self, lm: StepGenerator, text: str, base: SamplingParams, budget: int) -> _Task:
        ids = lm.tokenize(text)
        trees = budget // self.beam_width
        return _Task(text, ids, base, [_Beam(t, [], [], []) for t in range(trees)], Usage(prompt_tokens=len(ids)))

    def _advance(
        self, lm: StepGenerator, tasks: list[_Task], round: int, budget: int, progress: ProgressHook | None
    ) -> bool:
        """One round for all prompts. False: nothing is left to do."""
        active = [(task, i, beam) for task in tasks for i, beam in enumerate(task.beams) if not beam.done]
        if not active:
            return False
        params = []
        for task, i, _ in active:
            # Rounds, beams of a prompt, and continuations each draw with a seed of their own.
            seed = task.params.sample_seed(round * budget + i * self.beam_width)
            params.append(self._params(task, n=self.beam_width, seed=seed))
        outputs = self._generate(lm, [(task, beam) for task, _, beam in active], params, progress)
        fresh: dict[_Task, list[_Beam]] = {}
        for (task, _, beam), output in zip(active, outputs, strict=True):
            different = {tuple(sample.token_ids): sample for sample in reversed(output.outputs)}
            children = [self._child(lm, task, beam, sample) for sample in reversed(different.values())]
            fresh.setdefault(task, []).extend(children)
        self._rate(lm, fresh, progress)
        for task, children in fresh.items():
            task.rounds += 1
            task.pool += [b for b in children if b.done]
            rivals = [b for b in task.beams if b.done] + children
            # In the last round nobody has to make room.
            task.beams = rivals if round + 1 == self.max_steps else self._survivors(rivals, budget // self.beam_width)
        return True

    def _params(self, task: _Task, **changes: Any) -> SamplingParams:
        """For one step."""
        return replace(
            task.params, max_tokens=self.max_step_tokens, stop=(self.step_stop, *task.params.stop), **changes
        )

    def _generate(
        self,
        lm: StepGenerator,
        active: Sequence[tuple[_Task, _Beam]],
        params: Sequence[SamplingParams],
        progress: ProgressHook | None,
    ) -> list[RequestOutput]:
        """One step from each beam; the accounts are the tasks'."""
        outputs = lm.generate([task.prompt_ids + beam.tokens for task, beam in active], params, progress=progress)
        if any(c.finish_reason == "aborted" for o in outputs for c in o.outputs):
            raise TilebeamError("The search was cancelled.")
        for (task, beam), output in zip(active, outputs, strict=True):
            usage = replace(output.usage, prompt_tokens=0, cached_tokens=0)
            if beam.tokens or task.rounds:  # what a continuation decoded of its beginning was decoded before
                usage.recomputed_tokens += output.usage.prompt_tokens - output.usage.cached_tokens
            else:
                usage.cached_tokens = output.usage.cached_tokens
            task.usage += usage
        return outputs

    def _child(self, lm: StepGenerator, task: _Task, beam: _Beam, sample: CompletionOutput) -> _Beam:
        """The beam and one more step, or more of the step that was too long for one round."""
        tokens = beam.tokens + sample.token_ids
        full = len(task.prompt_ids) + len(tokens) >= lm.n_ctx
        if sample.stop_reason == self.step_stop:
            text = lm.detokenize(tokens)[len("".join(beam.steps)) :]  # with the separator and what its token holds more
            unfinished, done, ended = False, full, False
        else:  # cut before a stop string, and without an end-of-text token
            text = sample.text
            ended = sample.finish_reason == "stop"
            done = ended or full or len(sample.token_ids) < self.max_step_tokens
            unfinished = not done
        steps, scores = list(beam.steps), list(beam.scores)
        if beam.open:
            text, scores = steps.pop() + text, scores[:-1]
        steps += [text] if text or not steps else []
        logprobs = None if sample.logprobs is None else (beam.logprobs or []) + sample.logprobs
        return _Beam(beam.tree, tokens, steps, scores, unfinished, done, ended, sample.seed, logprobs)

    def _rate(self, lm: StepGenerator, fresh: dict[_Task, list[_Beam]], progress: ProgressHook | None) -> None:
        """Give each new beam the scores of its steps."""
        flat = [(task, beam) for task, beams in fresh.items() for beam in beams]
        solutions = self._look_ahead(lm, flat, progress)
        began = time.perf_counter()
        self.scorer.usage = Usage()
        rated = self.scorer.score_steps([task.prompt for task, _ in flat], solutions)
        if len(rated) != len(flat) or any(len(r) != len(s) for r, s in zip(rated, solutions, strict=True)):
            raise TilebeamError(f"{type(self.scorer).__name__} did not return one score per step.")
        if any(math.isnan(score) for scores in rated for score in scores):
            raise TilebeamError(f"{type(self.scorer).__name__} returned a score that is not a number.")
        for (_, beam), scores in zip(flat, rated, strict=True):
            beam.scores = [float(s) for s in scores[: len(beam.steps)]]
            if len(scores) > len(beam.steps):  # the end of the look-ahead stands for the step that leads there
                beam.scores[-1] = float(scores[-1])
        seconds, tokens, left = time.perf_counter() - began, self.scorer.usage.scored_tokens, len(flat)
        for task, beams in fresh.items():
            share = tokens * len(beams) // left
            task.usage += Usage(scored_tokens=share, scoring_seconds=seconds * len(beams) / len(flat))
            tokens, left = tokens - share, left - len(beams)

    def _look_ahead(
        self, lm: StepGenerator, fresh: list[tuple[_Task, _Beam]], progress: ProgressHook | None
    ) -> list[list[str]]:
        """The steps of each beam, with what greedy decoding makes of them."""
        scouts = list(fresh)
        for _ in range(self.lookahead):
            going = [i for i, (_, beam) in enumerate(scouts) if not beam.done]
            if not going:
                break
            params = [self._params(scouts[i][0], n=1, temperature=0.0) for i in going]
            outputs = self._generate(lm, [scouts[i] for i in going], params, progress)
            for i, output in zip(going, outputs, strict=True):
                task, beam = scouts[i]
                scouts[i] = task, self._child(lm, task, beam, output.outputs[0])
        return [beam.steps for _, beam in scouts]

    @abstractmethod
    def _survivors(self, rivals: list[_Beam], count: int) -> list[_Beam]:
        """Of the beams that compete after a round, those that grow on: at most `count`."""

    def _order(self, beams: list[_Beam]) -> list[_Beam]:
        """Best first; of equals the first."""
        return sorted(beams, key=lambda b: -self.scorer.total(b.scores))

    def _result(self, task: _Task) -> StepResult:
        beams = task.pool + [b for b in task.beams if not b.done]
        totals = [self.scorer.total(b.scores) for b in beams]
        best = max(range(len(beams)), key=lambda i: (beams[i].ended, totals[i], -i))
        candidates = [
            CompletionOutput(
                index=i,
                text="".join(b.steps),
                token_ids=b.tokens,
                finish_reason="stop" if b.ended else "length",
                seed=b.seed,
                cumulative_logprob=None if b.logprobs is None else sum(b.logprobs),
                logprobs=b.logprobs,
            )
            for i, b in enumerate(beams)
        ]
        steps, scores = [b.steps for b in beams], [b.scores for b in beams]
        finished = [b.ended for b in beams]
        seed = task.params.seed or 0
        return StepResult(task.prompt, candidates, totals, best, task.usage, seed, steps, scores, finished, task.rounds)


class BeamSearch(_StepSearch):
    """The best N / M of all beams survive each round."""

    def _survivors(self, rivals: list[_Beam], count: int) -> list[_Beam]:
        return self._order(rivals)[:count]


class DVTS(_StepSearch):
    """N / M trees grow side by side, and of each the best beam survives: diversity that one good start cannot crowd
    out."""

    def _survivors(self, rivals: list[_Beam], count: int) -> list[_Beam]:  # noqa: ARG002
        trees: dict[int, list[_Beam]] = {}
        for beam in rivals:
            trees.setdefault(beam.tree, []).append(beam)
        return [self._order(tree)[0] for _, tree in sorted(trees.items())]
