"""Steps that decode and verify drafts: whatever a drafter proposes, every text is the one without it, every rejected
token's cell is given back, and usage tells what was drafted and accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, Count, ScriptedDrafter, equal_logits
from sampler_kit import Witness
from tilebeam import LM, RequestOutput, SamplingParams
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.scheduler import BatchPlan, Scheduler
from tilebeam.native.llama import Context

from bench.lib.synth import preset, write_model

PREFIX = [7] * 40
PROMPTS = [[5, 6, 7], [*PREFIX, 9], [*PREFIX, 9, 10, 11], [300 + i for i in range(90)]]
SAMPLED = SamplingParams(n=3, max_tokens=25, seed=4, temperature=1, top_k=0, top_p=1, ignore_eos=True)
GREEDY = SamplingParams(n=2, max_tokens=25, seed=4, temperature=0, ignore_eos=True)
MODES = ["right", "wrong", "partly", "empty", "turns", "long"]


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    """Draws depend on seeds alone; four slots, few cells, small batches."""
    path = equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf")
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=4, threads=1, n_batch=64, lookup=False) as model:
        yield model


@pytest.fixture(autouse=True)
def no_drafter_is_left(equal: LM) -> Iterator[None]:
    yield
    equal.use_drafter(None)
    assert not equal.engine.kv.live
    assert equal.figures().cells_used == 0


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees of texts."""
    return [
        (s.index, s.token_ids, s.text, s.finish_reason, s.stop_reason, s.seed, s.logprobs, s.top_logprobs, s.entropies)
        for o in outputs
        for s in o.outputs
    ]


def drafted(
    lm: LM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], mode: str
) -> tuple[list[RequestOutput], list[RequestOutput], ScriptedDrafter]:
    """The same calls without a drafter and with one that knows what comes."""
    lm.use_drafter(None)
    plain = lm.generate(prompts, params)
    drafter = ScriptedDrafter(plain, mode)
    lm.use_drafter(drafter)
    return plain, lm.generate(prompts, params), drafter


@pytest.mark.parametrize("mode", MODES)
def test_sampled_texts_are_those_without_drafts(equal: LM, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More samples than slots, forks, common prefixes, prompts in chunks beside samples that decode."""
    params = [replace(SAMPLED, n=n) for n in (1, 3, 4, 6)]
    plain = equal.generate(PROMPTS, params)
    count = Count(equal, monkeypatch)
    without = [equal.generate(PROMPTS, params), count.batches][1]
    _, outputs, _ = drafted(equal, PROMPTS, params, mode)
    assert told(outputs) == told(plain)
    batches = count.batches - 2 * without
    usage = [o.usage for o in outputs]
    for u, p, o in zip(usage, plain, outputs, strict=True):
        assert (u.prompt_tokens, u.completion_tokens) == (p.usage.prompt_tokens, p.usage.completion_tokens)
        assert 0 <= u.accepted_tokens <= u.drafted_tokens
        assert u.accepted_tokens < u.completion_tokens
        assert sum(len(s.token_ids) for s in o.outputs) == u.completion_tokens
    total, accepted = sum(u.drafted_tokens for u in usage), sum(u.accepted_tokens for u in usage)
    if mode == "empty":
        assert (total, accepted, batches) == (0, 0, without)
    elif mode == "wrong":
        assert (total > 100, accepted, batches) == (True, 0, without)
    elif mode in ("right", "long"):
        assert accepted == total > 100
        assert batches < 0.6 * without
    else:
        assert 0 < accepted < total
        assert batches < without


ENDS: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "end of text": {"ignore_eos": False, "top_k": 12},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "penalty_last_n": 7},
    "bias": {"logit_bias": {9: 3.0, 10: float("-inf")}},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3, "statistics": True},
    "grammar": {"grammar": "root ::= [a-e]{4,9} [x-z]", "ignore_eos": False},
}


@pytest.mark.parametrize("mode", ["right", "partly"])
@pytest.mark.parametrize("kind", [*ENDS, "stop string"])
def test_every_kind_of_sampling_and_end(equal: LM, kind: str, mode: str) -> None:
    if kind == "stop string":
        text = equal.generate(PROMPTS[0], SAMPLED)[0].outputs[1].text
        params = replace(SAMPLED, stop=[text[len(text) // 2 :][:5], "\0never"])
    else:
        params = replace(SAMPLED, **ENDS[kind])
    plain, outputs, _ = drafted(equal, PROMPTS[:2], params, mode)
    assert told(outputs) == told(plain)
    assert [o.usage.completion_tokens for o in outputs] == [o.usage.completion_tokens for o in plain]
    reasons = {s.finish_reason for o in outputs for s in o.outputs}
    assert ("stop" in reasons) == (kind in ("stop string", "end of text", "grammar"))
    assert (sum(o.usage.accepted_tokens for o in outputs) > 0) == (kind not in ("one token", "two tokens"))


def test_a_draft_ends_with_the_sample(equal: LM) -> None:
    """Of a sample that may have n tokens at most n - 2 are drafted: the first has no draft before it, the last none
    behind it."""
    for n in (1, 2, 3, 9):
        params = replace(SAMPLED, n=1, max_tokens=n)
        _, [output], drafter = drafted(equal, PROMPTS[:1], params, "long")
        assert output.usage.drafted_tokens == output.usage.accepted_tokens == max(0, n - 2)
        assert drafter.asked == (n > 2)


@pytest.mark.parametrize("mode", ["right", "partly", "wrong"])
def test_few_cells(equal: LM, mode: str) -> None:
    """Samples are preempted, the context fills up: drafts take only cells that are left, and no text changes."""
    many = replace(SAMPLED, n=6, max_tokens=110)
    plain, outputs, _ = drafted(equal, [[5, 6, 7, 8]], many, mode)
    assert told(outputs) == told(plain)
    assert outputs[0].usage.recomputed_tokens > 0
    full = replace(SAMPLED, n=1, max_tokens=None)
    plain, outputs, _ = drafted(equal, [[5]], full, mode)
    assert told(outputs) == told(plain)
    assert outputs[0].outputs[0].finish_reason == "length"
    assert outputs[0].usage.completion_tokens == equal.n_ctx - 1


@pytest.mark.parametrize("mode", ["right", "partly"])
def test_streams_that_are_cancelled_lose_no_cell(equal: LM, mode: str) -> None:
    params = [replace(SAMPLED, n=2, max_tokens=40, seed=s) for s in range(4)]
    plain, _, drafter = drafted(equal, PROMPTS, params, mode)
    equal.use_drafter(drafter)
    streams = [equal.stream(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    for i, stream in enumerate(streams):
        for _ in range(6 * i):
            next(stream)
        if i % 2:
            stream.cancel()
    for stream, expected in zip(streams, plain, strict=True):
        deltas = list(stream)
        assert all(len(d.token_ids) <= 1 for d in deltas)  # one delta for each token, drafted or not
        for sample, whole in zip(stream.output.outputs, expected.outputs, strict=True):
            if sample.finish_reason == "aborted":
                assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
            else:
                assert sample.token_ids == whole.token_ids
    assert {s.finish_reason for s in (*streams[1].output.outputs, *streams[3].output.outputs)} == {"aborted"}


def test_cached_prefixes_hold_no_rejected_token(equal: LM) -> None:
    params = replace(SAMPLED, n=1, max_tokens=20)
    found = []
    for mode in (None, "partly", "wrong", "right"):
        equal.use_drafter(None)
        plain = equal.generate([5, 6], params)
        equal.use_drafter(ScriptedDrafter(plain, mode) if mode else None)
        with equal.keep_prefixes():
            [first] = equal.generate([5, 6], params)
            assert [s.tokens for s in equal.engine.kv.live] == [[5, 6, *first.outputs[0].token_ids[:-1]]]
            longer = [5, 6, *first.outputs[0].token_ids, 8]
            [second] = equal.generate(longer, params)
            found.append((first.outputs, second.outputs[0].token_ids, second.usage.cached_tokens))
    assert all(f == found[0] for f in found)
    assert found[0][2] == 21


def test_a_grammar_that_ends_without_an_end_of_text_token(equal: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal.engine.vocab, "eos", -1)
    monkeypatch.setattr(equal.engine.vocab, "is_end", lambda _: False)
    ban = {t: float("-inf") for t in range(equal.n_vocab) if equal.detokenize([t]) == "" or equal.is_control(t)}
    params = replace(SAMPLED, grammar="root ::= [a-e]{4} [x-z]", ignore_eos=False, logit_bias=ban)
    with equal.keep_prefixes():
        plain, outputs, _ = drafted(equal, [[5, 6]], params, "right")
        assert told(outputs) == told(plain)
        assert {s.finish_reason for s in outputs[0].outputs} == {"stop"}
        texts = [[5, 6, *s.token_ids] for s in outputs[0].outputs]
        assert all(seq.tokens in texts for seq in equal.engine.kv.live)


def test_llama_cpp_refusing_a_batch_is_tried_without_drafts(equal: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, drafter = drafted(equal, PROMPTS[:1], SAMPLED, "right")
    equal.use_drafter(drafter)
    real, sizes = Context.decode, []

    def decode(self: Context, n: int) -> int:
        sizes.append(n)
        return 1 if n > 3 and len(sizes) % 2 else real(self, n)

    monkeypatch.setattr(Context, "decode", decode)
    outputs = equal.generate(PROMPTS[:1], SAMPLED)
    assert told(outputs) == told(plain)
    refused = [i for i, n in enumerate(sizes) if n > 3 and i % 2 == 0]
    assert refused
    assert all(sizes[i + 1] == 3 for i in refused)
    assert outputs[0].usage.recomputed_tokens == 0  # nobody was preempted for it


def test_tokens_outside_the_vocabulary_end_a_draft(equal: LM) -> None:
    class Careless(Drafter):
        def __init__(self, bad: int) -> None:
            self.bad = bad

        def propose(self, asked: Any, _rows: int) -> list[list[int]]:
            return [[4, self.bad, 4] if len(sample.tokens) % 2 else [self.bad] for sample, _ in asked]

    plain = equal.generate(PROMPTS[0], SAMPLED)
    for bad in (-1, equal.n_vocab, 2**40):
        equal.use_drafter(Careless(bad))
        outputs = equal.generate(PROMPTS[0], SAMPLED)
        assert told(outputs) == told(plain)
        assert outputs[0].usage.drafted_tokens == 3 * 12


def test_a_drafter_that_fails_ends_the_calls_and_leaves_the_model_usable(equal: LM) -> None:
    class Broken(Drafter):
        def propose(self, asked: Any, _rows: int) -> list[list[int]]:
            raise ValueError(f"no idea after {len(asked[0][0].tokens)}")

    plain = equal.generate(PROMPTS[0], SAMPLED)
    equal.use_drafter(Broken())
    with pytest.raises(ValueError, match="no idea after 1"):
        equal.generate(PROMPTS[0], SAMPLED)
    equal.use_drafter(None)
    assert told(equal.generate(PROMPTS[0], SAMPLED)) == told(plain)


@pytest.mark.parametrize(("mode", "n_ubatch"), [("right", None), ("partly", None), ("turns", None), ("partly", 16)])
def test_a_sliding_window_goes_back_within_a_batch(tmp_path: Path, mode: str, n_ubatch: int | None) -> None:
    """Texts several windows long, whose cells others take as soon as they have left the window: what each token was
    drawn from is what the model says of the text before it. Batches with drafts are one graph, so short ones if need
    be."""
    path = write_model(tmp_path / "swa.gguf", preset("tiny", arch="gemma3", type="f32", swa=32, swa_pattern=2))
    params = replace(SAMPLED, n=3, max_tokens=150)
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=3, threads=1, n_ubatch=n_ubatch, **EXACT) as lm:
        plain = lm.generate(PROMPTS[0], params)
        lm.use_drafter(ScriptedDrafter(plain, mode))
        with Witness(lm) as by:
            [output] = lm.generate(PROMPTS[0], params)
            drawn = [by.rows(s) for s in output.outputs]
        lm.use_drafter(None)
        assert output.usage.drafted_tokens > 20
        assert lm.figures().cells_used == 0
        for sample, rows in zip(output.outputs, drawn, strict=True):
            expected = lm.logits([*PROMPTS[0], *sample.token_ids])[len(PROMPTS[0]) - 1 : -1]
            np.testing.assert_allclose(np.array(rows), expected, atol=0.02)
            other = lm.logits([*PROMPTS[0], *sample.token_ids[:-9], 1, *sample.token_ids[-8:]])[-2]
            assert np.abs(other - expected[-1]).max() > 0.1  # so much one other token in the window would be


def test_guesses_that_others_joined_stay_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, sizes = write_model(tmp_path / "t.gguf", preset("tiny", type="f32")), Scheduler.plan, list[int]()

    def plan(scheduler: Scheduler, *, drafts: bool = True) -> BatchPlan:
        scheduler._guesses = {s: [1] * 20 for s in scheduler.running if s.tokens}
        found = real(scheduler, drafts=drafts)
        sizes.extend([found.n] * found.drafts)
        return found

    monkeypatch.setattr(Scheduler, "plan", plan)
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=3, threads=1, n_ubatch=8, **EXACT) as lm:
        lm.generate(PROMPTS[0], SAMPLED)
    assert max(sizes) == 8
