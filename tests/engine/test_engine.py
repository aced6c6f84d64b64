"""The scheduler over random models: what is shared, queued, evicted or cancelled never changes a text."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, check_engine
from sampler_kit import Witness, check
from tilebeam import LM, CompletionOutput, Progress, SamplingParams, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.native.llama import Context

from bench.lib.synth import preset, write_model

# The NPU's matrix products treat each row alone: a text depends on its batch only through where its KV cells lie. The
# CPU backend's do not, but with float32 weights and cache and without flash attention the differences are so small that
# they change hardly one draw in a hundred thousand (sampler_kit.py tells these apart, where prompts are drawn by
# chance or texts are many). So scheduling is proved there, and on the NPU where cells lie alike.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {"cpu": ("f32", EXACT), "npu": ("q8_0", {})}
PROMPT = "the question is how many times the number"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        kind: write_model(folder / f"{kind}.gguf", preset("tiny", arch="llama", type=kind)) for kind in ("f32", "q8_0")
    }


@pytest.fixture(scope="module", params=["cpu", "npu"])
def lm(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[LM]:
    kind, options = OPTIONS[request.param]
    with tilebeam.load(
        paths[kind], request.param, n_ctx=1024, n_seq_max=4, threads=1, lookup=False, **options
    ) as model:
        yield model


@pytest.fixture(scope="module")
def small(paths: dict[str, Path]) -> Iterator[LM]:
    with tilebeam.load(paths["f32"], "cpu", 256, 8, threads=1, n_batch=64, lookup=False, **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def roomy(paths: dict[str, Path]) -> Iterator[LM]:
    with tilebeam.load(paths["f32"], "cpu", 4096, 8, threads=1, lookup=False, **EXACT) as model:
        yield model


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all batches decoded from now on."""
    sizes: list[int] = []
    real = Context.decode

    def counting(self: Context, n: int) -> int:
        sizes.append(n)
        return real(self, n)

    monkeypatch.setattr(Context, "decode", counting)
    return sizes


def texts(lm: LM, prompt: str, params: SamplingParams) -> list[list[int]]:
    return [s.token_ids for s in lm.generate(prompt, params)[0].outputs]


def slack(lm: LM) -> float:
    """How far the same token's logits may lie apart in batches of different sizes. On the NPU the order in which
    attention sums differs in the last bit of a float, and now and then an activation rounds to the next of 8 bits."""
    return 0.2 if lm.device == "npu" else 2e-3


def idle(lm: LM) -> bool:
    kv = lm.engine.kv
    return kv.free == lm.n_ctx and not kv.live and not lm.engine.busy


# --- texts ------------------------------------------------------------------------------------------------------------


def test_greedy_is_what_llama_cpp_python_says(paths: dict[str, Path], roomy: LM) -> None:
    import llama_cpp

    stock = llama_cpp.Llama(str(paths["f32"]), n_ctx=512, n_threads=1, seed=1, verbose=False)
    try:
        tokens = stock.tokenize(PROMPT.encode(), add_bos=True, special=True)
        expected = list(islice(stock.generate(tokens, temp=0.0, repeat_penalty=1.0), 24))
    finally:
        stock.close()
    result = roomy.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0]
    assert result.prompt_token_ids == tokens
    assert result.outputs[0].token_ids == expected
    assert roomy.detokenize(result.outputs[0].token_ids) == result.outputs[0].text


def test_samples_of_one_prompt_share_it_and_say_the_same(lm: LM, decoded: list[int]) -> None:
    (alone,) = texts(lm, PROMPT, GREEDY)
    n_prompt = len(lm.tokenize(PROMPT))
    assert sum(decoded) == n_prompt + len(alone) - 1
    decoded.clear()
    result = lm.generate(PROMPT, SamplingParams(n=4, temperature=0, max_tokens=12))[0]
    assert [s.token_ids for s in result.outputs] == [alone] * 4
    assert sum(decoded) == n_prompt + 4 * (len(alone) - 1)
    assert result.usage.recomputed_tokens == 0
    assert idle(lm)


@pytest.mark.parametrize("n", [1, 4, 5, 11])
def test_slots_are_refilled_and_every_sample_has_its_own_seed(lm: LM, n: int) -> None:
    params = SamplingParams(n=n, temperature=1.0, max_tokens=9, seed=40)
    together = lm.generate(PROMPT, params)[0]
    assert [s.seed for s in together.outputs] == [40 + i for i in range(n)]
    for i in {0, n // 2, n - 1}:
        alone = texts(lm, PROMPT, SamplingParams(temperature=1.0, max_tokens=9, seed=40 + i))
        assert together.outputs[i].token_ids == alone[0]
    assert idle(lm)


def test_without_a_seed_one_is_drawn_and_told(lm: LM) -> None:
    a = lm.generate(PROMPT, SamplingParams(max_tokens=10))[0]
    b = lm.generate(PROMPT, SamplingParams(max_tokens=10, seed=a.seed))[0]
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert lm.generate(PROMPT, SamplingParams(max_tokens=1))[0].seed != a.seed


def test_largest_seeds_wrap_without_meeting_the_random_one() -> None:
    params = SamplingParams(n=4, seed=2**32 - 3)
    assert [params.sample_seed(i) for i in range(4)] == [2**32 - 3, 2**32 - 2, 0, 1]


def test_prompts_may_be_token_ids_and_parameters_per_prompt(lm: LM) -> None:
    ids = lm.tokenize(PROMPT)
    by_text = lm.generate(PROMPT, GREEDY)[0]
    short = SamplingParams(temperature=0, max_tokens=3)
    one, two = lm.generate([ids, PROMPT], [GREEDY, short])
    assert one.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert two.outputs[0].token_ids == by_text.outputs[0].token_ids[:3]
    assert lm.generate(ids, short)[0].outputs[0].token_ids == two.outputs[0].token_ids
    assert lm.generate([], GREEDY) == []


def test_penalties_see_prompt_and_text(lm: LM) -> None:
    plain = texts(lm, PROMPT, SamplingParams(temperature=0, max_tokens=40))[0]
    banned = texts(lm, PROMPT, SamplingParams(temperature=0, max_tokens=40, presence_penalty=1000.0))[0]
    assert len(set(banned) | set(lm.tokenize(PROMPT))) == len(set(lm.tokenize(PROMPT))) + 40
    assert len(plain) == 40


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_stop_strings_cut_the_text_also_across_tokens(lm: LM) -> None:
    whole = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    pieces = [lm.detokenize([t]) for t in whole.token_ids]
    assert "".join(pieces) == whole.text or "\ufffd" in whole.text
    start = len(whole.text) // 3
    stop = whole.text[start : start + 9]
    cut = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, stop=["\0never", stop]))[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 24


def test_end_of_generation(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts(lm, PROMPT, GREEDY)[0]
    vocab = lm.engine.vocab
    monkeypatch.setattr(vocab, "is_end", lambda token: token == whole[5])
    first = whole.index(whole[5])
    ended = lm.generate(PROMPT, GREEDY)[0]
    assert ended.outputs[0].finish_reason == "stop"
    assert ended.outputs[0].token_ids == whole[: first + 1]
    assert ended.usage.completion_tokens == first + 1
    on = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert (on.token_ids, on.finish_reason) == (whole, "length")


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_beams_of_many_prompts_stay_for_the_next_step(roomy: LM) -> None:
    """Six times as many texts as can decode at a time; the next call goes on from a quarter of them."""
    step = SamplingParams(n=4, max_tokens=5, seed=1, ignore_eos=True)
    with roomy.keep_prefixes():
        outputs = roomy.generate([[5 + i] * 9 for i in range(12)], step)
        again = roomy.generate([o.prompt_token_ids + o.outputs[i % 4].token_ids for i, o in enumerate(outputs)], step)
    # Each beam's last token has no cell before the call.
    assert [o.usage.prompt_tokens - o.usage.cached_tokens for o in again] == [1] * 12


def test_logprobs_are_those_of_the_model(lm: LM) -> None:
    result = lm.generate(PROMPT, SamplingParams(n=2, max_tokens=8, seed=2, logprobs=True))[0]
    for sample in result.outputs:
        rows = lm.logits(result.prompt_token_ids + sample.token_ids).astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        log_p = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        n = len(result.prompt_token_ids)
        expected = [log_p[n - 1 + i, t] for i, t in enumerate(sample.token_ids)]
        np.testing.assert_allclose(sample.logprobs, expected, atol=slack(lm))
        assert sample.cumulative_logprob == pytest.approx(sum(expected), abs=8 * slack(lm))
    assert lm.generate(PROMPT, GREEDY)[0].outputs[0].cumulative_logprob is None


def test_logits_agree_with_greedy_and_in_any_chunks(lm: LM) -> None:
    result = lm.generate(PROMPT, GREEDY)[0]
    ids = result.prompt_token_ids + result.outputs[0].token_ids
    rows = lm.logits(ids)
    assert rows.shape == (len(ids), lm.n_vocab)
    n = len(result.prompt_token_ids)
    assert rows.argmax(axis=1)[n - 1 : -1].tolist() == result.outputs[0].token_ids
    np.testing.assert_allclose(lm.logits(ids, chunk=1), rows, atol=2 * slack(lm))
    with pytest.raises(TilebeamError, match="chunk"):
        lm.logits(ids, chunk=-1)
    with pytest.raises(TilebeamError, match="tokens"):
        lm.logits([0] * 2000)
    with pytest.raises(TilebeamError, match="not in the vocabulary"):
        lm.logits([lm.n_vocab])


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 20])
def test_running_out_of_cells_changes_no_text(small: LM, roomy: LM, n: int) -> None:
    params = SamplingParams(n=n, temperature=0.9, max_tokens=75, seed=9, ignore_eos=True)
    with Witness(small) as of_small, Witness(roomy) as of_roomy:
        wide, tight = roomy.generate(PROMPT, params)[0], small.generate(PROMPT, params)[0]
        for sample, alone in zip(tight.outputs, wide.outputs, strict=True):
            check(tight.prompt_token_ids, params, sample, alone, of_small, of_roomy)
    assert [s.finish_reason for s in tight.outputs] == ["length"] * n
    assert tight.usage.recomputed_tokens > 0
    assert tight.usage.completion_tokens == n * 75
    assert idle(small)


@pytest.mark.parametrize("seed", [3, 28])
def test_pinned_prompts_leave_sequences_for_samples_that_wait_for_one(roomy: LM, seed: int) -> None:
    """Prompts with more samples than there are slots, followers of others, and kept sequences in between."""
    rng = random.Random(seed)
    words = ["the", "question", "is", "how", "many", "times", "the", "number", "of", "people", "have", "been"]
    rounds = [
        [
            (" ".join(rng.sample(words, rng.randint(1, 5))), SamplingParams(n=rng.randint(1, 9), max_tokens=3, seed=1))
            for _ in range(rng.randint(2, 8))
        ]
        for _ in range(2)
    ]
    with roomy.keep_prefixes():
        for calls in rounds:
            together = roomy.generate([p for p, _ in calls], [s for _, s in calls])
            for (prompt, sampling), output in zip(calls, together, strict=True):
                assert [c.token_ids for c in output.outputs] == texts(roomy, prompt, sampling)
    assert idle(roomy)


def test_llama_cpp_refusing_a_batch_is_survived(roomy: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=4, max_tokens=10, seed=9)
    expected = texts(roomy, PROMPT, params)
    real, refused = Context.decode, []

    def decode(self: Context, n: int) -> int:
        if n == 4 and len(refused) < 2:
            refused.append(n)
            return 1
        return real(self, n)

    monkeypatch.setattr(Context, "decode", decode)
    assert texts(roomy, PROMPT, params) == expected
    assert len(refused) == 2
    assert idle(roomy)


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(small: LM, decoded: list[int]) -> None:
    with pytest.raises(TilebeamError, match="the context 256"):
        small.generate([PROMPT, [5] * 256], GREEDY)
    with pytest.raises(TilebeamError, match="no tokens"):
        small.generate([[]], GREEDY)
    with pytest.raises(TilebeamError, match="vocabulary"):
        small.generate([[5, 10**6]], GREEDY)
    assert decoded == []
    longest = small.generate([5] * 255, SamplingParams(temperature=0, max_tokens=9))[0]
    assert longest.usage.completion_tokens == 1
    assert idle(small)


# --- life -------------------------------------------------------------------------------------------------------------


def test_samples_are_told_as_they_end(lm: LM) -> None:
    told: list[tuple[int, CompletionOutput]] = []
    when: list[int] = []

    def watch(state: Progress) -> None:
        when.append(len(told))
        assert len(told) == state.finished  # a sample is told before the progress that counts it

    params = [SamplingParams(n=6, max_tokens=m, seed=1, logprobs=True, ignore_eos=True) for m in (3, 9)]
    outputs = lm.generate([PROMPT, PROMPT], params, progress=watch, on_sample=lambda i, s: told.append((i, s)))
    assert len(set(when)) > 1  # not all at the end
    assert len(told) == 12
    assert sorted(told, key=lambda t: (t[0], t[1].index)) == [(i, s) for i, o in enumerate(outputs) for s in o.outputs]
    told.clear()
    cancelled = lm.generate(
        PROMPT,
        SamplingParams(n=6, max_tokens=40, ignore_eos=True),
        progress=lambda _: False,
        on_sample=lambda i, s: told.append((i, s)),
    )[0]
    assert all(o.finish_reason == "aborted" for o in cancelled.outputs)
    assert not told


@pytest.mark.parametrize("others", [True, False])
def test_samples_that_nobody_wants_any_more_make_room(lm: LM, others: bool) -> None:
    """One prompt's samples end, those that run and those that wait for a slot; the others go on."""
    told: list[int] = []

    def watch(number: int, _: CompletionOutput) -> list[int]:
        told.append(number)
        return [1, 0]

    params = [SamplingParams(n=n, max_tokens=m, seed=1, ignore_eos=True) for n, m in ((2, 3), (20, 60), (5, 9))]
    asked = 3 if others else 2
    outputs = lm.generate([PROMPT, PROMPT + " of", "the"][:asked], params[:asked], on_sample=watch)
    assert sorted(told) == [0] * 2 + [2] * 5 * others
    dropped = outputs[1].outputs
    assert [c.finish_reason for c in dropped] == ["aborted"] * 20
    assert {0} < {len(c.token_ids) for c in dropped} < set(range(20))
    assert [len(c.token_ids) for o in (outputs[0], *outputs[2:]) for c in o.outputs] == [3] * 2 + [9] * 5 * others
    check_engine(lm._engine)
    assert not lm._engine.busy


def test_weights_that_are_not_numbers_are_noticed(paths: dict[str, Path], tmp_path: Path) -> None:
    data = bytearray(paths["q8_0"].read_bytes())
    with gguf_tools.GGUFFile(paths["q8_0"]) as file:
        at = file.tensors["blk.0.attn_norm.weight"].offset
    data[at : at + 4] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(data)
    with tilebeam.load(tmp_path / "nan.gguf", "npu", n_ctx=256, n_seq_max=2, threads=1) as model:
        for params in (GREEDY, SamplingParams(n=3, seed=1), SamplingParams(seed=1, top_k=0, top_p=1)):
            with pytest.raises(TilebeamError, match="not numbers"):
                model.generate(PROMPT, params)
            assert idle(model)
    with tilebeam.load(paths["q8_0"], "npu", n_ctx=256, threads=1, draft=tmp_path / "nan.gguf") as model:
        for _ in range(2):
            with pytest.raises(TilebeamError, match="The draft model's logits are not numbers"):
                model.generate(PROMPT, GREEDY)
            assert idle(model)


def test_a_model_is_not_carried_elsewhere(lm: LM) -> None:
    for carry in (lambda: pickle.dumps(lm), lambda: pickle.dumps(lm.generate), lambda: copy.deepcopy([lm])):
        with pytest.raises(TilebeamError, match=r"cannot be pickled or copied: .* Call tilebeam\.load in"):
            carry()
    assert lm.generate("a", max_tokens=1)


def test_sliding_windows_survive_sharing_and_eviction(tmp_path: Path) -> None:
    """Prompts longer than the window: cells that left it may be taken by others, and forks must not miss any."""
    slack = 5e-3  # the CPU backend looks GELU up in a table of halves: a last bit of its input may change 10 of them
    path = write_model(tmp_path / "swa.gguf", preset("tiny", arch="gemma3", type="f32", swa=32, swa_pattern=2))
    with (
        tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=4, threads=1, lookup=False, **EXACT) as tight,
        tilebeam.load(path, "cpu", n_ctx=4096, n_seq_max=1, threads=1, lookup=False, **EXACT) as alone,
    ):
        rng = np.random.default_rng(1)
        first = [2, *rng.integers(300, 1000, 150).tolist()]
        prompts = [first, [*first[:100], *rng.integers(300, 1000, 60).tolist()], [*first[:20], 400, 401]]
        params = SamplingParams(n=7, max_tokens=50, seed=5, ignore_eos=True)
        with Witness(tight) as of_tight, Witness(alone) as of_alone:
            results = tight.generate(prompts, params)
            assert idle(tight)
            assert sum(r.usage.recomputed_tokens for r in results) > 50
            for prompt, result in zip(prompts, results, strict=True):
                for i in (0, 3, 6):
                    single = SamplingParams(max_tokens=50, seed=5 + i, ignore_eos=True)
                    [other] = alone.generate(prompt, single)[0].outputs
                    check(prompt, params, result.outputs[i], other, of_tight, of_alone, slack)
