"""Guessing ahead by look-up and by a draft model: texts are those without it, what is guessed right saves steps, and
what does not pay stops."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, equal_logits, separate_logits
from tilebeam import LM, RequestOutput, SamplingParams, TilebeamError
from tilebeam.engine.drafter import PassTimes, classed
from tilebeam.engine.request import Request, Sample
from tilebeam.engine.speculation import Balance, Chances, Speculation, StepCosts
from tilebeam.outputs import Progress

from bench.lib import gemma
from bench.lib.synth import preset, write_model

CHAIN = [(5 + 97 * i) % 1024 for i in range(1024)]  # what separate_logits writes after token 5
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
# Texts of three tokens: what was guessed from others is right now and then.
FEW = SamplingParams(max_tokens=40, temperature=1, top_k=0, top_p=1, seed=3, ignore_eos=True)
OPTIONS: dict[str, Any] = {"n_ctx": 4096, "threads": 1, **EXACT}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return separate_logits(tmp_path_factory.mktemp("models") / "chain.gguf")


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf")


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth guessing follows measured time: here a row more never costs any, so that runs are alike."""
    monkeypatch.setattr(StepCosts, "of", lambda *_: 1.0)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [s.token_ids for o in outputs for s in o.outputs]


def only(n: int, bias: float = 1e4) -> dict[int, float]:
    return dict.fromkeys(range(100, 100 + n), bias)


@pytest.mark.parametrize(("device", "n"), [("cpu", 1), ("cpu", 4), ("npu", 1), ("npu", 16)])
def test_look_up_saves_steps_and_changes_no_text(chain: Path, device: Any, n: int) -> None:
    prompts = [[*CHAIN[:80], 900, *CHAIN[:4]], [7, 8, 9]]
    params = replace(GREEDY, n=n)
    with tilebeam.load(chain, device, n_seq_max=16, lookup=False, **OPTIONS) as lm:
        plain, steps = lm.generate(prompts, params), sum(lm.figures().batches.values())
    with tilebeam.load(chain, device, n_seq_max=16, lookup=True, **OPTIONS) as lm:
        outputs = lm.generate(prompts, params)
        assert texts(outputs) == texts(plain)
        assert outputs[0].usage.accepted_tokens >= 0.9 * outputs[0].usage.drafted_tokens > 40 * n
        if n == 1:
            assert lm.generate(prompts[:1], params)[0].usage.accepted_tokens > 50
        assert not lm.engine.kv.live
        assert sum(lm.figures().batches.values()) < 1.9 * steps
        off = lm.generate(prompts, replace(params, speculate=False))
        assert texts(off) == texts(plain)
        assert sum(o.usage.drafted_tokens for o in off) == 0


def test_few_samples_are_looked_up_unasked(chain: Path) -> None:
    """With `lookup=None`: four samples are, five are not until one ends."""
    prompt = [*CHAIN[:80], 900, *CHAIN[:4]]
    with tilebeam.load(chain, "cpu", n_seq_max=8, **OPTIONS) as lm:
        few, many = (lm.generate(prompt, replace(GREEDY, n=n))[0] for n in (4, 5))
        assert few.usage.accepted_tokens > 4 * 40
        assert many.usage.drafted_tokens == many.usage.drafting_seconds == 0
        assert texts([few]) == texts([many])[:4]
        both = lm.generate([prompt, prompt], [replace(GREEDY, n=4), replace(GREEDY, max_tokens=9)])
        assert both[0].usage.accepted_tokens > 4 * 30  # once the fifth has ended
        lm.speculate(lookup=True)
        assert lm.generate(prompt, replace(GREEDY, n=5))[0].usage.accepted_tokens > 5 * 40


def test_draws_are_distributed_as_the_model_says(tmp_path: Path) -> None:
    """Of texts with guesses: each token's share of all draws is its probability, summed over the texts before them."""
    path = write_model(tmp_path / "m.gguf", preset("tiny", arch="llama", type="f32", n_layer=2))
    params = replace(FEW, n=200, max_tokens=8, logit_bias=only(3))
    with tilebeam.load(path, "cpu", n_seq_max=4, lookup=True, **OPTIONS) as lm:
        [output] = lm.generate([[5, 6]], params)
        assert output.usage.drafted_tokens > output.usage.accepted_tokens > 200
        expected = []
        for s in output.outputs:
            logits = lm.logits([5, 6, *s.token_ids])[1:-1, 100:103].astype(np.float64)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            expected.append(weights / weights.sum(axis=1, keepdims=True))
    p = np.concatenate(expected)
    drawn = np.array([t for s in output.outputs for t in s.token_ids]) - 100
    z = (np.bincount(drawn, minlength=3) - p.sum(0)) / np.sqrt((p * (1 - p)).sum(0))
    assert np.abs(z).max() < 4
    assert np.ptp(p.mean(0)) > 0.01  # the three are not equally likely, so that a wrong one would show


@pytest.mark.skipif(importlib.util.find_spec(gemma.PACKAGE) is None, reason="pip install 'tilebeam[models]'")
def test_greedy_texts_of_a_real_model() -> None:
    """gemma-3-270m at 1, 4 and 16 sequences: the same tokens, unless two logits are as near as rounding, with about the
    same log-probabilities (docs/seeds.md)."""
    words = [
        *("apple", "river", "stone", "cloud", "bread", "mouse", "light", "grass"),
        *("chair", "paper", "music", "green", "water", "horse", "north", "table"),
    ]
    prompts = [f"Twice the same list.\n1. {', '.join(words[i:] + words[:i])}\n2. {words[i]}," for i in range(16)]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=True)
    off: list[float] = []
    with tilebeam.load(gemma.model(), "npu", n_ctx=4096, n_seq_max=16, threads=2, lookup=False) as lm:
        first = lm.generate(prompts, params)
        plain, wanted = texts(first), [o.outputs[0].logprobs or [] for o in first]
        lm.speculate(lookup=True)
        for n in (1, 4, 16):
            outputs = lm.generate(prompts[:n], params)
            assert sum(o.usage.accepted_tokens for o in outputs) > 3 * n
            said = [o.outputs[0].logprobs or [] for o in outputs]
            each = zip(prompts, texts(outputs), plain, said, wanted, strict=False)
            for prompt, got, expected, logprobs, own in each:
                at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
                off += map(abs, np.subtract(logprobs[:at], own[:at]).tolist())
                if at is not None:
                    logits = lm.logits([*lm.tokenize(prompt), *got[:at]])[-1]
                    assert abs(logits[got[at]] - logits[expected[at]]) < 0.3
    assert np.mean(off) < 0.05
    assert max(off) < 0.5


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_draft_model_of_the_same_mind_is_always_right(chain: Path, device: Any) -> None:
    prompts = [[7, 8, 9], [*range(200, 260), 5], [*range(200, 260), 6]]
    params = replace(GREEDY, n=2)
    with tilebeam.load(chain, device, n_seq_max=4, lookup=False, **OPTIONS) as lm:
        plain = lm.generate(prompts, params)
    with tilebeam.load(chain, device, n_seq_max=4, draft=chain, **OPTIONS) as lm:
        for _ in range(2):
            outputs = lm.generate(prompts, params)
            assert texts(outputs) == texts(plain)
            for o in outputs:
                assert o.usage.accepted_tokens == o.usage.drafted_tokens > 60
        draft = drafter_of(lm).model
        assert draft is not None
        assert not draft.kv.live
        draft.context.decode = lambda _: 1  # type: ignore[method-assign]
        assert texts(lm.generate(prompts, params)) == texts(plain)  # without cells for guesses, too


def drafter_of(lm: LM) -> Speculation:
    drafter = lm.engine.scheduler.drafter
    assert isinstance(drafter, Speculation)
    return drafter


@pytest.mark.parametrize("form", [{"arch": "qwen2"}, {"arch": "gemma3", "swa": 8, "swa_pattern": 2}])
def test_a_draft_model_of_another_mind_changes_no_text(equal: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    """Many samples, few cells: prompts and samples come and go, and the draft's cache follows, windows as well."""
    other = write_model(tmp_path / "other.gguf", preset("tiny", type="f32", n_layer=2, **form))
    prompts, params = [[5, 6], [*range(300, 340), 9], [*range(300, 340), 8]], replace(FEW, n=6, logit_bias=only(2))
    options = OPTIONS | {"n_ctx": 256, "n_seq_max": 4}
    with tilebeam.load(equal, "cpu", lookup=False, **options) as lm:
        plain = lm.generate(prompts, params)
    with tilebeam.load(equal, "cpu", draft=other, **options) as lm:
        outputs = lm.generate(prompts, params)
        assert texts(outputs) == texts(plain)
        assert sum(o.usage.drafted_tokens for o in outputs) > 0
        model = drafter_of(lm).model
        assert model is not None
        assert not model.kv.live
        assert model.kv.free == 256
        with pytest.raises(RuntimeError, match="enough"):
            lm.generate(prompts, params, progress=_enough)  # cancelled: cells of both models are given back
        assert not model.kv.live
        assert not lm.engine.kv.live
        assert texts(lm.generate(prompts, params)) == texts(plain)


def test_a_draft_model_reads_no_prompt_that_a_short_text_does_not_pay_for(chain: Path) -> None:
    prompt = [*range(200, 500), 5]
    with tilebeam.load(chain, "cpu", n_seq_max=1, draft=chain, **OPTIONS) as lm:
        short, long = (lm.generate(prompt, replace(GREEDY, max_tokens=n))[0].usage for n in (60, 100))
        assert short.drafted_tokens == 0
        assert long.accepted_tokens == long.drafted_tokens > 50


def _enough(progress: Any) -> bool:
    if progress.tokens > 30:
        raise RuntimeError("enough")
    return True


def test_a_draft_model_that_does_not_fit_is_refused(equal: Path, tmp_path: Path) -> None:
    larger = write_model(tmp_path / "larger.gguf", preset("tiny", arch="llama", type="f32", n_vocab=1100))
    other = write_model(tmp_path / "words.gguf", preset("tiny", arch="llama", type="f32"))
    _respell(other, 700)
    with tilebeam.load(equal, "cpu", n_seq_max=2, draft=larger, **OPTIONS) as lm:  # padded behind the last token
        assert lm.generate([[5]], replace(GREEDY, max_tokens=5))
    with pytest.raises(TilebeamError, match="another vocabulary than the model: token 700 is "):
        tilebeam.load(equal, "cpu", n_seq_max=2, draft=other, **OPTIONS)
    with pytest.raises(TilebeamError, match=r"no such file|does not exist|No such file"):
        tilebeam.load(equal, "cpu", n_seq_max=2, draft=tmp_path / "missing.gguf", **OPTIONS)
    with pytest.raises(TilebeamError, match="lookup and a draft model exclude each other"):
        tilebeam.load(equal, "cpu", n_seq_max=2, draft=equal, lookup=True, **OPTIONS)


def _respell(path: Path, token: int) -> None:
    """Give one token of a synthetic vocabulary another text of the same length."""
    with tilebeam.load(path, "cpu", n_seq_max=1, **OPTIONS) as lm:
        spelling = lm.engine.vocab.spelling(token).strip().encode()
    data = path.read_bytes()
    assert data.count(spelling) == 1
    path.write_bytes(data.replace(spelling, spelling[:-1] + b"~"))


# --- what pays --------------------------------------------------------------------------------------------------------


def sample(tokens: list[int], prompt: list[int]) -> Sample:
    request = Request("", prompt, SamplingParams(), 0, Progress(), unfinished=1)
    request.samples = [Sample(request, 0, 0, tokens=tokens)]
    return request.samples[0]


def ask(s: Speculation, one: Sample, most: int = 8, rows: int = 1) -> list[int]:
    return s.propose([(one, most)], rows)[0]


class TestCosts:
    @pytest.fixture(autouse=True)
    def rows_cost_nothing(self) -> None:
        """Not here."""

    def test_between_measured_steps_lies_a_line(self) -> None:
        costs = StepCosts()
        assert costs.of(1) is None
        for rows, seconds in ((1, 1.0), (5, 3.0), (1, 9.0), (1, 1.0), (5, 3.0)):
            costs.add(rows, seconds)
        assert [costs.of(n) for n in (1, 5)] == pytest.approx([1.0, 1.4])  # the median; of five rows nothing is known
        costs.add(5, 3.0)
        assert [costs.of(n) for n in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
        assert (costs.of(7) or 0) > 3.0
        for _ in range(3):
            costs.add(4, 5.0)
        assert [costs.of(n) for n in (3, 4, 5)] == pytest.approx([7 / 3, 3.0, 3.0])  # as five rows take no longer
        costs.doubt(1)
        assert costs.of(5) == pytest.approx(1.4)

    def test_a_machine_that_slows_down_does_so_for_all_steps(self) -> None:
        """Measured at different speeds, a step of five tokens would seem to take more than four times one of one."""
        costs = StepCosts()
        for _ in range(9):
            costs.add(1, 1.0)
            costs.add(5, 1.5)
        for _ in range(9):
            costs.add(5, 4.5)
        assert [costs.of(n) for n in (1, 3, 5)] == pytest.approx([3.0, 3.75, 4.5])

    def test_slow_steps_of_the_first_guesses_are_not_believed_for_long(self) -> None:
        """Steps with guesses take ten times as long at the beginning only: behind a rest they are measured again."""
        s, one = Speculation(), sample([1, 2], [*range(1, 20), 50, 1])
        s._balance.lasting = True
        for step in range(150):
            found = ask(s, one)
            s.stepped(1 + len(found), 10.0 if found and step < 10 else 1.0, 0.02)
            if found:
                s.verified(one, len(found))
            s.rest()
        assert len(ask(s, one)) >= 4

    def test_a_model_whose_guesses_do_not_pay_is_seldom_asked(self) -> None:
        """What it is asked late, it has to read first; a row more takes half a step, and a guess is right at 5 %."""

        class Guessing:
            times = PassTimes()
            asked = 0

            def drafting(self, _: object) -> Guessing:
                self.asked += 1
                return self

            def ready(self, _: int) -> bool:
                return True

            def next(self, active: list[int]) -> list[tuple[int, int, float]]:
                return [classed(7, 0.01) for _ in active]

        s, model, one = Speculation(), Guessing(), sample([1, 2], [3])
        for rows in (1, 1, 1, 2, 2, 2):
            s.stepped(rows, 0.5 + 0.5 * rows, 0.0)
        for _ in range(400):
            s._ask_model(model, [(one, 4)], 1)  # type: ignore[arg-type]
        assert 3 <= model.asked <= 20

    def test_as_many_are_taken_as_pay(self) -> None:
        """A guess is right half the time, then a quarter ..: rows that are free are taken to the last, rows of half a
        step never."""
        for slope, least, most in ((0.0, 8, 8), (0.02, 2, 8), (0.6, 0, 0)):
            s, one = Speculation(), sample([1, 2], [*range(1, 20), 50, 1])
            for rows in 3 * [*range(1, 10)]:
                s.stepped(rows, 1 + slope * (rows - 1), 0.0)
            assert least <= len(ask(s, one)) <= most

    def test_what_is_always_wrong_stops_but_for_a_try_now_and_then(self) -> None:
        s, one = Speculation(), sample([1, 2], [*range(1, 20), 50, 1])
        drafted = 0
        for step in range(400):
            found = ask(s, one)
            s.stepped(1 + len(found), 1 + 0.1 * len(found), 0.0)
            if found:
                s.verified(one, 0)
                drafted += len(found) if step > 100 else 0
            for _ in range(s.rest()):
                pass
        assert 0 < drafted <= 300 / 24 + 1

    def test_what_becomes_right_is_taken_up_again(self) -> None:
        s, one = Speculation(), sample([1, 2], [*range(1, 20), 50, 1])
        for step in range(1500):
            found = ask(s, one)
            s.stepped(1 + len(found), 1 + 0.1 * len(found), 0.0)
            if found:
                s.verified(one, len(found) if step >= 300 else 0)
        assert len(ask(s, one)) >= 4

    def test_of_many_samples_the_likeliest_guesses_are_taken(self) -> None:
        s = Speculation()
        sure, unsure = sample([*range(1, 12)], [*range(1, 30), 77]), sample([40, 41], [60, 40, 41, 42, 43, 99])
        for rows in 3 * [*range(2, 20)]:
            s.stepped(rows, 1 + 0.2 * (rows - 2), 0.0)
        for _ in range(30):
            for one, found in zip((sure, unsure), s.propose([(sure, 8), (unsure, 8)], 2), strict=True):
                if found:
                    s.verified(one, len(found) if one is sure else 0)
        found = s.propose([(sure, 8), (unsure, 8)], 2)
        assert len(found[0]) >= 3
        assert len(found[1]) <= 1


def test_what_costs_time_in_vain_rests_longer_each_time() -> None:
    balance, asked = Balance(), []
    for step in range(4000):
        if balance.wakes():
            asked.append(step)
            balance.asked += 1
            balance.spent += 0.1
        balance.stepped += 1.0
        balance.look()
    late = [b for b in asked if b > 2000]
    assert 1 < len(late) < 0.2 * 2000
    cheap = Balance()
    for _ in range(1000):
        assert cheap.wakes()
        cheap.asked += 1
        cheap.spent += 0.005
        cheap.stepped += 1.0
        cheap.look()


def test_chances_follow_a_request_at_once_and_all_requests_slowly() -> None:
    chances, one, other = Chances(), sample([1], [2]).request, sample([1], [2]).request
    for _ in range(20):
        chances.learn(one, "sign", 0.8, False)
    assert chances.of(one, "sign", 0.8) < 0.1
    assert 0.3 < chances.of(other, "sign", 0.8) < 0.6
    assert chances.of(other, "another sign", 0.8) == 0.8
    chances.forget(one)
    assert chances.of(one, "sign", 0.8) == chances.of(other, "sign", 0.8)
