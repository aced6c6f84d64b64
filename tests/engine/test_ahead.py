"""Steps that native code makes at once: texts and books are those of step by step, and nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from engine_kit import EXACT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam import LM, NpuError, RequestOutput, SamplingParams, TilebeamError
from tilebeam.engine import ahead
from tilebeam.native.llama import Context
from tilebeam.native.sampling import ffi, lib

from bench.lib.synth import preset, write_model

COMMON: dict[str, Any] = {
    "n": st.integers(1, 6),
    "max_tokens": st.one_of(st.integers(1, 60), st.none()),
    "seed": st.integers(0, 3),
    "stop": st.sampled_from([(), (), ("t5",)]),
    "temperature": st.sampled_from([0.0, 0.9]),
    "top_k": st.sampled_from([0, 40]),
    "repeat_penalty": st.sampled_from([1.0, 1.3]),
    "told": st.sampled_from([(False, 0), (False, 0), (True, 0), (True, 2)]),
    "hidden": st.sampled_from([False, False, True]),
}


def sampled(told: tuple[bool, int], **fields: Any) -> SamplingParams:
    return SamplingParams(logprobs=told[0], top_logprobs=told[1], **fields)


FREE = st.builds(sampled, ignore_eos=st.booleans(), min_tokens=st.integers(0, 1), **COMMON)
BOUND = st.builds(sampled, grammar=st.just("root ::= [ -~]*"), **COMMON)
REQUEST = st.tuples(
    st.lists(st.integers(3, 40), min_size=1, max_size=20),
    st.one_of(FREE, FREE, BOUND),
    st.booleans(),  # the end of text is likely
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    """Four slots and few cells."""
    path = write_model(
        tmp_path_factory.mktemp("models") / "f32.gguf",
        preset("tiny", arch="llama", type="f32", n_layer=1, n_vocab=576),
    )
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=4, threads=1, lookup=False, **EXACT) as model:
        yield model


class Calls:
    """What came of the tries to make steps at once."""

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch, seconds: float = 60.0) -> None:
        self.counts: list[int] = []
        real = lm._engine.ahead.run

        def run(*args: Any, **options: Any) -> ahead.Steps | None:
            steps = real(*args, **options)
            self.counts.append(0 if steps is None else steps.count)
            return steps

        monkeypatch.setattr(ahead, "SECONDS", seconds)
        monkeypatch.setattr(lm._engine.ahead, "run", run)


def told(results: list[RequestOutput]) -> list[Any]:
    """All that a caller sees, but for times."""
    said: list[Any] = []
    for r in results:
        usage = r.usage
        said.append((usage.prompt_tokens, usage.completion_tokens, usage.recomputed_tokens, usage.cached_tokens))
        for s in r.outputs:
            said.append((s.token_ids, s.text, s.finish_reason, s.logprobs, s.top_logprobs))
            said.append(None if s.hidden is None else (s.hidden.count, s.hidden.features(["last"]).tolist()))
    return said


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=4))
def test_any_mix_of_requests_says_the_same_as_step_by_step(
    small: LM, mix: list[tuple[list[int], SamplingParams, bool]]
) -> None:
    prompts = [prompt for prompt, _, _ in mix]
    params = [replace(p, logit_bias={small.eos: 4.0}) if ends else p for _, p, ends in mix]
    before = dict(small._engine.batches)
    results = told(small.generate(prompts, params))
    steps = {n: count - before.get(n, 0) for n, count in small._engine.batches.items()}
    assert small._engine.kv.free == small.n_ctx
    with pytest.MonkeyPatch.context() as patch:
        Calls(small, patch)
        between = dict(small._engine.batches)
        assert told(small.generate(prompts, params)) == results
        assert {n: count - between.get(n, 0) for n, count in small._engine.batches.items()} == steps
        assert small._engine.kv.free == small.n_ctx


def test_most_steps_are_made_at_once(small: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(small, monkeypatch)
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(small._context, "on_decode", lambda begin, end: observed.append((begin, end)))
    result = small.generate([[5, 6]], SamplingParams(n=3, max_tokens=100, seed=1, ignore_eos=True))[0]
    assert calls.counts == [97]  # not the first two, nor the last
    assert len(observed) == 100
    assert all(begin < end for begin, end in observed)
    assert all(a[1] <= b[0] for a, b in pairwise(observed))
    assert result.usage.decode_seconds > 0 < result.usage.sampling_seconds


def test_cells_belong_to_the_tokens_that_they_hold(small: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(small, monkeypatch)
    with small.keep_prefixes():
        result = small.generate([[5, 6]], SamplingParams(n=3, max_tokens=50, seed=1, ignore_eos=True))[0]
        assert sum(calls.counts) > 40
        kept = sorted(seq.tokens for seq in small._engine.kv.live)
        assert kept == sorted([5, 6, *s.token_ids[:-1]] for s in result.outputs)  # the last was never decoded
        again = small.generate([kept[0]], SamplingParams(max_tokens=1, temperature=0))[0]
        assert again.usage.cached_tokens == len(kept[0]) - 1
        fresh = small.read([kept[0]], [range(len(kept[0]) - 1, len(kept[0]))])[0].logits[-1]
        assert again.outputs[0].token_ids == [int(fresh.argmax())]


def test_a_short_limit_leaves_steps_to_the_next_call(small: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(small, monkeypatch)
    monkeypatch.setattr(small._engine.ahead, "_most", 10)
    small.generate([[5, 6]], SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
    assert calls.counts == [10] * 8 + [9]  # each behind a step by itself


def test_who_comes_and_who_goes_ends_the_run(small: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps for many seconds lie ahead; a call of another thread joins at once, a cancelled stream is gone at once."""
    calls = Calls(small, monkeypatch)
    alone = told(small.generate([[9, 9]], SamplingParams(max_tokens=3, seed=2, ignore_eos=True)))
    calls.counts.clear()
    inside, joined = threading.Event(), threading.Event()

    class Lib:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def tb_run_steps(self, *args: Any) -> int:
            inside.set()
            joined.wait(10)  # the other call is in the queue: its flag is set before the first step begins
            return int(lib.tb_run_steps(*args))

    monkeypatch.setattr(ahead, "lib", Lib())
    first = threading.Thread(
        target=small.generate, args=([[5, 6]], SamplingParams(max_tokens=300, seed=1, ignore_eos=True))
    )
    first.start()
    assert inside.wait(10)
    submit = small._engine.ahead.stop

    def stop(on: bool) -> None:
        submit(on)
        if on:
            joined.set()

    monkeypatch.setattr(small._engine.ahead, "stop", stop)
    second = told(small.generate([[9, 9]], SamplingParams(max_tokens=3, seed=2, ignore_eos=True)))
    first.join(30)
    assert not first.is_alive()
    assert second[1] == alone[1]
    assert calls.counts[0] == 0
    assert small._engine.kv.free == small.n_ctx


@pytest.mark.parametrize(("device", "kind"), [("cpu", TilebeamError), ("npu", NpuError)])
def test_a_step_that_fails_is_told_by_the_next_try(
    path: Path, monkeypatch: pytest.MonkeyPatch, device: Any, kind: type[TilebeamError]
) -> None:
    with tilebeam.load(path, device, n_ctx=256, n_seq_max=2, threads=1, lookup=False) as lm:
        calls = Calls(lm, monkeypatch)
        decode = lm._engine.ahead._steps.decode
        left = [5]

        @ffi.callback("int32_t(void *, struct tb_batch)")  # type: ignore[untyped-decorator]
        def failing(context: Any, batch: Any) -> int:
            left[0] -= 1
            return int(decode(context, batch)) if left[0] >= 0 else -3

        lm._engine.ahead._steps.decode = failing
        positions: list[int] = []
        real = Context.decode

        def by_itself(self: Context, n: int) -> int:
            positions.append(int(self.pos[0]))
            return real(self, n) if len(calls.counts) == 0 else -3

        monkeypatch.setattr(Context, "decode", by_itself)
        with pytest.raises(kind):
            lm.generate([[5, 6]], SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
        assert calls.counts == [5]
        # the prompt's first position, its second token's own step, and five steps later the one that failed
        assert positions == [0, 2, 8]
