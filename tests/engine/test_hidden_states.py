"""Hidden states taken from the steps that decode a text are those of the text read afterwards, whatever its batches
looked like, and cost no token and no batch more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, Count, ScriptedDrafter, empty_state, equal_logits, states_behind
from hypothesis import given
from hypothesis import strategies as st
from tilebeam import LM, CompletionOutput, RequestOutput, SamplingParams, TilebeamError
from tilebeam.native.control import control
from tilebeam.text_state import DECAY, Confidence, TextState

from bench.lib.synth import preset, write_model

PREFIX = [7] * 40
PROMPTS = [[5, 6, 7], [*PREFIX, 9], [*PREFIX, 9, 10, 11], [300 + i for i in range(90)]]
PARAMS = SamplingParams(n=3, max_tokens=25, seed=4, temperature=1, top_k=0, top_p=1, ignore_eos=True, hidden=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf")


SIZES = {"n_ctx": 256, "n_seq_max": 4, "threads": 1, "n_batch": 64}
behind = pytest.mark.parametrize("layer", [None, 0], ids=["behind the norm", "behind a layer"])


@pytest.fixture(scope="module", params=[None, 0], ids=["behind the norm", "behind a layer"])
def lm(path: Path, request: pytest.FixtureRequest) -> Iterator[LM]:
    """Four slots, few cells, small batches."""
    with tilebeam.load(path, "cpu", lookup=False, hidden_layer=request.param, **SIZES, **EXACT) as model:
        yield model


def read(lm: LM, prompt: list[int], tokens: list[int]) -> TextState:
    """The states of a text's tokens but the last, read afterwards and added up."""
    rows = states_behind(lm, prompt + tokens)[len(prompt) : -1]
    weights = DECAY ** np.arange(len(rows) - 1, -1, -1, dtype=np.float32)
    return TextState(len(rows), rows.sum(0), weights @ rows, rows[-1])


def check(found: TextState | None, wanted: TextState) -> None:
    assert found is not None
    assert found.count == wanted.count
    for name in ("mean", "recent", "last", "length"):
        np.testing.assert_allclose(found.features([name]), wanted.features([name]), atol=2e-4, rtol=1e-3)


def check_all(lm: LM, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for sample in output.outputs:
            check(sample.hidden, read(lm, output.prompt_token_ids, sample.token_ids))


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [s.token_ids for o in outputs for s in o.outputs]


@pytest.mark.parametrize("n", [1, 4])
def test_states_while_decoding_are_those_read_afterwards(lm: LM, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one token or batch more is decoded: counted, and by usage."""
    params = replace(PARAMS, n=n)
    count = Count(lm, monkeypatch)
    plain = lm.generate(PROMPTS[:1], replace(params, hidden=False))
    batches, tokens = count.batches, count.tokens
    outputs = lm.generate(PROMPTS[:1], params)
    assert (count.batches, count.tokens) == (2 * batches, 2 * tokens)
    assert tokens == len(PROMPTS[0]) + n * (25 - 1)
    assert texts(outputs) == texts(plain)
    assert plain[0].outputs[0].hidden is None
    u, p = outputs[0].usage, plain[0].usage
    assert (u.prompt_tokens, u.completion_tokens, u.recomputed_tokens, u.scored_tokens) == (3, n * 25, 0, 0)
    assert (p.prompt_tokens, p.completion_tokens, p.recomputed_tokens) == (3, n * 25, 0)
    check_all(lm, outputs)


def test_many_prompts_more_samples_than_slots(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that arrive while samples decode, in chunks; late samples; shared prefixes. Samples that want hidden
    states and others share batches."""
    params = [replace(PARAMS, n=6), PARAMS, replace(PARAMS, n=2, hidden=False), replace(PARAMS, n=1)]
    plain = lm.generate(PROMPTS, [replace(p, hidden=False) for p in params])
    count = Count(lm, monkeypatch)
    outputs = lm.generate(PROMPTS, params)
    assert texts(outputs) == texts(plain)
    done = sum(o.usage.prompt_tokens - o.usage.cached_tokens + o.usage.recomputed_tokens for o in outputs)
    assert count.tokens == done + sum(len(t) - 1 for t in texts(outputs))
    assert all(s.hidden is None for s in outputs[2].outputs)
    check_all(lm, [outputs[0], outputs[1], outputs[3]])


def test_samples_that_gave_up_their_cells(lm: LM) -> None:
    """What was decoded before is not counted twice."""
    outputs = lm.generate(PROMPTS[:1], replace(PARAMS, n=4, max_tokens=100))
    assert outputs[0].usage.recomputed_tokens > 0
    check_all(lm, outputs)


@pytest.mark.parametrize("mode", ["right", "partly", "wrong", "long"])
def test_of_drafts_only_accepted_tokens_count(lm: LM, mode: str) -> None:
    plain = lm.generate(PROMPTS[:2], PARAMS)
    lm.use_drafter(ScriptedDrafter(plain, mode))
    try:
        outputs = lm.generate(PROMPTS[:2], PARAMS)
    finally:
        lm.use_drafter(None)
    assert texts(outputs) == texts(plain)
    assert outputs[0].usage.drafted_tokens > 0
    for output, other in zip(outputs, plain, strict=True):
        for a, b in zip(output.outputs, other.outputs, strict=True):
            assert b.hidden is not None
            check(a.hidden, b.hidden)
    check_all(lm, outputs)


def grown(lm: LM, prompt: list[int], lengths: list[int], forks: int) -> tuple[list[int], TextState]:
    """A text drawn in several calls, each of which draws several and goes on with the last."""
    tokens: list[int] = []
    state = empty_state(lm.n_embd)
    for length in lengths:
        params = replace(PARAMS, n=forks, max_tokens=length, hidden_prompt=bool(tokens))
        sample: CompletionOutput = lm.generate([prompt + tokens], params)[0].outputs[-1]
        assert sample.hidden is not None
        tokens, state = tokens + sample.token_ids, state.then(sample.hidden)
    return tokens, state


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("forks", [1, 3, 6])
def test_a_text_that_grows_call_by_call(lm: LM, kept: bool, forks: int) -> None:
    """Its parts add up to the whole, whether its cells are kept or decoded again."""
    lengths = [7, 1, 1, 12, 5]
    if kept:
        with lm.keep_prefixes():
            tokens, state = grown(lm, PROMPTS[1], lengths, forks)
    else:
        tokens, state = grown(lm, PROMPTS[1], lengths, forks)
    assert state.count == sum(lengths) - 1
    check(state, read(lm, PROMPTS[1], tokens))


@behind
def test_batches_in_parts(path: Path, layer: int | None) -> None:
    """llama.cpp decodes a batch as several graphs."""
    with tilebeam.load(path, "cpu", n_ubatch=3, hidden_layer=layer, **SIZES, **EXACT) as model:
        check_all(model, model.generate(PROMPTS[:2], PARAMS))


def test_a_cancelled_call_leaves_nothing_behind(lm: LM) -> None:
    [output] = lm.generate(PROMPTS[:1], PARAMS, progress=lambda state: state.tokens < 9)
    assert all(s.finish_reason == "aborted" and s.hidden is not None for s in output.outputs)
    assert len(lm.engine.hidden._free) == len(lm.engine.hidden._count)
    check_all(lm, lm.generate(PROMPTS[:1], PARAMS))


@behind
def test_on_the_device(path: Path, layer: int | None) -> None:
    options = (
        {"type_k": "f32", "type_v": "f32"} if layer is None else EXACT
    )  # states_behind reads without flash attention
    with tilebeam.load(path, "npu", hidden_layer=layer, **SIZES, **options) as model:
        outputs = model.generate(PROMPTS[:2], PARAMS)
        check_all(model, outputs)


def test_prompts_share_batches_with_samples_that_are_read_behind_a_layer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the final norm they take turns, which are more batches."""
    batches = []
    for layer in (None, 0):
        with tilebeam.load(path, "cpu", lookup=False, hidden_layer=layer, **SIZES, **EXACT) as model:
            count = Count(model, monkeypatch)
            model.generate(PROMPTS, PARAMS)
            turns = count.batches
            model.generate(PROMPTS, replace(PARAMS, hidden=False))
            batches.append((turns, count.batches - turns))
    (turns, plain), (together, same) = batches
    assert turns > plain == same == together


def test_the_parts_of_a_graph_are_known_again(path: Path) -> None:
    """Behind a layer, the scheduler cuts each step's graph in two, which have no number: they are not translated anew
    with every step, and their results are those of the whole graph."""
    params = replace(PARAMS, temperature=0, max_tokens=40)
    with tilebeam.load(path, "npu", hidden_layer=0, lookup=False, **SIZES) as model:
        whole = model.generate(PROMPTS[:1], replace(params, hidden=False))
        model.generate(PROMPTS[:1], params)
        before = control().status()
        outputs = model.generate(PROMPTS[:1], params)
        after = control().status()
    assert texts(outputs) == texts(whole)
    assert after["graphs"] - before["graphs"] >= 2 * 40
    assert after["lowered"] - before["lowered"] <= 8


@pytest.mark.parametrize(
    ("layer", "message"),
    [(3, "choose one from 0 to 2"), (99, "choose one from 0 to 2"), (-1, "hidden_layer must be a whole number")],
)
def test_layers_that_there_are_not(tmp_path: Path, layer: int, message: str) -> None:
    write_model(file := tmp_path / "m.gguf", preset("tiny", n_layer=4))
    with pytest.raises(TilebeamError, match=message):
        tilebeam.load(file, "cpu", n_ctx=256, threads=1, hidden_layer=layer)


def test_a_model_whose_layers_are_not_known_by_name(path: Path) -> None:
    """What would be read is missing, and the message names it; nothing else fails."""
    with tilebeam.load(path, "cpu", hidden_layer=0, lookup=False, **SIZES) as model:
        tap = model.engine.context.tap
        assert tap is not None
        tap._names[0][0] = b"?"
        with pytest.raises(TilebeamError, match="no hidden state behind layer 0"):
            model.generate(PROMPTS[:1], PARAMS)
        model.generate(PROMPTS[:1], replace(PARAMS, hidden=False))


def test_a_reading_in_between_leaves_nothing_behind(lm: LM) -> None:
    """Hidden states are on for single batches only: raw decoding afterwards gives logits of what it asks for."""
    lm.generate(PROMPTS[:1], PARAMS)
    with lm.raw_decode() as context:
        context.token[:2], context.pos[:2], context.seq[:2], context.output[:2] = [5, 6], [0, 1], 0, [0, 1]
        lm.check_decode(context.decode(2))
        with pytest.raises(TilebeamError, match="no hidden state"):
            context.hidden(1)


def test_an_empty_text_adds_nothing() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    empty = empty_state(4)
    state = TextState(3, rows.sum(0), rows[2], rows[2])
    check(state.then(empty), state)
    check(empty.then(state), state)
    assert empty.features(["mean", "recent", "last", "length", "confidence"]).tolist() == [0] * 18


def by_hand(logprobs: list[float], ended: bool = False) -> Confidence:
    x = np.array(logprobs)
    weights = float(DECAY) ** np.arange(len(x) - 1, -1, -1)
    return Confidence(len(x), x.sum(), (x**2).sum(), float(weights @ x), min(0.0, *x), ended)


@pytest.mark.parametrize("stop", [(), ("\0never",)], ids=["together", "one by one"])
def test_confidence_is_of_the_tokens_log_probabilities(lm: LM, stop: tuple[str, ...]) -> None:
    """Whether or not they are asked for themselves; and it says whether the text has ended."""
    params = replace(PARAMS, n=3, logprobs=True, stop=stop)
    outputs = lm.generate(PROMPTS, params)
    alone = lm.generate(PROMPTS, replace(params, logprobs=False))
    for told, untold in zip(outputs, alone, strict=True):
        for sample, same in zip(told.outputs, untold.outputs, strict=True):
            assert same.logprobs is None
            assert sample.hidden is not None
            assert same.hidden is not None
            wanted = by_hand(sample.logprobs or []).values()
            np.testing.assert_allclose(sample.hidden.confidence.values(), wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(same.hidden.confidence.values(), wanted, rtol=1e-5, atol=1e-6)
    assert outputs[0].outputs[0].hidden is not None
    values = outputs[0].outputs[0].hidden.confidence.values()
    logprobs = np.array(outputs[0].outputs[0].logprobs)
    assert values[[0, 1, 3]] == pytest.approx([logprobs.mean(), logprobs.std(), logprobs.min()], rel=1e-4, abs=1e-5)
    [ending] = lm.generate(PROMPTS[:1], replace(PARAMS, logit_bias={lm.eos: 1e5}, ignore_eos=False))
    assert ending.outputs[0].hidden is not None
    assert (ending.outputs[0].finish_reason, ending.outputs[0].hidden.confidence.ended) == ("stop", True)


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=30), st.data())
def test_confidence_of_a_text_in_parts(logprobs: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(logprobs)))
    first, second = (by_hand(part) if part else Confidence() for part in (logprobs[:cut], logprobs[cut:]))
    together, whole = first.then(second).values(), by_hand(logprobs).values()
    np.testing.assert_allclose(together, whole, rtol=1e-4, atol=2e-3)


def test_options_that_need_hidden_states() -> None:
    with pytest.raises(TilebeamError, match="need hidden=True"):
        SamplingParams(hidden_steps="\n")


@pytest.mark.parametrize("checked", [False, True])
def test_states_where_steps_end(lm: LM, checked: bool) -> None:
    """Before the token that ends a step, whose end may be spread over tokens; samples with stop strings take another
    way through the engine."""
    params = replace(PARAMS, n=2, max_tokens=60, stop=["\0never"] if checked else ())
    [plain] = lm.generate(PROMPTS[:1], params)
    text = b"".join(map(lm.piece, plain.outputs[0].token_ids))
    pieces = [lm.piece(t) for t in plain.outputs[0].token_ids]
    separator = (pieces[20][-1:] + pieces[21][:1]).decode()
    [output] = lm.generate(PROMPTS[:1], replace(params, hidden_steps=separator))
    assert plain.outputs[0].hidden_steps is None
    for sample in output.outputs:
        ends, seen, found = [], 0, b""
        for i, token in enumerate(sample.token_ids):
            found += lm.piece(token)
            if separator.encode() in found[seen:]:
                ends.append(i)
                seen = found.rfind(separator.encode()) + len(separator)
        assert sample.hidden_steps is not None
        assert len(sample.hidden_steps) == len(ends)
        for state, at in zip(sample.hidden_steps, ends, strict=True):
            check(state, read(lm, PROMPTS[0], sample.token_ids[: at + 1]))
    assert separator.encode() in text
    assert output.outputs[0].hidden_steps
