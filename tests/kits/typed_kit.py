"""A model that writes what a function says, for samples whose programs run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tilebeam import CompletionOutput, Progress, Prompt, RequestOutput, Usage


class TypedLM:
    """Writes what a function of the text so far returns, one character a token (or as `split` cuts it).

    Attributes:
        asked: tokens of each prompt that it was given.
    """

    n_ctx = 4000
    n_seq_max = 4
    recomputed = 0  # tokens that each call decodes a second time

    def __init__(self, write: Callable[[str, int], str], split: Callable[[str], list[str]] = list) -> None:
        self.write, self.split = write, split
        self.pieces: dict[str, int] = {}
        self.asked: list[list[int]] = []
        self.limits: list[int | None] = []
        self.grammars: list[str | None] = []
        self.continued: list[int] = []
        self.kept = 0
        self.lock = threading.Lock()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        assert parse_special or not add_special
        with self.lock:
            return [self.pieces.setdefault(piece, len(self.pieces)) for piece in self.split(text)]

    def detokenize(self, tokens: Sequence[int]) -> str:
        with self.lock:
            names = {number: piece for piece, number in self.pieces.items()}
        return "".join(names[t] for t in tokens)

    def is_control(self, token: int) -> bool:
        return token < 0  # no piece is one

    @contextmanager
    def keep_prefixes(self) -> Iterator[None]:
        self.kept += 1
        yield
        self.kept -= 1

    def generate(self, prompts, sampling, *, progress=None, on_sample=None) -> list[RequestOutput]:
        results = []
        for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            ids = list(prompt) if isinstance(prompt, list) else Prompt.of(prompt).tokens(self)
            self.asked.append(ids)
            self.limits.append(params.max_tokens)
            self.grammars.append(params.grammar)
            self.continued.append(params.continues)
            outputs = []
            aborted = progress is not None and progress(Progress(total=params.n)) is False
            for i in range(params.n):
                pieces, text, stop = self.split(self.write(self.detokenize(ids), params.sample_seed(i))), "", None
                taken = []
                for piece in pieces[: params.max_tokens]:
                    taken.append(piece)
                    text += piece
                    stop = next((s for s in params.stop if s in text), None)
                    if stop is not None:
                        text = text[: text.index(stop)]
                        break
                reason = "aborted" if aborted else "stop" if stop or len(taken) == len(pieces) else "length"
                tokens = self.tokenize("".join(taken))
                logprobs = [-1.0] * len(tokens) if params.logprobs else None
                tops = [{token: -1.0} for token in tokens] if params.top_logprobs else None
                total = -float(len(tokens)) if params.logprobs else None
                of_tokens = total, logprobs, stop, tops
                outputs.append(CompletionOutput(i, text, tokens, reason, params.sample_seed(i), *of_tokens))
                if on_sample is not None:
                    on_sample(number, outputs[-1])
            drawn = sum(len(o.token_ids) for o in outputs)
            usage = Usage(prompt_tokens=len(ids), completion_tokens=drawn, recomputed_tokens=self.recomputed)
            results.append(RequestOutput("", ids, outputs, usage, params.seed))
        return results
