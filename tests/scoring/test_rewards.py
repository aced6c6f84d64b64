"""Reward models: hidden states against llama.cpp's own and numpy, heads against torch, verdicts read step by step
against whole texts read afresh, and what growing a beam costs, token by token."""

from __future__ import annotations

import ctypes
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import engine_kit
import gguf
import llama_cpp.llama_cpp as C
import numpy as np
import pytest
import tilebeam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam import (
    LM,
    CompletionOutput,
    Head,
    HeadReward,
    Prompt,
    RewardFormat,
    RewardModel,
    TilebeamError,
    TokenReward,
    Usage,
)
from tilebeam import gguf as gguf_tools
from tilebeam.native.llama import log_router
from tilebeam.scoring.reward_formats import Layout
from tilebeam.scoring.reward_heads import classifier_of, make_head

from bench.lib.synth import preset, write_model

EXACT = {**engine_kit.EXACT, "threads": 1}
QUESTION = "the question is how many times the number of the people"
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"]


def output_matrix(path: Path) -> np.ndarray[Any, Any]:
    """What hidden states are multiplied with for logits."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    tensor = tensors.get("output.weight") or tensors["token_embd.weight"]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def stock_embeddings(path: Path, ids: list[int], pooling: int, width: int) -> np.ndarray[Any, Any]:
    """From llama.cpp itself: of every token [len(ids), width], or of the sequence [width] where it pools."""
    with log_router().capture():
        loading = C.llama_model_default_params()
        nothing = (ctypes.c_void_p * 1)(None)  # no device but the CPU
        loading.devices, loading.n_gpu_layers = ctypes.cast(nothing, ctypes.c_void_p), 0
        model = C.llama_model_load_from_file(str(path).encode(), loading)
        params = C.llama_context_default_params()
        params.n_ctx, params.embeddings, params.pooling_type, params.n_threads = 256, True, pooling, 1
        params.type_k = params.type_v = 0
        params.flash_attn_type = C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = C.llama_init_from_model(model, params)
        try:
            tokens = (ctypes.c_int32 * len(ids))(*ids)
            assert C.llama_decode(context, C.llama_batch_get_one(tokens, len(ids))) == 0
            if pooling == C.LLAMA_POOLING_TYPE_NONE:
                rows = [C.llama_get_embeddings_ith(context, i) for i in range(len(ids))]
                return np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])
            return np.ctypeslib.as_array(C.llama_get_embeddings_seq(context, 0), (width,)).copy()
        finally:
            C.llama_free(context)
            C.llama_model_free(model)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in ("llama", "qwen2", "qwen3", "gemma3"):
        write_model(folder / f"{arch}.gguf", preset("tiny", arch=arch, type="f32", n_layer=2))
    write_model(folder / "q8.gguf", preset("tiny", arch="qwen2", type="q8_0", n_layer=2))
    write_model(folder / "yesno.gguf", preset("tiny", arch="qwen3", type="f32", n_layer=2, labels=("yes", "no")))
    write_model(folder / "one.gguf", preset("tiny", arch="qwen3", type="f32", n_layer=2, labels=("good",)))
    return folder


@pytest.fixture(scope="module")
def lm(models: Path) -> Iterator[LM]:
    with tilebeam.load(models / "qwen2.gguf", "cpu", n_ctx=4096, n_seq_max=16, **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def windowed(models: Path) -> Iterator[LM]:
    """A model with a sliding window of 128 tokens."""
    with tilebeam.load(models / "gemma3.gguf", "cpu", n_ctx=4096, n_seq_max=16, **EXACT) as model:
        assert model.engine.context.model.n_swa == 128
        yield model


# --- hidden states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_hidden_states_are_llama_cpps_and_make_its_logits(models: Path, arch: str) -> None:
    path = models / f"{arch}.gguf"
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=2, **EXACT) as model:
        ids = model.tokenize(QUESTION * 4)
        at = [-1, 0, 7, 7, len(ids) // 2]
        (reading,) = model.hidden([ids], [at])
        stock = stock_embeddings(path, ids, C.LLAMA_POOLING_TYPE_NONE, model.n_embd)
        np.testing.assert_allclose(reading.hidden, stock[at], atol=1e-4)
        logits = model.logits(ids)[at]
        np.testing.assert_allclose(reading.hidden @ output_matrix(path).T, logits, atol=1e-3)
        assert (reading.decoded_tokens, reading.cached_tokens) == (len(ids), 0)
        # Reading hidden states leaves no trace: logits are read as before.
        np.testing.assert_allclose(model.read([ids], [at])[0].logits, logits, atol=1e-4)
        assert reading.logits.shape == (len(at), 0)


BEGINNINGS = [list(range(5, 105)), list(range(5, 305))]
TEXT = st.builds(
    lambda start, end: start + end,
    st.sampled_from([[], *BEGINNINGS]),
    st.lists(st.integers(5, 200), min_size=1, max_size=60),
)


@pytest.mark.parametrize("name", ["lm", "windowed"])
@given(texts=st.lists(TEXT, min_size=1, max_size=8), data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_texts_read_together_are_as_read_alone(
    request: pytest.FixtureRequest, name: str, texts: list[list[int]], data: st.DataObject
) -> None:
    lm = request.getfixturevalue(name)
    where = [data.draw(st.lists(st.integers(0, len(t) - 1), min_size=1, max_size=4)) for t in texts]
    with lm.keep_prefixes():
        lm.hidden(texts[:1], where[:1])
        together = lm.hidden(texts, where)
    for text, at, reading in zip(texts, where, together, strict=True):
        (alone,) = lm.hidden([text], [at])
        # Batches of other shapes round differently; what is wrong is wrong by 1.
        np.testing.assert_allclose(reading.hidden, alone.hidden, atol=2e-3)
        np.testing.assert_allclose(alone.hidden @ _output(lm).T, lm.logits(text)[at], atol=1e-2)
    assert not lm.engine.kv.live


def _output(lm: LM) -> np.ndarray[Any, Any]:
    return output_matrix(Path(lm.info.path))


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_hidden_states_on_the_npu(models: Path, executor: str, tmp_path: Path) -> None:
    path = models / "q8.gguf"
    packed = tmp_path / "q8.tb.gguf"
    gguf_tools.pack(path, packed)
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, threads=1) as cpu:
        ids = cpu.tokenize(QUESTION * 2)
        (stock,) = cpu.hidden([ids], [range(len(ids))])
    exact = tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, **EXACT)
    with exact:
        (want,) = exact.hidden([ids], [range(len(ids))])
    scale = float(np.abs(want.hidden).max())
    for file in (path, packed):
        with tilebeam.load(file, "npu", n_ctx=256, n_seq_max=2, threads=2, executor=executor) as npu:
            (got,) = npu.hidden([ids], [range(len(ids))])
        # As near to the stock backend with an exact cache as the stock backend with the usual one is, and a little.
        np.testing.assert_allclose(got.hidden, want.hidden, atol=0.03 * scale)
        error, stock_error = (np.square(x.hidden - want.hidden).mean() for x in (got, stock))
        assert error <= 2 * stock_error + 1e-4 * scale**2


def test_classifiers_are_what_llama_cpp_pools(models: Path) -> None:
    for name, labels in (("yesno", 2), ("one", 1)):
        path = models / f"{name}.gguf"
        head = classifier_of(path)
        with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, **EXACT) as model:
            ids = model.tokenize(QUESTION)
            (reading,) = model.hidden([ids], [[-1]])
        pooled = stock_embeddings(path, ids, C.LLAMA_POOLING_TYPE_RANK, labels)
        if labels == 2:
            assert head(reading.hidden)[0] == pytest.approx(pooled[0], abs=1e-5)
        else:  # llama.cpp's softmax over a single label says nothing; the head's sigmoid does
            assert pooled[0] == 1.0
            weight = next(t for t in gguf.GGUFReader(path).tensors if t.name == "cls.output.weight").data
            score = float((reading.hidden[0] * weight.reshape(-1)).sum())
            assert head(reading.hidden)[0] == pytest.approx(1 / (1 + np.exp(-score)), abs=1e-5)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def heads(n_embd: int) -> dict[str, Head]:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((n_embd, n_embd)) / np.sqrt(n_embd)
    return {
        "value": make_head([(rng.standard_normal(n_embd) / np.sqrt(n_embd), np.array([0.3]))]),
        "two-label": make_head([(wide, rng.standard_normal(n_embd)), (rng.standard_normal((2, n_embd)) / 8, None)]),
    }


def scorers(lm: LM, **options: Any) -> dict[str, RewardModel]:
    """One of each kind."""
    form = RewardFormat(head="question {prompt} ", step="{step}", tag=" ?", strip="\n")
    own = heads(lm.n_embd)
    return {
        "token": TokenReward(lm, good="1", bad="2", format=form, **options),
        "value-head": HeadReward(lm, own["value"], format=form, **options),
        "two-label": HeadReward(lm, own["two-label"], format=form, **options),
    }


def by_hand(scorer: RewardModel, prompt: str, steps: Sequence[str]) -> list[float]:
    """Scores from the definition: every beginning read alone and whole, numpy for the rest."""
    lm, form = scorer.lm, scorer.format
    scores = []
    for n in range(1, len(steps) + 1):
        tokens = lm.tokenize("question") + lm.tokenize(f" {prompt}", add_special=False) + lm.tokenize(" ")[1:]
        for i, step in enumerate(steps[:n]):
            tokens += lm.tokenize(step.strip("\n"), add_special=False)
            if not scorer.outcome or i + 1 == n:
                tokens += lm.tokenize(form.tag, add_special=False)
        if isinstance(scorer, TokenReward):
            good, bad = lm.tokenize("1")[1], lm.tokenize("2")[1]
            logits = lm.logits(tokens)[-1].astype(np.float64)
            scores.append(float(np.exp(logits[good]) / (np.exp(logits[good]) + np.exp(logits[bad]))))
        else:
            assert isinstance(scorer, HeadReward)
            x = lm.hidden([tokens], [[-1]])[0].hidden[0].astype(np.float64)
            (w, b), *more = scorer.head.layers
            x = w @ x + b
            for w, b in more:
                x = w @ np.where(x > 0, x, 0) + b
            scores.append(float(np.exp(x[1]) / np.exp(x).sum() if len(x) == 2 else 1 / (1 + np.exp(-x[0]))))
    return scores


STEPS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(lambda words: " ".join(words) + "\n")


@pytest.mark.parametrize("outcome", [False, True], ids=["process", "outcome"])
@pytest.mark.parametrize("kind", ["token", "value-head", "two-label"])
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scores_of_growing_beams_are_those_of_whole_texts(
    lm: LM, kind: str, outcome: bool, data: st.DataObject
) -> None:
    """Beams grow, are dropped and branch at random; each round's scores are those by the definition."""
    scorer = scorers(lm, outcome=outcome)[kind]
    prompts = [QUESTION, "how many people have been"]
    beams: list[tuple[str, list[str]]] = [(p, []) for p in prompts]
    final: list[tuple[str, list[str], list[float]]] = []
    spent = Usage()
    with scorer.session():
        for _ in range(data.draw(st.integers(1, 3))):
            kept = data.draw(st.lists(st.sampled_from(beams), min_size=1, max_size=3))
            beams = [(p, [*steps, data.draw(STEPS)]) for p, steps in kept]
            rated = scorer.rate_steps([p for p, _ in beams], [s for _, s in beams])
            final += [(p, s, r.scores) for (p, s), r in zip(beams, rated, strict=True)]
            spent = sum((r.usage for r in rated), spent)
    for prompt, steps, scores in final[-4:]:
        np.testing.assert_allclose(scores, by_hand(scorer, prompt, steps), atol=1e-4)
    assert spent.scored_tokens <= spent.full_scoring_tokens or outcome
    assert not lm.engine.kv.live
    assert not scorer._known  # nothing outlives a session


@pytest.mark.parametrize(("beams", "width", "slots"), [(16, 4, 16), (12, 4, 8), (4, 1, 4)])
def test_beams_of_eight_steps_decode_only_what_is_new(models: Path, beams: int, width: int, slots: int) -> None:
    """The best beams survive each round, with `width` continuations each; tokens are counted one by one. With 8 slots
    there are 17 sequences, fewer than 12 beams and their 12 parents: those that died give way."""
    with tilebeam.load(models / "qwen2.gguf", "cpu", n_ctx=4096, n_seq_max=slots, **EXACT) as lm:
        scorer = scorers(lm)["value-head"]
        layout = scorer._layout
        alive: list[list[str]] = [[]]
        prompt = " ".join([QUESTION] * 2)
        expected, whole, spent = len(layout.head(prompt)), 0, Usage()
        with scorer.session():
            for round in range(8):
                # First letters differ: no two new steps share a beginning.
                fresh = range(beams // len(alive))
                ends = [f"{chr(65 + i)} step {round} is the number of {WORDS[-1 - i]} and {i}\n" for i in fresh]
                grown = [[*steps, end] for steps in alive for end in ends]
                assert len(grown) == beams
                rated = scorer.rate_steps([prompt] * beams, grown)
                scores = [r.scores for r in rated]
                spent = sum((r.usage for r in rated), spent)
                for steps, rating in zip(grown, rated, strict=True):
                    sizes = [len(layout.step(s, first=False)) + len(layout.tag) for s in steps]
                    expected += sizes[-1]
                    whole += len(layout.head(prompt)) + sum(sizes)
                    assert rating.usage.full_scoring_tokens == len(layout.head(prompt)) + sum(sizes)
                    assert round == 0 or rating.usage.scored_tokens == sizes[-1]
                best = sorted(range(beams), key=lambda i: -scores[i][-1])[: beams // width]
                alive = [grown[i] for i in best]
        assert spent.scored_tokens == expected
        assert spent.full_scoring_tokens == whole
        assert whole >= 5 * expected
        again = scorers(lm)["value-head"].score_steps([prompt] * len(alive), alive)
        np.testing.assert_allclose([scores[i] for i in best], again, atol=1e-4)


def test_texts_longer_than_what_is_free_are_read(models: Path) -> None:
    """Beams whose texts alone fill the cache: what is kept gives way, the source of a fork last."""
    with tilebeam.load(models / "qwen2.gguf", "cpu", n_ctx=256, n_seq_max=4, **EXACT) as lm:
        scorer = scorers(lm)["value-head"]
        head = len(scorer._layout.head(QUESTION))
        beams: list[list[str]] = [["the of and to in is that for\n"] * 2, ["as was with be by on not he\n"] * 2]
        with scorer.session():
            while True:
                rated = scorer.score_steps([QUESTION] * 2, beams)
                length = head + sum(len(scorer._layout.step(s, False)) + 1 for s in beams[0])
                if length > 200:
                    break
                beams = [[*b, f"step {len(b)} is the last but the number\n"] for b in beams]
            long = [*beams[0], "and " * ((250 - length) // 2)]
            rated += scorer.score_steps([QUESTION], [long])
        for steps, scores in zip([*beams, long], rated, strict=True):
            np.testing.assert_allclose(scores, by_hand(scorer, QUESTION, steps), atol=1e-4)


def test_aggregates_and_outcomes(lm: LM) -> None:
    text = "the first step\nthe second step\nthe last"
    candidate = CompletionOutput(0, text, [], "stop", 0)
    expected = {"last": lambda s: s[-1], "min": min, "prod": np.prod, "mean": np.mean}
    steps = scorers(lm)["value-head"].score_steps([QUESTION], [["the first step\n", "the second step\n", "the last"]])
    for name, function in expected.items():
        scorer = scorers(lm, aggregate=name)["value-head"]
        assert scorer.score(QUESTION, [candidate]) == [pytest.approx(function(steps[0]), abs=1e-5)]
    whole = scorers(lm, outcome=True, aggregate="min")["value-head"]
    want = by_hand(whole, QUESTION, ["the first step\n", "the second step\n", "the last"])
    (rating,) = whole.rate([QUESTION], [[candidate]])
    assert rating.scores == [pytest.approx(want[-1], abs=1e-4)]
    assert rating.usage.scored_tokens == rating.usage.full_scoring_tokens  # the end only, in one go
    # A text without steps is rated, too: its score need not be lower than others'.
    (empty,) = whole.score(QUESTION, [CompletionOutput(0, "", [], "stop", 0)])
    assert empty == pytest.approx(by_hand(whole, QUESTION, [""])[0], abs=1e-4)


def test_each_prompt_pays_for_its_own_texts(lm: LM) -> None:
    """Two prompts rated in one go cost what each costs alone: neither gets a share of the other's tokens."""
    for outcome in (False, True):
        scorer = scorers(lm, outcome=outcome)["value-head"]
        prompts = [" ".join([QUESTION] * 4), "how many people have been"]
        groups = [
            [CompletionOutput(i, f"{w} step\nis {w}", [], "stop", 0) for i, w in enumerate(words)]
            for words in (WORDS[:2], WORDS[2:8])
        ]
        together = scorer.rate(prompts, groups)
        for rating, prompt, group in zip(together, prompts, groups, strict=True):
            (alone,) = scorer.rate([prompt], [group])
            for kind in ("scored_tokens", "full_scoring_tokens"):
                assert getattr(rating.usage, kind) == getattr(alone.usage, kind)
            assert rating.usage.scored_tokens > 0
        twice = scorer.rate([prompts[0]] * 2, [groups[0]] * 2)
        assert twice[1].usage == Usage()  # of equal texts the first pays
        assert twice[0].scores == twice[1].scores


def test_models_with_a_sliding_window_share_beginnings_too(windowed: LM) -> None:
    """Their sequences can only be forked where they end: the common beginnings are kept before it is too late."""
    long = " ".join([QUESTION] * 8)
    texts = [f"{start} {chr(65 + i)} is it" for start in ("now " * 20, "so " * 20) for i in range(5)]
    candidates = [CompletionOutput(i, text, [], "stop", 0) for i, text in enumerate(texts)]
    for scorer in scorers(windowed).values():
        (rating,) = scorer.rate([long], [candidates])
        scores = rating.scores
        tokens = [ids for text in texts for ids, _ in scorer._texts(long, (text,), True)]
        assert len(scorer._layout.head(long)) > 128
        beginnings = {tuple(ids[:n]) for ids in tokens for n in range(1, len(ids) + 1)}
        # Each beginning once, but for those that are too short to wait for.
        assert len(beginnings) <= rating.usage.scored_tokens <= len(beginnings) + 16 * len(texts)
        alone = [scorer.score(long, [c])[0] for c in candidates]
        np.testing.assert_allclose(scores, alone, atol=1e-4)
        assert len(set(scores)) == len(scores)


def test_what_cannot_be_rated_is_refused(lm: LM) -> None:
    with pytest.raises(TilebeamError, match=r"it must be one"):
        TokenReward(lm, tag="?", good="no single token at all")
    with pytest.raises(TilebeamError, match="same token"):
        TokenReward(lm, tag="?", good="1", bad="1")
    with pytest.raises(TilebeamError, match="no tokens"):
        TokenReward(lm, tag="")
    with pytest.raises(TilebeamError, match="belongs to another model"):
        HeadReward(lm, heads(64)["value"])
    with pytest.raises(TilebeamError, match="larger n_ctx"):
        scorers(lm)["value-head"].score_steps([QUESTION], [["the of " * 3000]])
    with pytest.raises(TilebeamError, match="aggregate"):
        TokenReward(lm, tag="?", good="1", bad="2", aggregate="median")  # type: ignore[arg-type]
    # Nothing of that spoilt the model.
    assert scorers(lm)["token"].score_steps([QUESTION], [["the end"]])[0][0] > 0


def test_steps_without_tokens_are_rated_where_they_stand(lm: LM) -> None:
    """Empty lines of a format that strips them and has no tag: the verdict is that on what stands before."""
    scorer = HeadReward(lm, heads(lm.n_embd)["value"], format=RewardFormat(strip="\n"))
    (scores,) = scorer.score_steps([QUESTION], [["the end\n", "\n", "\n", "is it"]])
    assert scores[0] == scores[1] == scores[2] != scores[3]
    want = heads(lm.n_embd)["value"](lm.hidden([QUESTION + "the end"], [[-1]])[0].hidden)
    assert scores[0] == pytest.approx(want[0], abs=1e-4)
    assert scorer.score_steps([QUESTION], [["\n"]])[0] == pytest.approx(
        heads(lm.n_embd)["value"](lm.hidden([QUESTION], [[-1]])[0].hidden), abs=1e-4
    )
    with pytest.raises(TilebeamError, match="nothing to read"):
        list(_Empty(lm, RewardFormat(strip="\n"))._texts("", ("\n",), False))


def test_a_solution_that_is_too_long_is_refused_where_it_becomes_so(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind is not looked at, and memory grows with the steps, not with their square."""
    with tilebeam.load(models / "qwen2.gguf", "cpu", n_ctx=512, n_seq_max=2, **EXACT) as lm:
        for outcome in (False, True):
            scorer = scorers(lm, outcome=outcome)["token"]
            asked: list[str] = []
            step = scorer._layout.step
            monkeypatch.setattr(
                scorer._layout, "step", lambda text, first, s=step, a=asked: a.append(text) or s(text, first)
            )
            with pytest.raises(TilebeamError, match="larger n_ctx"):
                scorer.score_steps([QUESTION], [["the of number two "] * lm.n_ctx])
            assert len(asked) < lm.n_ctx / 2
        with pytest.raises(TilebeamError, match=rf"{lm.n_ctx + 1} steps"):
            scorers(lm)["value-head"].score_steps([QUESTION], [[""] * (lm.n_ctx + 1)])

        def peak(steps: int) -> int:
            tracemalloc.start()
            assert len(next(_Empty(lm, RewardFormat(tag="?"))._texts("", ("",) * steps, False))[1]) == steps
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return found

        assert peak(400) < 1 << 18


class _Empty(RewardModel):
    """Without a head, as for a model that adds no BOS token."""

    def __init__(self, lm: LM, form: RewardFormat) -> None:
        super().__init__(lm, form)
        self._layout.head = lambda _: []  # type: ignore[method-assign]

    def _read(self, texts: Any, positions: Any) -> Any:
        raise NotImplementedError

    def _verdicts(self, reading: Any) -> Any:
        raise NotImplementedError


def test_values_that_are_no_numbers_are_an_error(lm: LM) -> None:
    class Broken(HeadReward):
        def _verdicts(self, reading: Any) -> Any:
            return np.full(len(reading.hidden), np.nan)

    with pytest.raises(TilebeamError, match="not numbers"):
        Broken(lm, heads(lm.n_embd)["value"], format=RewardFormat(tag="?")).score_steps(["the"], [["end"]])


# --- text -------------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer over letters; "<x>" is a control token, and a space goes before every text, as in SentencePiece."""

    bos = 1

    def __init__(self, prefix: bool = True) -> None:
        self.prefix = prefix

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        tokens = [self.bos] if add_special else []
        for i, part in enumerate(text.split("<x>") if parse_special else [text]):
            tokens += [2] if i else []
            tokens += [ord(c) for c in (" " if self.prefix and part and i == 0 else "") + part]
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t) for t in tokens if t > 2)


def shown(tokens: Sequence[int]) -> str:
    return "".join({1: "<s>", 2: "<x>"}.get(t, chr(t)) for t in tokens)


def test_a_layout_is_the_text_that_the_model_was_trained_on() -> None:
    form = RewardFormat(head="<x>user {prompt}<x>\n", first=" {step}", step="\n{step}", tag=" ки", strip="\n")
    layout = Layout(Letters(), form)  # type: ignore[arg-type]
    tokens = layout.head(Prompt("<x>", question="WHAT? <X>")) + layout.step("one\n", True) + layout.tag
    tokens += layout.step("\ntwo <x>\n", False) + layout.tag
    # The placeholders' control tokens are spelled out, so 2 appears for the format's own only.
    assert shown(tokens) == "<s> <x>user WHAT? <X><x>\n one ки\ntwo <x> ки".replace("<s> <x>", "<s><x>")
    assert [i for i, t in enumerate(tokens) if t == 2] == [1, shown(tokens).index("<x>\n") - 4]


def test_a_plain_prompt_is_taken_as_the_model_takes_it() -> None:
    layout = Layout(Letters(), RewardFormat(tag="?"))  # type: ignore[arg-type]
    assert shown(layout.head("<x>hi")) == "<s><x>hi"
    assert layout.head("<x>hi")[1] == 2
    assert layout.head(Prompt("a", question="<x>hi"))[1] != 2  # a user's
    bos = Layout(Letters(prefix=False), RewardFormat(head="{prompt}\n", tag="\n", bos=True))  # type: ignore[arg-type]
    assert bos.head("hi") == [1, *map(ord, "hi\n")]  # not twice


@pytest.mark.parametrize("form", [{"head": "no"}, {"step": "{step}{step}"}, {"first": ""}])
def test_formats_without_their_placeholder_are_refused(form: dict[str, str]) -> None:
    with pytest.raises(TilebeamError, match="once"):
        RewardFormat(**form)


def test_a_solution_cannot_spell_the_tag(lm: LM) -> None:
    """ "</s>" is a control token of the model; in a step it is text."""
    form = RewardFormat(head="question {prompt} ", tag="</s>")
    scorer = TokenReward(lm, good="1", bad="2", format=form)
    layout = scorer._layout
    assert layout.tag == [lm.eos]
    assert lm.eos not in layout.step("so </s> it is", True)
    assert lm.eos not in layout.head("so </s> it is")
    (scores,) = scorer.score_steps([QUESTION], [["so </s> it is", "the end"]])
    assert len(scores) == 2
