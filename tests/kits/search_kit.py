"""A model that follows a script, and a reward model that does: what searches can be checked against by hand.

The scripted model is a function: the next token depends on the tokens before it and on the seed, nothing else. Its
tokens are pieces of one or two characters, so that stop strings lie within tokens and across them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilebeam import CompletionOutput, Progress, Prompt, Rating, RequestOutput, SamplingParams, StepScorer, Usage

END = 0
PIECES = ["", "a", "b", "1", "2", "\n", "\n\n", "1\n", "#", " "]


@dataclass
class Drawn:
    """What a request for one sample gives."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: str | None


@dataclass
class ScriptedLM:
    """See above.

    Attributes:
        world: another number is another model.
        n_ctx: tokens of prompt and text.
        ends: how often a token is the end: 0 never, 1 always.
        abort_call: the samples of this call (counted from 0) come back aborted.
        calls: of each call to `generate`: prompt text and parameters of each request.
        requests: the prompts of all requests, as tokens.
        drawn: tokens sampled so far.
    """

    world: int = 0
    n_ctx: int = 40
    ends: float = 0.15
    abort_call: int | None = None
    calls: list[list[tuple[str, SamplingParams]]] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)
    drawn: int = 0
    kept: int = 0

    def tokenize(self, text: str) -> list[int]:
        return [PIECES.index(c) for c in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(PIECES[t] for t in tokens)

    @contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        self.kept += 1
        try:
            yield
        finally:
            self.kept -= 1

    def draw(self, before: Sequence[int], params: SamplingParams, seed: int) -> Drawn:
        """One sample."""
        tokens, text = list(before), ""
        limit = self.n_ctx if params.max_tokens is None else params.max_tokens
        while len(tokens) - len(before) < limit and len(tokens) < self.n_ctx:
            luck = random.Random(f"{self.world} {tokens} {seed if params.temperature else 'greedy'}")
            token = END if luck.random() < self.ends else luck.randrange(1, len(PIECES))
            tokens.append(token)
            text += PIECES[token]
            new = tokens[len(before) :]
            if token == END:
                return Drawn(new, text, "stop", None)
            hits = [(text.find(s), i) for i, s in enumerate(params.stop) if s in text]
            if hits:
                at, which = min(hits)
                return Drawn(new, text[:at], "stop", params.stop[which])
        return Drawn(tokens[len(before) :], text, "length", None)

    def generate(
        self,
        prompts: Sequence[Prompt] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: Any = None,
        on_sample: Any = None,
    ) -> list[RequestOutput]:
        many = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        ids = [p.tokens(self) if isinstance(p, Prompt) else list(p) for p in prompts]
        assert all(0 < len(i) < self.n_ctx for i in ids), "a prompt without room for a token"
        self.requests += ids
        self.calls.append([(self.detokenize(i), p) for i, p in zip(ids, many, strict=True)])
        aborted = self.abort_call == len(self.calls) - 1
        total = sum(p.n for p in many)
        if progress is not None:
            aborted = progress(Progress(0, total, total, 0)) is False or aborted
        results = []
        for prompt, params in zip(ids, many, strict=True):
            outputs = []
            assert params.seed is not None
            for i in range(params.n):
                seed = params.sample_seed(i)
                got = self.draw(prompt, params, seed)
                logprobs = [-((t * 7 + seed) % 5) / 4 for t in got.tokens] if params.logprobs else None
                outputs.append(
                    CompletionOutput(
                        i,
                        got.text,
                        got.tokens,
                        "aborted" if aborted else got.finish_reason,  # type: ignore[arg-type]
                        seed,
                        None if logprobs is None else sum(logprobs),
                        logprobs,
                        stop_reason=got.stop_reason,
                    )
                )
            tokens = sum(len(o.token_ids) for o in outputs)
            self.drawn += tokens
            usage = Usage(prompt_tokens=len(prompt), cached_tokens=len(prompt) // 2, completion_tokens=tokens)
            results.append(RequestOutput(self.detokenize(prompt), prompt, outputs, usage, params.seed))
        unwanted: set[int] = set()
        for number, output in enumerate(results if on_sample is not None and not aborted else ()):
            for sample in reversed(output.outputs):  # they end in any order
                if number in unwanted:
                    sample.finish_reason = "aborted"
                else:
                    unwanted.update(on_sample(number, sample) or ())
        if progress is not None:
            progress(Progress(total, total, 0, sum(o.usage.completion_tokens for o in results)))
        return results


class ScriptedPRM(StepScorer):
    """Rates a step by what it and all before it are, in eighths, so that there are ties."""

    def __init__(self, world: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.world = world
        self.rated = 0

    def score_of(self, prompt: str | Prompt, steps: Sequence[str]) -> float:
        """Of the last of these steps."""
        return random.Random(f"{self.world} {Prompt.of(prompt).text} {list(steps)}").randrange(9) / 8

    def score_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        return [rating.scores for rating in self.rate_steps(prompts, solutions)]

    def rate_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[Rating]:
        """A step costs a token."""
        assert len(prompts) == len(solutions)
        self.rated += sum(map(len, solutions))
        return [
            Rating([self.score_of(p, s[: i + 1]) for i in range(len(s))], Usage(scored_tokens=len(s)))
            for p, s in zip(prompts, solutions, strict=True)
        ]
