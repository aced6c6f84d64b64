"""Reasoners of other families than `llama`: a hybrid, whose state cannot be cut, and a mixture of experts.

What tests of random models see of samples, forks, snapshots and guesses must hold for texts that are worth something:
right answers, found as often on the device as on llama.cpp's stock CPU backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import Count, check_engine
from tilebeam import LM, SamplingParams, SelfConsistency
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.request import Sample
from tiny_kit import arithmetic, references

from bench import tiny_world

PROBLEMS = arithmetic.draw_many(11, "test", 40)
PROMPTS = [p + "\n" for p in PROBLEMS]
GREEDY = SamplingParams(temperature=0, max_tokens=96)
FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=96, seed=5)


@pytest.fixture(scope="module", params=[references.HYBRID, references.MIXTURE])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LM, LM]]:
    """A model on the device and on the stock backend."""
    path, options = references.file_of(request.param, "q8_0"), {"n_ctx": 4096, "n_seq_max": 32, "threads": 1}
    with tilebeam.load(path, "npu", **options) as lm, tilebeam.load(path, "cpu", **options) as stock:
        yield lm, stock


def texts(lm: LM, prompts: Sequence[Any] = PROMPTS, params: SamplingParams = GREEDY) -> list[str]:
    return [o.outputs[0].text for o in lm.generate(prompts, params)]


def solved(found: Sequence[str]) -> float:
    return float(np.mean([arithmetic.is_right(p, t) for p, t in zip(PROBLEMS, found, strict=True)]))


def test_it_reasons_and_the_device_writes_what_stock_writes(pair: tuple[LM, LM]) -> None:
    """Rounding in other places may turn a close choice: then the stock model's logits say that it was one."""
    lm, stock = pair
    ours, theirs = texts(lm), texts(stock)
    assert min(solved(ours), solved(theirs)) > 0.45
    for prompt, a, b in zip(PROMPTS, ours, theirs, strict=True):
        if a != b:
            tokens, others = (stock.tokenize(prompt + text) for text in (a, b))
            at = next(i for i, (x, y) in enumerate(zip(tokens, others, strict=False)) if x != y)
            logits = stock.logits(tokens[:at])[-1]
            assert abs(logits[tokens[at]] - logits[others[at]]) < 0.5
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 3


def test_votes_read_a_prompt_once_and_are_as_right_as_samples(
    pair: tuple[LM, LM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, _ = pair
    count = Count(lm, monkeypatch)
    results = SelfConsistency(arithmetic.answer).run(lm, PROMPTS, 16, sampling=FREE)
    prompts = sum(len(lm.tokenize(p)) for p in PROMPTS)
    assert count.tokens <= prompts + sum(len(c.token_ids) for r in results for c in r.candidates)
    single = np.mean([arithmetic.is_right(r.prompt.strip(), c.text) for r in results for c in r.candidates])
    voted = np.mean([arithmetic.is_right(r.prompt.strip(), r.best.text) for r in results])
    assert 0.35 < single < voted


def test_texts_go_on_where_others_stood(pair: tuple[LM, LM]) -> None:
    """Snapshots and cells of a prompt that was read, and forks in the middle of a solution, give a text read anew."""
    lm, _ = pair
    want = texts(lm)
    with lm.keep_prefixes():
        texts(lm, PROMPTS[:12], FREE)
        first = lm.generate(PROMPTS[:12], GREEDY)
        assert all(o.usage.prompt_tokens - o.usage.cached_tokens == 1 for o in first)
        assert [o.outputs[0].text for o in first] == want[:12]
        prompts = [lm.tokenize(p) + o.outputs[0].token_ids[:5] for p, o in zip(PROMPTS, first, strict=False)]
        steps = lm.generate(prompts, GREEDY)
        assert [lm.detokenize(p[-5:]) + o.outputs[0].text for p, o in zip(prompts, steps, strict=True)] == want[:12]
        check_engine(lm.engine)


class Script(Drafter):
    """Guesses the texts of a list, but some characters wrong."""

    def __init__(self, lm: LM, known: Sequence[str]) -> None:
        self.known = {p: lm.tokenize(t, add_special=False) for p, t in zip(PROMPTS, known, strict=True)}
        self.rng = np.random.default_rng(3)

    def propose(self, asked: Sequence[tuple[Sample, int]], rows: int) -> list[list[int]]:  # noqa: ARG002
        drafts = []
        for sample, most in asked:
            at = len(sample.tokens)
            draft = self.known[sample.request.prompt][at : at + min(most, int(self.rng.integers(0, 9)))]
            drafts.append([260 + int(self.rng.integers(0, 13)) if self.rng.random() < 0.2 else t for t in draft])
        return drafts


@pytest.mark.parametrize("together", [1, 4])
def test_guesses_change_no_text(pair: tuple[LM, LM], together: int) -> None:
    lm, _ = pair
    want = texts(lm)
    try:
        lm.use_drafter(Script(lm, want))
        accepted = 0
        for at in range(0, 20, together):
            outputs = lm.generate(PROMPTS[at : at + together], GREEDY)
            assert [o.outputs[0].text for o in outputs] == want[at : at + together]
            assert sum(o.usage.drafted_tokens for o in outputs) > 0
            accepted += sum(o.usage.accepted_tokens for o in outputs)
        assert accepted > 100
        check_engine(lm.engine)
    finally:
        lm.speculate()


def test_accuracy_by_samples_is_measured_into_a_document(tmp_path: Any) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\n<!-- families: begin -->\n<!-- families: end -->\n")
    rows = tiny_world.families(6, 1)
    assert [row["model"] for row in rows] == list(tiny_world.FAMILIES)
    assert all(row["pass"][1] <= row["pass"][16] for row in rows)
    tiny_world.families_into(rows, 6, document)
    assert f"| hybrid | pass@k (bound) | {100 * rows[1]['pass'][1]:.1f} | " in document.read_text()
