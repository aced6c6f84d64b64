"""The batches that the scheduler makes, and the tokens drawn from them, as digests: a change that only moves code keeps
every one of them.

The model's logits are all zero, so tokens depend on seeds alone and no kernel's rounding changes a digest. A change of
scheduling changes digests on purpose: see that `batches` and `tokens` change as meant, then take
over the new values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import equal_logits
from tilebeam import LM, RequestOutput, SamplingParams
from tilebeam.native.llama import Context

PREFIX = [7] * 40


class Record:
    """A digest of every batch decoded and of every result."""

    def __init__(self) -> None:
        self.batches = self.tokens = 0
        self._hash = hashlib.sha256()

    def batch(self, context: Context, n: int) -> None:
        self.batches += 1
        self.tokens += n
        self._hash.update(n.to_bytes(4, "little"))
        for column in (context.token, context.pos, context.seq, context.output):
            self._hash.update(np.ascontiguousarray(column[:n]).astype("<i4").tobytes())

    def results(self, outputs: list[RequestOutput]) -> None:
        for o in outputs:
            u = o.usage
            counts = (u.prompt_tokens, u.cached_tokens, u.completion_tokens, u.recomputed_tokens)
            samples = [(s.token_ids, s.text, s.finish_reason, s.stop_reason, s.seed) for s in o.outputs]
            self._hash.update(repr((counts, samples)).encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf")


@pytest.fixture
def lm(path: Path) -> Iterator[LM]:
    """Four slots, few cells and small batches."""
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=4, threads=1, n_batch=64, lookup=False) as model:
        yield model


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    made = Record()
    real = Context.decode

    def decode(context: Context, n: int) -> int:
        made.batch(context, n)
        return real(context, n)

    monkeypatch.setattr(Context, "decode", decode)
    return made


def more_samples_than_slots(lm: LM, record: Record) -> None:
    for n in (1, 4, 11):
        record.results(lm.generate(PREFIX, SamplingParams(n=n, max_tokens=12, seed=3)))


def prompts_with_common_prefixes(lm: LM, record: Record) -> None:
    prompts = [[*PREFIX, 9], [*PREFIX, 9, 10, 11], [5], [*PREFIX[:36], 12], [*PREFIX, 9, 10, 11, 13]]
    params = [SamplingParams(n=1 + i % 3, max_tokens=5 + 4 * i, seed=i, ignore_eos=True) for i in range(len(prompts))]
    record.results(lm.generate(prompts, params))


def cells_run_out(lm: LM, record: Record) -> None:
    record.results(lm.generate([5, 6, 7, 8], SamplingParams(n=6, max_tokens=110, seed=1, ignore_eos=True)))
    record.results(lm.generate([5], SamplingParams(max_tokens=None, seed=1, ignore_eos=True)))
    long = [[3 + i, *range(3, 120)] for i in range(3)]
    record.results(lm.generate(long, SamplingParams(n=5, max_tokens=30, seed=2, ignore_eos=True)))


def cached_prefixes(lm: LM, record: Record) -> None:
    with lm.keep_prefixes():
        prompt = [*PREFIX]
        for seed in range(4):
            outputs = lm.generate([prompt, [4, 4, 4]], SamplingParams(n=2, max_tokens=9, seed=seed, ignore_eos=True))
            record.results(outputs)
            prompt += outputs[0].outputs[1].token_ids
            lm.read([prompt, [*prompt[:30], 5, 6]], [[-1, 12], [31]])
            lm.hidden([[*prompt[:50], 9]], [[-1, 3]])
        record.results(lm.generate([8] * 200, SamplingParams(n=3, max_tokens=20, seed=9, ignore_eos=True)))
    lm.read([[9] * 100, [9] * 80 + [8] * 40, [9] * 30], [[99, 0], [-1], []])


def streams_that_come_and_go(lm: LM, record: Record) -> None:
    params = [SamplingParams(n=1 + i % 4, max_tokens=25, seed=i, ignore_eos=bool(i % 2)) for i in range(6)]
    streams = [lm.stream([*PREFIX[: 10 * i], 5 + i], p) for i, p in enumerate(params)]
    for i, stream in enumerate(streams):
        for _ in range(5 * i):
            next(stream, None)
        if i % 3 == 1:
            stream.cancel()
    late = lm.stream([6] * 90, SamplingParams(n=2, max_tokens=8, seed=7))
    for stream in (*streams, late):
        for _ in stream:
            pass
        record.results([stream.output])


def every_kind_of_sampling(lm: LM, record: Record) -> None:
    plain: dict[str, Any] = {"n": 3, "max_tokens": 30, "seed": 5, "top_k": 0, "top_p": 1, "ignore_eos": True}
    text = lm.generate([5, 6], SamplingParams(**plain))[0].outputs[0].text
    assert len(text) > 8
    kinds = [
        SamplingParams(**plain, stop=[text[4:8]]),
        SamplingParams(n=2, max_tokens=9, seed=6, temperature=0, ignore_eos=True),
        SamplingParams(n=2, max_tokens=30, seed=1, top_k=0, top_p=1, min_p=0.1),
        SamplingParams(n=2, max_tokens=30, seed=2, top_k=0, top_p=0.8, temperature=1.3),
        SamplingParams(n=2, max_tokens=30, seed=3, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(
            n=2, max_tokens=30, seed=4, logit_bias={9: 3.0, 10: float("-inf")}, logprobs=True, top_logprobs=2
        ),
        SamplingParams(n=2, max_tokens=30, seed=5, grammar="root ::= [a-e]+ [x-z]", logprobs=True),
    ]
    record.results(lm.generate([[5, 6]] * len(kinds), kinds))


# name: batches, tokens in them, digest
EXPECTED: dict[str, tuple[Callable[[LM, Record], None], int, int, str]] = {
    "slots": (more_samples_than_slots, 54, 258, "01ef31f87f8cc11d"),
    "prefixes": (prompts_with_common_prefixes, 36, 201, "9e1b4dae8b97949e"),
    "cells": (cells_run_out, 653, 2110, "f7188cd5e4ae9524"),
    "cached": (cached_prefixes, 72, 990, "16a529f18a00d2d1"),
    "streams": (streams_that_come_and_go, 68, 441, "078360f5c8623772"),
    "samplers": (every_kind_of_sampling, 120, 409, "578b4aada842ba7f"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_batches_and_tokens_are_the_same(lm: LM, record: Record, name: str) -> None:
    scenario, batches, tokens, digest = EXPECTED[name]
    scenario(lm, record)
    assert lm.figures().cells_used == 0
    assert (record.batches, record.tokens, record.digest) == (batches, tokens, digest)
