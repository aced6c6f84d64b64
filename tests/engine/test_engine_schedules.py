"""Random schedules over a tiny model with few KV cells: calls come and go, and the scheduler keeps its promises.

Whatever is submitted, read, cancelled or dropped, in whatever order: every call ends, a sample that was not cancelled
has the text that it has when it is alone, one that was has a beginning of it (but for draws that the last bits of
logits decide, see sampler_kit.py), what is read is what is read alone, the ledger of KV cells adds up after every step,
and usage tells what was decoded. All of this with other LoRA adapters for some, with turns of few steps and tokens, and
with and without a drafter, which is right, wrong or has no guess in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, check_engine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sampler_kit import Witness, check
from tilebeam import CompletionOutput, RequestOutput, SamplingParams, Stream
from tilebeam.engine import dispatcher, turns
from tilebeam.engine.drafter import Drafter
from tilebeam.model import loader
from tilebeam.native.llama import Context

from bench.lib.synth import preset, write_model

N_CTX = 256
EXAMPLES = int(os.environ.get("TILEBEAM_SCHEDULES", "10"))  # more of them take a while

PROMPTS = st.one_of(
    st.lists(st.integers(3, 30), min_size=1, max_size=8),
    st.lists(st.integers(3, 6), min_size=1, max_size=90),
    st.tuples(st.integers(30, 120), st.lists(st.integers(3, 30), max_size=20)).map(lambda t: [7] * t[0] + t[1]),
)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 9),
    max_tokens=st.one_of(st.integers(1, 40), st.none()),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), ("t5",), (" ",)]),
    temperature=st.sampled_from([0.0, 0.9]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Witness, Witness]]:
    """The model with few cells, four slots and small batches, and with plenty of all."""
    folder = tmp_path_factory.mktemp("models")
    path = write_model(folder / "f32.gguf", preset("tiny", arch="llama", type="f32", n_layer=1))
    options: dict[str, Any] = {"n_ctx": N_CTX, "threads": 1, "lookup": False, **EXACT}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loader, "KEPT", 1)  # nine sequence ids
        small = tilebeam.load(path, "cpu", n_seq_max=4, n_batch=48, **options)
    with (
        small as tight,
        tilebeam.load(path, "cpu", n_seq_max=1, **options) as alone,
        Witness(tight) as of_tight,
        Witness(alone) as of_alone,
    ):
        yield of_tight, of_alone


class _Knowing(Drafter):
    """Asks a schedule what comes; now and then it rests."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._asked = 0

    def propose(self, asked: Sequence[tuple[Any, int]], _rows: int) -> list[list[int]]:
        self._asked += 1
        return [self._schedule.coming(sample) for sample, _ in asked]

    def rest(self) -> int:
        return 3 if self._asked % 5 == 0 else 0


class Schedule(RuleBasedStateMachine):
    """Calls by one thread: streams that are read, cancelled and dropped in any order, and whole calls between them."""

    of_tight: Witness
    of_alone: Witness
    drafting: bool

    def __init__(self) -> None:
        super().__init__()
        self.tight = self.of_tight.lm
        self.streams: list[tuple[Stream, list[int], SamplingParams]] = []
        self.ended: list[tuple[RequestOutput, SamplingParams, bool]] = []
        self.kept = ExitStack()
        self.decoded = 0
        self.reading = False
        self._real = Context.decode
        context = self.tight.engine.context

        def counting(n: int) -> int:
            code = self._real(context, n)
            assert code == 0  # the ledger knows what there is room for
            assert 0 < n <= context.n_batch
            self.decoded += n
            check_engine(self.tight.engine, reading=self.reading)
            return code

        context.decode = counting  # type: ignore[method-assign]
        self.tight.use_drafter(_Knowing(self) if self.drafting else None)

    def coming(self, sample: Any) -> list[int]:
        """5 of the tokens that the sample has when it is alone, one of them wrong."""
        at, request = len(sample.tokens), sample.request
        coming = self.expected(tuple(request.prompt_ids), request.params, sample.index).token_ids[at : at + 5]
        wrong = (3 * at + sample.index) % 7
        return [(t + (i == wrong)) % 1024 for i, t in enumerate(coming)] if wrong else []

    @rule(prompt=PROMPTS, params=PARAMS)
    def submit(self, prompt: list[int], params: SamplingParams) -> None:
        self.streams.append((self.tight.stream(prompt, params), prompt, params))

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99), deltas=st.integers(1, 30))
    def read(self, which: int, deltas: int) -> None:
        at = which % len(self.streams)
        for _ in range(deltas):
            if next(self.streams[at][0], None) is None:
                self.finish(at, cancelled=False)
                return

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        at = which % len(self.streams)
        self.streams[at][0].cancel()
        self.finish(at, cancelled=True)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        call = self.streams[which % len(self.streams)][0]._call
        params = self.streams.pop(which % len(self.streams))[2]
        assert call.done
        self.compare(call.outputs()[0], params, cancelled=True)

    @rule(prompt=PROMPTS, params=PARAMS)
    def generate(self, prompt: list[int], params: SamplingParams) -> None:
        self.compare(self.tight.generate(prompt, params)[0], params, cancelled=False)

    @rule(on=st.booleans())
    def keep(self, on: bool) -> None:
        if on:
            self.kept.enter_context(self.tight.keep_prefixes())
        else:
            self.kept.close()

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3))
    def look(self, prompts: list[list[int]]) -> None:
        self.reading = True
        found = self.tight.token_logprobs(prompts)
        self.reading = False
        for prompt, reading in zip(prompts, found, strict=True):
            self.decoded -= reading.decoded_tokens  # not by calls
            assert reading.decoded_tokens + reading.cached_tokens >= len(prompt) - 1
            (alone,) = self.of_alone.lm.token_logprobs([prompt])
            np.testing.assert_allclose(reading.logprobs, alone.logprobs, atol=1e-5)

    @rule(prompt=PROMPTS, places=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def look_inside(self, prompt: list[int], places: list[int]) -> None:
        asked = [[place % len(prompt) for place in places]]
        self.reading = True
        (reading,) = self.tight.hidden([prompt], asked)
        self.reading = False
        self.decoded -= reading.decoded_tokens
        (alone,) = self.of_alone.lm.hidden([prompt], asked)
        np.testing.assert_allclose(reading.hidden, alone.hidden, atol=1e-4)

    @rule(prompt=PROMPTS)
    def raw(self, prompt: list[int]) -> None:
        self.tight.logits(prompt)
        self.decoded -= len(prompt)

    def finish(self, at: int, *, cancelled: bool) -> None:
        stream, _, params = self.streams.pop(at)
        for _ in stream:
            pass
        self.compare(stream.output, params, cancelled=cancelled)

    def compare(self, output: RequestOutput, params: SamplingParams, *, cancelled: bool) -> None:
        self.ended.append((output, params, cancelled))
        prompt = output.prompt_token_ids
        for i, sample in enumerate(output.outputs):
            assert cancelled or sample.finish_reason != "aborted"
            check(prompt, params, sample, self.expected(tuple(prompt), params, i), self.of_tight, self.of_alone)
        usage = output.usage
        assert usage.completion_tokens == sum(len(s.token_ids) for s in output.outputs)
        assert usage.prompt_tokens == len(output.prompt_token_ids)
        assert 0 <= usage.accepted_tokens <= usage.drafted_tokens

    @classmethod
    @cache
    def expected(cls, prompt: tuple[int, ...], params: SamplingParams, i: int) -> CompletionOutput:
        one = SamplingParams(**{**vars(params), "n": 1, "seed": (params.seed or 0) + i})
        [sample] = cls.of_alone.lm.generate(list(prompt), one)[0].outputs
        return sample

    @invariant()
    def ledger(self) -> None:
        check_engine(self.tight.engine)

    def teardown(self) -> None:
        while self.streams:
            self.finish(0, cancelled=False)
        self.kept.close()
        del self.tight.engine.context.decode  # type: ignore[method-assign]
        self.tight.use_drafter(None)
        self.expected.cache_clear()
        self.of_tight.forget()
        self.of_alone.forget()
        kv = self.tight.engine.kv
        assert kv.free == N_CTX
        assert not kv.live
        assert not self.tight.engine.busy
        # What was decoded is what the accounts tell: new prompt tokens, those decoded again, and of every sample all
        # tokens but the last. Of a prompt that was cancelled not all need have been decoded.
        least = most = 0
        for output, _, cancelled in self.ended:
            u = output.usage
            fresh = u.prompt_tokens - u.cached_tokens + u.recomputed_tokens
            going = sum(max(0, len(s.token_ids) - 1) for s in output.outputs)
            going += u.drafted_tokens - u.accepted_tokens
            most += fresh + going
            most += len(output.outputs) if self.drafting else 0  # the last token may have been drafted
            least += fresh + going - (u.prompt_tokens if cancelled else 0)
        assert least <= self.decoded <= most


@pytest.mark.parametrize("with_drafter", [False, True], ids=["plain", "drafts"])
def test_any_schedule_keeps_its_promises(
    models: tuple[Witness, Witness], with_drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "STEPS", 3)
    monkeypatch.setattr(turns, "TOKENS", 20)

    class OverModels(Schedule):
        of_tight, of_alone = models
        drafting = with_drafter

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        OverModels,
        settings=settings(
            report_multiple_bugs=False,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            max_examples=EXAMPLES,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
