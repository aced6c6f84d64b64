"""Samples that fork from one prompt in models with recurrent layers: state that is copied, and cannot go back.

The models are those that llama.cpp's test-llama-archs writes, in float32. What a sample was given is compared with the
stock CPU backend, which reads prompt and sample as one sequence: a state that another sample wrote to would show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import ScriptedDrafter, check_engine, empty_state
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.measure.trace import Tracer
from tilebeam.outputs import RequestOutput

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "archs"))
import run as archs

# Hybrid and purely recurrent ones.
HYBRID = ("qwen35-dense", "lfm2-dense", "mamba2-dense", "kimi-linear-moe")
REFUSED = {
    "plamo2-dense": "wrongly in batches of several sequences",
    "cogvlm-dense": "wrongly in batches where not all tokens have logits",
    "deepseek4-moe": "wrongly where sequences fork",
    "dream-dense": "is a diffusion model",
}
PROMPT = [5, 9, 17, 33, 6, 8, 12, 19, 22, 40]
# Float32 matrices; the KV cache of attention layers is F16, which both sides round to from sums in other orders.
LIMIT = 1e-3


def drawn(n: int, tokens: int = 8, **more: Any) -> SamplingParams:
    free = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "ignore_eos": True, "logprobs": True}
    return SamplingParams(n=n, max_tokens=tokens, **(free | more))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = "|".join(name.rpartition("-")[0] for name in (*HYBRID, *REFUSED))
    return {path.stem: path for path in archs.save(f"^({names})$", folder)}


@pytest.fixture(scope="module", params=HYBRID)
def pair(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[tuple[LM, LM]]:
    """A model on the device, and the same one on the stock backend, for one sequence."""
    path = models[request.param]
    with (
        tilebeam.load(path, "npu", n_ctx=512, n_seq_max=16, threads=1) as lm,
        tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=1, threads=1) as stock,
    ):
        yield lm, stock


def worst(stock: LM, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput]) -> float:
    """The largest difference of a sampled token's log-probability from the stock backend's."""
    found = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        for sample in output.outputs:
            logits = stock.logits(prompt + sample.token_ids).astype(np.float64)[len(prompt) - 1 : -1]
            logits -= logits.max(1, keepdims=True)
            wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            assert sample.logprobs is not None
            got = np.array(sample.logprobs)
            found = max(found, float(np.abs(wanted[range(len(got)), sample.token_ids] - got).max()))
    return found


def test_states_stay_in_the_cache(pair: tuple[LM, LM]) -> None:
    lm, _ = pair
    with Tracer(lm) as tracer:
        lm.generate([PROMPT, PROMPT[:3]], drawn(2))
    ops = {row.op: row.count for row in tracer.summary().ops}
    assert "SSM_CONV" in ops
    # Kimi Linear has three convolutions over parts of one state, which are copied.
    assert ("CONCAT" in ops) == ("kimi-linear" in lm.description)


def test_sixteen_samples_fork_from_one_prompt(pair: tuple[LM, LM]) -> None:
    lm, stock = pair
    outputs = lm.generate(PROMPT, drawn(16))
    assert len({tuple(s.token_ids) for s in outputs[0].outputs}) == 16
    assert worst(stock, [PROMPT], outputs) < LIMIT


def test_likelihoods_of_texts_that_begin_alike(pair: tuple[LM, LM]) -> None:
    lm, stock = pair
    prompt, shared = PROMPT * 3, [9, 4, 31] * 7
    tails = [[*shared, 5, 6, 7], [*shared, 8], [11, 12], [*shared[:5], 13, 14]]
    found = lm.loglikelihood(prompt, tails)
    for tail, likelihood in zip(tails, found, strict=True):
        logits = stock.logits(prompt + tail).astype(np.float64)[len(prompt) - 1 : -1]
        logits -= logits.max(1, keepdims=True)
        wanted = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[range(len(tail)), tail]
        assert float(np.abs(wanted - likelihood.logprobs).max()) < LIMIT
    assert sum(x.decoded_tokens for x in found) < len(prompt) + sum(map(len, tails))


def test_more_samples_than_there_is_room_for(pair: tuple[LM, LM]) -> None:
    """Some give way and are decoded again later."""
    _, stock = pair
    with tilebeam.load(stock.info.path, "npu", n_ctx=256, n_seq_max=16, threads=1) as small:
        outputs = small.generate(PROMPT, drawn(20, 32))
        assert len(small.figures().batches) > 2
    assert worst(stock, [PROMPT], outputs) < LIMIT


@pytest.mark.parametrize("device", ["npu", "cpu"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(models: dict[str, Path], name: str, device: str) -> None:
    with pytest.raises(TilebeamError, match=REFUSED[name]):
        tilebeam.load(models[name], device, n_ctx=256)  # type: ignore[arg-type]


def test_hidden_states_of_a_text_that_grows(pair: tuple[LM, LM]) -> None:
    """State that cannot go back is forked at a text's end, and its hidden states add up call by call."""
    lm, stock = pair
    tokens: list[int] = []
    state = empty_state(lm.n_embd)
    with lm.keep_prefixes():
        for length in (3, 1, 4):
            params = drawn(3, length, hidden=True, hidden_prompt=bool(tokens))
            sample = lm.generate([PROMPT + tokens], params)[0].outputs[-1]
            assert sample.hidden is not None
            tokens, state = tokens + sample.token_ids, state.then(sample.hidden)
    assert state.count == len(tokens) - 1
    [reading] = stock.hidden([PROMPT + tokens], [range(len(PROMPT), len(PROMPT) + len(tokens) - 1)])
    np.testing.assert_allclose(state.total, reading.hidden.sum(0), atol=20 * LIMIT)
    np.testing.assert_allclose(state.last, reading.hidden[-1], atol=5 * LIMIT)


@pytest.mark.parametrize("n", [1, 3])
def test_guesses_are_taken_back(pair: tuple[LM, LM], n: int) -> None:
    """By a copy of the state. The last guesses of a text are wrong: what goes on from it goes on from a state that
    was taken back."""
    lm, stock = pair
    free = drawn(n, 40)
    plain = lm.generate(PROMPT, free)
    try:
        with lm.keep_prefixes():
            for mode in ("partly", "wrong", "right"):
                lm.use_drafter(ScriptedDrafter(plain, mode))
                outputs = lm.generate(PROMPT, free)
                assert [s.token_ids for s in outputs[0].outputs] == [s.token_ids for s in plain[0].outputs]
                assert worst(stock, [PROMPT], outputs) < LIMIT
                usage = outputs[0].usage
                assert usage.drafted_tokens > 10 * n  # full caches leave little room for more
                assert (usage.accepted_tokens > 0) == (mode != "wrong")
                assert (usage.recomputed_tokens > 0) == (mode != "right")
                lm.use_drafter(None)
                turns = [PROMPT + s.token_ids[:-1] for s in plain[0].outputs]
                turns += [[*turn, 7, 8] for turn in turns]
                assert worst(stock, turns, lm.generate(turns, drawn(1))) < LIMIT
        check_engine(lm.engine)
    finally:
        lm.speculate()


def test_a_text_that_ended_within_a_draft_is_gone_on_from(pair: tuple[LM, LM]) -> None:
    """Its state was taken back, which llama.cpp may do only when it computes on: a fork must not get the later one."""
    lm, stock = pair
    [plain] = lm.generate(PROMPT, drawn(1, 40))
    tokens = plain.outputs[0].token_ids
    ends = [i for i in range(12, 36) if tokens[i] not in tokens[:i]]
    try:
        for at in ends:
            lm.use_drafter(ScriptedDrafter([plain], "right"))
            with lm.keep_prefixes():
                [output] = lm.generate(PROMPT, drawn(1, 40, stop_tokens=(tokens[at],)))
                assert output.outputs[0].token_ids == tokens[: at + 1]
                turns = [[*PROMPT, *tokens[: at + 1], 7, 8], [*PROMPT, *tokens[:at], 9, 9]]
                lm.use_drafter(None)
                assert worst(stock, turns, lm.generate(turns, drawn(1))) < LIMIT
                check_engine(lm.engine)
    finally:
        lm.speculate()


def test_states_that_are_not_taken_are_computed_again(pair: tuple[LM, LM], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, stock = pair
    plain = lm.generate(PROMPT, drawn(3))
    try:
        lm.use_drafter(ScriptedDrafter(plain, "wrong"))
        for name in ("load_sequence", "save_sequence"):
            with monkeypatch.context() as patch:
                patch.setattr(lm.engine.context, name, refuse if name == "save_sequence" else lambda *_, **__: False)
                outputs = lm.generate(PROMPT, drawn(3))
            assert worst(stock, [PROMPT], outputs) < LIMIT
            assert (outputs[0].usage.drafted_tokens > 0) == (name == "load_sequence")
            check_engine(lm.engine)
    finally:
        lm.speculate()


def refuse(*_: Any, **__: Any) -> Any:
    raise TilebeamError("llama.cpp cannot save this model's KV cells.")


def test_texts_are_looked_up_and_a_recurrent_model_guesses_for_none(models: dict[str, Path]) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 1, "threads": 1}
    with tilebeam.load(models["mamba2-dense"], "cpu", lookup=True, **options) as lm:
        [output] = lm.generate([PROMPT * 4], drawn(1, 60, temperature=0))
        assert output.usage.drafted_tokens > 0
    with pytest.raises(TilebeamError, match="cannot be a draft model: the model has recurrent layers"):
        tilebeam.load(models["mamba2-dense"], "cpu", draft=models["mamba2-dense"], **options)
