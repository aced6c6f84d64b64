"""Texts while they grow, in threads and coroutines that share batches: whatever joins, leaves, breaks or closes, every
call ends, with its own text or a clear error, and no KV cell is lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from tilebeam import LM, Delta, NpuError, Progress, SamplingParams, Stream, TilebeamError
from tilebeam.llama import Context
from tilebeam.text import TextStream

from gguf_tools.synth import preset, write_model

# As in test_engine.py: no text depends on what else is in its batches.
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
PROMPT = "the question is how many times the number"
LONG = SamplingParams(n=2, max_tokens=60, seed=5, ignore_eos=True)
DEADLINE = 120.0  # seconds, for a loaded machine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("models") / "f32.gguf", preset("tiny", arch="llama", type="f32", n_layer=2)
    )


@pytest.fixture
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=8, threads=1, **EXACT) as model:
        yield model


def idle(lm: LM) -> bool:
    engine, dispatcher = lm._engine, lm._dispatcher
    return engine.kv.free == lm.n_ctx and not engine.kv.live and not engine.busy and dispatcher._owner is None


def tokens(lm: LM, prompt: str, params: SamplingParams) -> list[list[int]]:
    return [s.token_ids for s in lm.generate(prompt, params)[0].outputs]


class Together:
    """Runs functions in threads at once; their results or exceptions, in order."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self.results: list[Any] = [None] * len(functions)
        self._threads = [threading.Thread(target=self._run, args=(i, f)) for i, f in enumerate(functions)]
        for t in self._threads:
            t.start()

    def _run(self, i: int, function: Callable[[], Any]) -> None:
        try:
            self.results[i] = function()
        except BaseException as error:
            self.results[i] = error

    def wait(self) -> list[Any]:
        for t in self._threads:
            t.join(DEADLINE)
            assert not t.is_alive()
        return self.results


class Gate:
    """Lets a context decode only so many batches; whoever decodes more waits until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: int = 0) -> None:
        self.sizes: list[int] = []
        self.reached = threading.Event()
        self._open = threading.Event()
        real = Context.decode

        def decode(context: Context, n: int) -> int:
            if len(self.sizes) >= batches and not self._open.is_set():
                self.reached.set()
                assert self._open.wait(DEADLINE)
            self.sizes.append(n)
            return real(context, n)

        monkeypatch.setattr(Context, "decode", decode)

    def open(self) -> None:
        self._open.set()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def under_way(lm: LM) -> int:
    """Calls in the line and in the engine, and readers in the line."""
    return len(lm._dispatcher._line) + len(lm._dispatcher._active)


# --- one stream -------------------------------------------------------------------------------------------------------


def add_up(deltas: list[Delta], n: int) -> list[dict[str, Any]]:
    """What the deltas of each sample make up; the last one of each, and only that, says why it ended."""
    samples: list[dict[str, Any]] = [{"text": "", "ids": [], "logprobs": [], "top": [], "end": None} for _ in range(n)]
    for d in deltas:
        s = samples[d.index]
        assert s["end"] is None
        s["text"] += d.text
        s["ids"] += d.token_ids
        s["logprobs"] += d.logprobs or []
        s["top"] += d.top_logprobs or []
        s["end"] = d.finish_reason and (d.finish_reason, d.stop_reason)
    return samples


@pytest.mark.parametrize("n", [1, 3, 11])
def test_deltas_make_up_the_samples(lm: LM, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=25, seed=5, logprobs=True, top_logprobs=3)
    expected = lm.generate(PROMPT, params)[0]
    stream = lm.stream(PROMPT, params)
    with pytest.raises(TilebeamError, match="not ended"):
        _ = stream.output
    deltas = list(stream)
    assert len(deltas) >= sum(len(s.token_ids) for s in expected.outputs) - n
    for got, s in zip(add_up(deltas, n), expected.outputs, strict=True):
        assert (got["text"], got["ids"], got["end"]) == (s.text, s.token_ids, (s.finish_reason, s.stop_reason))
        np.testing.assert_allclose(got["logprobs"], s.logprobs, atol=1e-4)
        assert [list(t) for t in got["top"]] == [list(t) for t in s.top_logprobs or []]
    assert [s.token_ids for s in stream.output.outputs] == [s.token_ids for s in expected.outputs]
    assert stream.output.usage.completion_tokens == expected.usage.completion_tokens
    assert list(stream) == []
    assert idle(lm)


def test_no_delta_shows_what_a_stop_string_cuts(lm: LM) -> None:
    whole = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0].text
    for at in (len(whole) // 3, len(whole) // 2):
        stop = whole[at : at + 7]
        deltas = list(lm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=30, stop=stop)))
        assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


def test_text_is_held_back_only_where_it_may_be_cut() -> None:
    stream = TextStream(["aab", "xyz"])
    shown = []
    for piece in ("a", "a", "a", "x", "y", "a", "aq", "xyz"):
        stream.feed(piece.encode())
        shown.append(stream.settled())
    assert shown == [0, 0, 1, 3, 3, 5, 8, 8]
    assert stream.text == "aaaxyaaq"
    split = TextStream()
    split.feed("é".encode()[:1])
    assert (split.text, split.settled()) == ("", 0)
    split.feed("é".encode()[1:])
    assert (split.text, split.settled()) == ("é", 1)


def test_bad_requests_are_refused_at_once(lm: LM) -> None:
    with pytest.raises(TilebeamError, match="no tokens"):
        lm.stream([])
    with pytest.raises(TilebeamError, match="grammar"):
        lm.stream(PROMPT, SamplingParams(grammar="root ::= nothing"))
    assert idle(lm)


def leave(stream: Stream) -> None:
    """Read three deltas and drop the iterator."""
    for i, _ in enumerate(stream):
        if i == 2:
            break


@pytest.mark.parametrize("how", ["cancel", "with", "drop"])
def test_a_stream_given_up_frees_its_cells(lm: LM, how: str) -> None:
    expected = tokens(lm, PROMPT, LONG)
    if how == "cancel":
        stream = lm.stream(PROMPT, LONG)
        leave(stream)
        stream.cancel()
        stream.cancel()
        rest = list(stream)
        assert [d.finish_reason for d in rest if d.finish_reason] == ["aborted", "aborted"]
        output = stream.output
        assert [s.finish_reason for s in output.outputs] == ["aborted"] * 2
        for sample, whole in zip(output.outputs, expected, strict=True):
            assert 0 < len(sample.token_ids) < len(whole)
            assert sample.token_ids == whole[: len(sample.token_ids)]
            assert sample.text == lm.detokenize(sample.token_ids).rstrip("\ufffd")
    elif how == "with":
        with lm.stream(PROMPT, LONG) as stream:
            leave(stream)
        assert [s.finish_reason for s in stream.output.outputs] == ["aborted"] * 2
    else:
        leave(lm.stream(PROMPT, LONG))
        gc.collect()
    assert idle(lm)
    assert tokens(lm, PROMPT, LONG) == expected


def test_streams_side_by_side_in_one_thread(lm: LM) -> None:
    params = [SamplingParams(n=2, max_tokens=20, seed=s, ignore_eos=True) for s in range(5)]
    expected = [tokens(lm, PROMPT, p) for p in params]
    streams = [lm.stream(PROMPT, p) for p in params]
    deltas: list[list[Delta]] = [[] for _ in streams]
    alive = set(range(len(streams)))
    while alive:
        for i in sorted(alive):
            try:
                deltas[i].append(next(streams[i]))
            except StopIteration:
                alive.remove(i)
    assert [[s["ids"] for s in add_up(d, 2)] for d in deltas] == expected
    assert idle(lm)


# --- threads ----------------------------------------------------------------------------------------------------------


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
        until(lambda: lm._dispatcher._pump is None)


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
    until(lambda: lm._dispatcher.closed)
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


def test_an_interrupted_leader_ends_only_what_it_decoded(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, batches=3)
    passing = Context.decode

    def interrupted(context: Context, n: int) -> int:
        code = passing(context, n)
        if len(gate.sizes) == 4:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(Context, "decode", interrupted)
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
    passing = Context.decode

    def interrupted(context: Context, n: int) -> int:
        code = passing(context, n)
        if len(gate.sizes) == 6:
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(Context, "decode", interrupted)
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


def test_readers_and_generators_take_turns(lm: LM) -> None:
    expected = tokens(lm, PROMPT, LONG)
    [reading] = lm.read([PROMPT], [[-1, 0]])
    rows = lm.logits([5, 6, 7])

    def read() -> list[float]:
        return [float(np.abs(lm.read([PROMPT], [[-1, 0]])[0].logits - reading.logits).max()) for _ in range(5)]

    def logits() -> list[float]:
        return [float(np.abs(lm.logits([5, 6, 7]) - rows).max()) for _ in range(5)]

    def generate() -> list[list[list[int]]]:
        return [tokens(lm, PROMPT, LONG) for _ in range(3)]

    def keep() -> list[list[list[int]]]:
        with lm.keep_prefixes():
            return generate()

    results = Together(read, generate, logits, generate, read, keep).wait()
    assert max(results[0] + results[2] + results[4]) < 1e-4
    assert results[1] == results[3] == results[5] == [expected] * 3
    assert idle(lm)


def test_reading_waits_for_a_stream_of_the_same_thread(lm: LM) -> None:
    expected, rows = tokens(lm, PROMPT, LONG), lm.logits([5, 6, 7])
    stream = lm.stream(PROMPT, LONG)
    deltas = [next(stream) for _ in range(4)]
    np.testing.assert_allclose(lm.logits([5, 6, 7]), rows, atol=1e-4)  # the stream ends before it
    assert stream._call.done
    assert [s["ids"] for s in add_up(deltas + list(stream), 2)] == expected


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


# --- coroutines -------------------------------------------------------------------------------------------------------


def test_tasks_share_batches(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(n=2, max_tokens=20, seed=s, ignore_eos=True) for s in range(6)]
    expected = [tokens(lm, PROMPT, p) for p in params]
    gate = Gate(monkeypatch)

    async def stream(p: SamplingParams) -> list[list[int]]:
        async with lm.astream(PROMPT, p) as s:
            return [x["ids"] for x in add_up([d async for d in s], p.n)]

    async def call(p: SamplingParams) -> list[list[int]]:
        heard: list[Progress] = []
        [result] = await lm.agenerate(PROMPT, p, progress=heard.append)
        assert heard[-1].finished == heard[-1].total == 2
        return [s.token_ids for s in result.outputs]

    async def main() -> list[list[list[int]]]:
        tasks = [asyncio.create_task((stream if i % 2 else call)(p)) for i, p in enumerate(params)]
        while under_way(lm) < len(params):
            await asyncio.sleep(0.001)
        gate.open()
        return await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE)

    assert asyncio.run(main()) == expected
    assert len(gate.sizes) < 3 * 20
    until(lambda: lm._dispatcher._pump is None)
    assert idle(lm)
    assert asyncio.run(lm.agenerate([])) == []


def test_cancelled_tasks_free_their_cells(lm: LM) -> None:
    forever = SamplingParams(n=3, max_tokens=None, ignore_eos=True, seed=1)
    expected = tokens(lm, PROMPT, LONG)

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def main() -> list[list[int]]:
        tasks = [
            asyncio.create_task(lm.agenerate(PROMPT, forever)),
            asyncio.create_task(read(lm.astream("so", forever))),
        ]
        kept = asyncio.create_task(lm.agenerate(PROMPT, LONG))
        async with lm.astream("a", forever) as stream:
            async for d in stream:
                if len(d.token_ids) and stream._call.progress.tokens > 20:
                    break
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        [result] = await asyncio.wait_for(kept, DEADLINE)
        return [s.token_ids for s in result.outputs]

    assert asyncio.run(main()) == expected
    until(lambda: idle(lm))


def test_streams_that_nobody_reads_any_more_end(lm: LM) -> None:
    """A task that forgets its stream, and an event loop that ends before its calls do."""
    forever = SamplingParams(n=2, max_tokens=None, ignore_eos=True, seed=1)

    async def forgets() -> None:
        stream = lm.astream(PROMPT, forever)
        await anext(stream)
        del stream
        gc.collect()

    asyncio.run(forgets())
    until(lambda: idle(lm))

    async def leaves() -> None:
        task = asyncio.create_task(lm.agenerate(PROMPT, forever))
        while not lm._engine.busy:
            await asyncio.sleep(0.001)
        assert not task.done()

    asyncio.run(leaves())  # asyncio.run cancels what is left
    until(lambda: idle(lm))


def test_the_event_loop_goes_on_meanwhile(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, batches=2)

    async def main() -> None:
        task = asyncio.create_task(lm.agenerate(PROMPT, LONG))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert not task.done()
        gate.open()
        await asyncio.wait_for(task, DEADLINE)

    asyncio.run(main())


def test_threads_and_tasks_side_by_side(lm: LM) -> None:
    params = [SamplingParams(n=2, max_tokens=15, seed=s, ignore_eos=True) for s in range(4)]
    expected = [tokens(lm, PROMPT, p) for p in params]

    async def main() -> list[list[list[int]]]:
        results = await asyncio.gather(*[lm.agenerate(PROMPT, p) for p in params])
        return [[s.token_ids for s in r[0].outputs] for r in results]

    def plain() -> list[list[list[int]]]:
        return [tokens(lm, PROMPT, p) for p in params]

    for result in Together(plain, lambda: asyncio.run(main()), plain, lambda: asyncio.run(main())).wait():
        assert result == expected
    until(lambda: idle(lm))
