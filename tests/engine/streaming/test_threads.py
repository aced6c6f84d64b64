"""Calls of many threads share batches: whatever joins, breaks or closes, every call ends, with its own text or a clear
error."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from streaming_kit import DEADLINE, LONG, PROMPT, Gate, Together, idle, line, tokens, under_way, until
from tilebeam import LM, NpuError, Progress, SamplingParams, TilebeamError
from tilebeam.native.llama import Context


def test_calls_of_many_threads_share_batches(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(n=1 + s % 2, max_tokens=20, seed=s, ignore_eos=True) for s in range(6)]
    expected = [tokens(lm, PROMPT, p) for p in params]
    gate = Gate(monkeypatch)
    together = Together(*[lambda p=p: lm.generate(PROMPT, p)[0] for p in params])  # type: ignore[misc]
    until(lambda: under_way(lm) == len(params))
    gate.open()
    results = together.wait()
    assert [[s.token_ids for s in r.outputs] for r in results] == expected
    assert max(gate.sizes[5:]) == 8  # nine samples, eight slots
    assert len(gate.sizes) < 3 * 20
    assert sum(gate.sizes) == sum(
        r.usage.prompt_tokens - r.usage.cached_tokens + r.usage.recomputed_tokens + 19 * len(r.outputs) for r in results
    )
    assert idle(lm)


def test_a_short_call_returns_while_a_long_one_leads(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, batches=2)
    long = Together(lambda: tokens(lm, PROMPT, SamplingParams(max_tokens=500, seed=1, ignore_eos=True)))
    assert gate.reached.wait(DEADLINE)
    short = Together(lambda: tokens(lm, "so", SamplingParams(max_tokens=3, seed=2, ignore_eos=True)))
    until(lambda: under_way(lm) == 2)
    gate.open()
    short.wait()
    assert len(gate.sizes) < 500
    assert [len(t) for t in long.wait()[0]] == [500]


def test_the_lead_is_handed_over(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    short = Together(lambda: tokens(lm, "so", SamplingParams(max_tokens=2, seed=2, ignore_eos=True)))
    assert gate.reached.wait(DEADLINE)  # the short call leads
    long = Together(*[lambda s=s: tokens(lm, PROMPT, SamplingParams(max_tokens=90, seed=s)) for s in range(3)])
    until(lambda: under_way(lm) == 4)
    gate.open()
    short.wait()
    expected = long.wait()
    assert [tokens(lm, PROMPT, SamplingParams(max_tokens=90, seed=s)) for s in range(3)] == expected
    assert idle(lm)


@pytest.mark.parametrize(("device", "kind"), [("cpu", TilebeamError), ("npu", NpuError)])
def test_a_failed_decode_reaches_every_caller(
    path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kind: type[TilebeamError]
) -> None:
    with tilebeam.load(path, device, n_ctx=512, n_seq_max=2, threads=1) as lm:
        gate = Gate(monkeypatch, batches=3)
        passing = Context.decode

        def failing(context: Context, n: int) -> int:
            code = passing(context, n)
            return code if len(gate.sizes) <= 3 else -3

        monkeypatch.setattr(Context, "decode", failing)

        async def coroutine() -> Any:
            return await lm.agenerate(PROMPT, LONG)

        first = Together(lambda: lm.generate(PROMPT, LONG))
        assert gate.reached.wait(DEADLINE)
        others = Together(
            *[lambda: lm.generate(PROMPT, LONG)] * 3,
            lambda: list(lm.stream(PROMPT, LONG)),
            lambda: asyncio.run(coroutine()),
            lambda: lm.read([PROMPT], [[-1]]),
        )
        until(lambda: under_way(lm) == 7)
        gate.open()
        errors = first.wait() + others.wait()
        assert [type(e) for e in errors] == [kind] * 7
        assert len({id(e) for e in errors[:6]}) == 6
        assert all("fail" in str(e) for e in errors)
        with pytest.raises(kind, match="fail"):
            lm.stream(PROMPT)
        until(lambda: not line(lm).background)


def test_closing_ends_every_call_with_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=2, threads=1)
    gate = Gate(monkeypatch, batches=3)

    async def coroutine() -> Any:
        async with lm.astream(PROMPT, LONG) as stream:
            return [d async for d in stream]

    first = Together(lambda: lm.generate(PROMPT, LONG))
    assert gate.reached.wait(DEADLINE)
    others = Together(
        lambda: lm.generate(PROMPT, LONG),
        lambda: list(lm.stream(PROMPT, LONG)),
        lambda: asyncio.run(coroutine()),
        lambda: lm.logits([1, 2, 3]),
        lambda: lm.generate(PROMPT, LONG, progress=lambda _: None),
    )
    until(lambda: under_way(lm) == 6)
    closing = Together(lm.close, lm.close)
    until(lambda: "closed" in repr(lm))
    gate.open()
    assert closing.wait() == [None, None]
    for error in first.wait() + others.wait():
        assert isinstance(error, TilebeamError)
        assert "closed" in str(error)
    assert len(gate.sizes) == 4  # the batch under way was the last
    for use in (lambda: lm.stream(PROMPT), lambda: lm.tokenize("a"), lambda: lm.read([PROMPT], [[0]])):
        with pytest.raises(TilebeamError, match="closed"):
            use()
    lm.close()


def interrupted(monkeypatch: pytest.MonkeyPatch, gate: Gate, batches: int) -> None:
    """Let Ctrl-C fall into the last of so many batches."""
    passing = Context.decode

    def decode(context: Context, n: int) -> int:
        code = passing(context, n)
        if len(gate.sizes) == batches:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(Context, "decode", decode)


def test_an_interrupted_leader_ends_only_what_it_decoded(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, batches=3)
    interrupted(monkeypatch, gate, 4)
    first = Together(lambda: lm.generate(PROMPT, LONG))
    assert gate.reached.wait(DEADLINE)
    second = Together(lambda: lm.generate(PROMPT, LONG))
    until(lambda: under_way(lm) == 2)
    gate.open()
    assert [type(e) for e in first.wait()] == [KeyboardInterrupt]
    expected = second.wait()[0][0]  # it was still in the line, and goes on
    monkeypatch.undo()
    assert tokens(lm, PROMPT, LONG) == [s.token_ids for s in expected.outputs]
    assert idle(lm)


def test_followers_of_an_interrupted_leader_are_told(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    interrupted(monkeypatch, gate, 6)
    calls = Together(*[lambda: lm.generate(PROMPT, LONG)] * 3)
    until(lambda: under_way(lm) == 3)
    gate.open()
    errors = calls.wait()
    assert sorted(type(e).__name__ for e in errors) == ["KeyboardInterrupt", "TilebeamError", "TilebeamError"]
    assert all("interrupted" in str(e) for e in errors if isinstance(e, TilebeamError))
    assert idle(lm)


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_hear_of_their_own_call_only(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[int, list[Progress]] = {0: [], 1: [], 2: []}
    params = [SamplingParams(n=1 + s, max_tokens=10 + 5 * s, seed=s, ignore_eos=True) for s in range(3)]
    gate = Gate(monkeypatch)
    calls = Together(*[lambda s=s: lm.generate(PROMPT, params[s], progress=heard[s].append) for s in range(3)])  # type: ignore[misc]
    until(lambda: under_way(lm) == 3)
    gate.open()
    results = calls.wait()
    for s, [result] in enumerate(results):
        last = heard[s][-1]
        assert (last.finished, last.total, last.running) == (s + 1, s + 1, 0)
        assert last.tokens == result.usage.completion_tokens == (s + 1) * (10 + 5 * s)
        assert last.prompt_tokens == result.usage.prompt_tokens - result.usage.cached_tokens
        assert [p.tokens for p in heard[s]] == sorted(p.tokens for p in heard[s])
        assert max(p.running for p in heard[s]) <= s + 1


def test_a_hook_ends_its_own_call_only(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(lm, PROMPT, LONG)
    gate = Gate(monkeypatch)

    def raising(p: Progress) -> None:
        if p.tokens > 10:
            raise ValueError("enough")

    calls = Together(
        lambda: lm.generate(PROMPT, LONG, progress=raising),
        lambda: lm.generate(PROMPT, LONG, progress=lambda p: p.tokens < 10),
        lambda: lm.generate(PROMPT, LONG),
    )
    until(lambda: under_way(lm) == 3)
    gate.open()
    raised, cancelled, whole = calls.wait()
    assert isinstance(raised, ValueError)
    assert [s.finish_reason for s in cancelled[0].outputs] == ["aborted"] * 2
    assert [s.token_ids for s in whole[0].outputs] == expected
    assert idle(lm)


def test_hooks_may_use_the_model(lm: LM) -> None:
    inner = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    expected, alone = tokens(lm, PROMPT, LONG), tokens(lm, "so", inner)
    rows = lm.logits([5, 6, 7])
    found: list[Any] = []

    def hook(p: Progress) -> None:
        if not found and p.tokens > 4:
            found.append(tokens(lm, "so", inner))
            found.append(lm.logits([5, 6, 7]))

    assert [s.token_ids for s in lm.generate(PROMPT, LONG, progress=hook)[0].outputs] == expected
    assert found[0] == alone
    np.testing.assert_allclose(found[1], rows, atol=1e-4)
    assert idle(lm)


# --- the context for oneself ------------------------------------------------------------------------------------------


def test_what_cannot_end_while_the_context_is_held_is_refused(lm: LM) -> None:
    with lm.keep_prefixes(), lm.raw_decode() as context:
        for use in (lambda: lm.generate(PROMPT), lambda: next(lm.stream(PROMPT)), lm.close):
            with pytest.raises(TilebeamError, match="context"):
                use()
        assert lm.logits([5, 6]).shape == (2, lm.n_vocab)  # the same thread may go on using it
        assert lm.tokenize(PROMPT)
        context.token[0], context.pos[0], context.seq[0], context.output[0] = 5, 0, 0, 1
        assert context.decode(1) == 0
    gc.collect()
    assert idle(lm)


def test_kept_prefixes_do_not_outlive_raw_use_of_the_context(lm: LM) -> None:
    expected = tokens(lm, PROMPT, LONG)
    with lm.keep_prefixes():
        assert tokens(lm, PROMPT, LONG) == expected
        lm.logits([9] * 50)
        result = lm.generate(PROMPT, LONG)[0]
        assert [s.token_ids for s in result.outputs] == expected
        assert result.usage.cached_tokens == 0
        assert lm.generate(PROMPT, LONG)[0].usage.cached_tokens > 0
    assert idle(lm)
