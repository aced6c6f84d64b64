"""A reward adapter: it rates as the model does that was loaded with it, beside a generator that stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tilebeam
from cli_kit import ok
from lora_kit import write_adapter
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.scoring.adapter_reward import AdapterReward
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.reward_heads import load_head
from tilebeam.scoring.reward_model import HeadReward

from bench.lib.synth import preset, write_model

CONFIG = preset("tiny", arch="qwen2", type="q8_0", n_layer=3)
SIZES: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "threads": 1, "lookup": False}
PROMPT, TEXTS = "what is 7 and 8?", ["15\n", "7 and 8\nare 15", "no"]
WEIGHTS = np.random.default_rng(3).normal(0, 0.1, CONFIG.n_embd).astype(np.float32)


def head_of(w: gguf.GGUFWriter) -> None:
    w.add_array("reward.weights", WEIGHTS.tolist())
    w.add_float32("reward.bias", 0.25)


def made(tmp_path: Path, more: Callable[[gguf.GGUFWriter], object] = head_of, **changes: Any) -> tuple[Path, Path]:
    write_model(model := tmp_path / "model.gguf", CONFIG)
    return model, write_adapter(tmp_path / "adapter.gguf", model, matrices=("attn_v", "ffn_down"), more=more, **changes)


@pytest.fixture(params=["cpu", "npu"])
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LM, Path, Path]]:
    model, adapter = made(tmp_path)
    with tilebeam.load(model, request.param, **SIZES) as lm:
        yield lm, model, adapter


def test_it_rates_as_the_model_with_the_adapter_does(files: tuple[LM, Path, Path]) -> None:
    lm, model, adapter = files
    ids = lm.tokenize(PROMPT)
    before = lm.logits(ids)
    scorer = RewardSpec(None, head=adapter).open(lm)
    assert isinstance(scorer, AdapterReward)
    drawn = lm.generate([PROMPT], SamplingParams(n=3, max_tokens=12, seed=2))[0].outputs
    found = [scorer.rate_text(PROMPT, text) for text in TEXTS]
    rating = scorer.rate([PROMPT], [drawn])[0]
    assert rating.usage.scored_tokens > 0
    texts = [
        *(ids + lm.tokenize(t, add_special=False, parse_special=False) for t in [*TEXTS, *(c.text for c in drawn)]),
        ids + lm.tokenize("7 and 8\n", add_special=False),
    ]
    with tilebeam.load(model, lm.device, lora=adapter, **SIZES) as other:
        states = [r.hidden[0] for r in other.hidden(texts, [[len(t) - 1] for t in texts])]
        plain = HeadReward(other, load_head(adapter), outcome=True).rate_text("what is", " 7")
        assert 0 < plain.score < 1
    *wanted, beginning = 1 / (1 + np.exp(-(np.stack(states) @ WEIGHTS + 0.25)))
    np.testing.assert_allclose([f.score for f in found] + rating.scores, wanted, atol=0.02)
    assert len(set(np.round(wanted, 3))) > 3
    assert found[1].scores == pytest.approx([beginning, wanted[1]], abs=0.02)
    assert found[0].steps == ["15\n"]
    assert np.array_equal(lm.logits(ids), before)  # the generator is what it was


def test_nothing_cannot_be_rated(files: tuple[LM, Path, Path]) -> None:
    lm, _, adapter = files
    nothing = tilebeam.Prompt("", token_ids=())
    with pytest.raises(TilebeamError, match="nothing to rate: prompt and text are empty"):
        RewardSpec(None, head=adapter).open(lm).score_steps([nothing], [[""]])


def test_its_context_shares_the_weights_and_ends_with_the_model(files: tuple[LM, Path, Path]) -> None:
    lm, _, adapter = files
    with RewardSpec(None, head=adapter).open(lm) as scorer:
        beside = scorer.lm
    assert beside is lm.beside(adapter)
    assert beside is not lm
    assert beside._model is lm._model
    assert beside.info.tiled_tensors == lm.info.tiled_tensors
    assert beside.generate(["a"], SamplingParams(max_tokens=2))  # closing the scorer leaves it
    lm.close()
    with pytest.raises(TilebeamError, match="closed"):
        beside.logits([3])


def test_searches_take_it(files: tuple[LM, Path, Path]) -> None:
    lm, model, adapter = files
    common = ("-m", model, "-p", PROMPT, "-N", "4", "-n", "12", "-s", "1", "-dev", lm.device, "--reward-head", adapter)
    for command in (("vote", "--extract", "text"), ("best-of-n",), ("beam", "--step-stop", "7"), ("adaptive",)):
        found = json.loads(ok(*command, *common, "--json").out)
        assert found["usage"]["scored_tokens"] > 0
    (model.parent / "items.jsonl").write_text('{"prompt": "the cat", "answer": "1"}\n')
    work = ["eval", "-m", model, "--task", f"jsonl:{model.parent}/items.jsonl", "--budget", 2, "--device", lm.device]
    work += ["--method", "best-of-n,beam", "--seeds", 1, "-n", 6, "-t", 1, "--reward-head", adapter]
    report = json.loads(ok(*work, "--out", model.parent / "eval", "--json").out)
    assert {r["series"] for r in report["accuracy"]} >= {"best-of-n[logprob]", "best-of-n[adapter]", "beam[adapter]"}
    scorer = RewardSpec(None, head=adapter).open(lm)
    full = SamplingParams(n=1, max_tokens=lm.n_ctx, ignore_eos=True)
    drawn = lm.generate([PROMPT], full)[0].outputs
    assert len(drawn[0].token_ids) + len(lm.tokenize(PROMPT)) == lm.n_ctx
    assert 0 < scorer.rate([PROMPT], [drawn])[0].scores[0] < 1  # of a text that filled the context


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda w: w.add_string("reward.weights", "many"), r"weights and its bias are not float32"),
        (lambda w: w.add_array("reward.weights", [1, 2]), r"weights and its bias are not float32"),
        (lambda w: w.add_array("reward.weights", WEIGHTS.tolist()), r"weights and its bias are not float32"),
        (lambda w: (w.add_array("reward.weights", [1.5] * 8), w.add_float32("reward.bias", 0.0)), "for another model"),
        (lambda w: (head_of(w), w.add_string("reward.model.shape", "9 layers")), "for another model: 9 layers"),
        (lambda w: w.add_array("reward.weights", [float("nan")] * CONFIG.n_embd), "not float32"),
        (
            lambda w: (
                w.add_array("reward.weights", [float("nan")] * CONFIG.n_embd),
                w.add_float32("reward.bias", 0.0),
            ),
            "not numbers",
        ),
        (lambda _: None, "not a reward head"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(more: Any, words: str, tmp_path: Path) -> None:
    model, adapter = made(tmp_path, more)
    with tilebeam.load(model, "cpu", **SIZES) as lm, pytest.raises(TilebeamError, match=words):
        RewardSpec(None, head=adapter).open(lm)


def test_an_adapter_is_given_to_its_own_model_only(tmp_path: Path) -> None:
    model, adapter = made(tmp_path)
    with tilebeam.load(model, "cpu", **SIZES) as lm:
        with pytest.raises(TilebeamError, match="without --prm and --orm"):
            HeadReward(lm, load_head(adapter))
        write_model(other := tmp_path / "other.gguf", preset("tiny", arch="qwen2", type="q8_0", n_layer=1))
        with tilebeam.load(other, "cpu", **SIZES) as small, pytest.raises(TilebeamError, match="of another model"):
            AdapterReward(small, load_head(adapter))
