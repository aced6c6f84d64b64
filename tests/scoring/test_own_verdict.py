"""What a model leaves behind of its own texts, as scorers: self-certainty, and its verdict read behind each of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from gguf_kit import with_metadata
from tilebeam import (
    LM,
    BestOfN,
    CompletionOutput,
    Prompt,
    PTrue,
    SamplingParams,
    SelfConsistency,
    TailEntropy,
    TilebeamError,
)
from tilebeam.gguf import gguf_write as w
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.search import algorithms as methods

from bench.lib.synth import preset, write_model

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK = "right? "
BEHIND = f"</s>\n<user>{ASK}</s>\n<assistant>"
TALK = [{"role": "user", "content": "the question is how many times the number " * 4}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    base = write_model(tmp_path_factory.mktemp("model") / "m.gguf", preset("tiny", arch="llama", type="f32"))
    template = {"tokenizer.chat_template": w.kv_text("tokenizer.chat_template", TURNS)}
    path = with_metadata(base, base.with_name("chat.gguf"), template)
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=8, threads=1, **EXACT) as model:
        assert model.spelling(model.eos) == b"</s>"
        yield model


def probability(lm: LM, ids: list[int]) -> float:
    yes, no = (lm.tokenize(t, add_special=False)[0] for t in "12")
    row = lm.logits(ids)[-1].astype(np.float64)
    return float(1 / (1 + np.exp(row[no] - row[yes])))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("search", ["best-of-n", "vote"])
def test_one_question_is_read_behind_each_candidate(lm: LM, search: str, chat: bool) -> None:
    """On its own cells, in the template's turn where the prompt is a chat's."""
    verdict = PTrue(lm, question=ASK, good="1", bad="2")
    prompt = lm.chat_prompt(TALK) if chat else Prompt(TALK[0]["content"])
    votes = {"extract": "text", "weighting": "reward"} if search == "vote" else {}
    n = 4
    params = SamplingParams(seed=1, max_tokens=20, logit_bias={lm.eos: 4.0})
    result = methods.create(search, scorer=verdict, **votes).infer(lm, prompt, n, sampling=params)
    ended = [c.token_ids[-1] == lm.eos for c in result.candidates]
    assert any(ended)
    assert not all(ended)
    behind = lm.tokenize(BEHIND if chat else f"\n\n{ASK}", add_special=False)
    texts = [
        prompt.tokens(lm) + c.token_ids[: len(c.token_ids) - end] + behind
        for c, end in zip(result.candidates, ended, strict=True)
    ]
    assert result.scores == pytest.approx([probability(lm, ids) for ids in texts], abs=1e-4)
    assert result.usage.full_scoring_tokens == sum(map(len, texts))
    assert result.usage.scored_tokens <= n * (len(behind) + 1)  # and the last token, which decoding left out
    assert lm.figures().cells_used == 0


def test_a_candidate_that_fills_the_context_is_cut_for_the_question(lm: LM) -> None:
    long = CompletionOutput(0, "", [5] * (lm.n_ctx - 3), "length", 0)
    silent = CompletionOutput(1, "", [], "length", 0)
    ids, behind = lm.tokenize("a"), lm.tokenize(f"\n\n{ASK}", add_special=False)
    scores = PTrue(lm, question=ASK, good="1", bad="2").score("a", [long, silent])
    filled = ids + [5] * (lm.n_ctx - 1 - len(ids) - len(behind)) + behind
    assert scores == pytest.approx([probability(lm, filled), probability(lm, ids + behind)], abs=1e-4)


def test_certainty_rates_texts_and_weighs_votes(lm: LM) -> None:
    sampling = SamplingParams(seed=3, max_tokens=6)
    best = BestOfN("self-certainty").infer(lm, "so", 4, sampling=sampling)
    drawn = lm.generate("so", SamplingParams(n=4, seed=3, max_tokens=6, statistics=True))[0].outputs
    expected = [float(np.mean(c.certainties or [])) for c in drawn]
    assert best.scores == pytest.approx(expected, abs=1e-4)
    assert "certainties" not in best.as_dict()["candidates"][0]
    vote = SelfConsistency("text", weighting="borda", scorer="self-certainty").infer(lm, "so", 4, sampling=sampling)
    assert vote.scores == [1 + sum(other < own for other in expected) for own in expected]
    for name in ("self-certainty", "tail-entropy"):
        with pytest.raises(TilebeamError, match="statistics=True"):
            named_scorer(name).score("so", [CompletionOutput(0, "a", [1], "stop", 0)])
    tail = TailEntropy(window=2).score("so", drawn)
    assert tail == pytest.approx([-float(np.mean((c.entropies or [])[-2:])) for c in drawn])
    assert TailEntropy().score("so", [CompletionOutput(0, "", [], "length", 0, entropies=[])]) == [0]


def test_by_name(lm: LM) -> None:
    assert isinstance(named_scorer("p-true", lm), PTrue)
    with pytest.raises(TilebeamError, match="p-true needs a model"):
        methods.create("best-of-n", scorer="p-true")
    with pytest.raises(TilebeamError, match="begin with the same token"):
        PTrue(lm, good="1", bad="1")
