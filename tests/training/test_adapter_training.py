"""Training reward adapters: the layers are those that llama.cpp runs, what is written rates as what was trained, and a
little training tells right texts from wrong ones on problems that it did not learn from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tilebeam
from cli_kit import Ran, record
from tilebeam import TilebeamError
from tilebeam.cli import reward_adapter
from tilebeam.scoring.adapter_reward import AdapterReward
from tilebeam.scoring.own_reward import maker_of
from tilebeam.scoring.reward_heads import load_head

from bench.lib.synth import preset, write_model
from bench.tiny import arithmetic

TINY = Path(__file__).resolve().parents[2] / "bench" / "tiny" / "models" / "3.1m-q8_0.gguf"
TEXTS = ["12 and 7\nare 19", "a", "it is no number at all"]
PROMPT = "what is 12 and 7?"


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch", reason="PyTorch is not installed (pip install tilebeam[train])")
    module.set_num_threads(1)
    return module


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_what_was_trained_is_what_rates(arch: Any, torch: Any, tmp_path: Path) -> None:
    from tilebeam.training.adapter_fit import AdapterFit, ModelBody, Problem, _Frame, _normed

    write_model(path := tmp_path / "model.gguf", preset("tiny", arch=arch, type="f32", n_layer=4))
    body = ModelBody(path)
    body.type = torch.float32
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=4, threads=1, lookup=False, type_k="f32", type_v="f32") as lm:
        texts = [lm.tokenize(text, add_special=False, parse_special=False) for text in TEXTS]
        one = Problem(lm.tokenize(PROMPT), texts, [1.0, 0.0, 0.0])
        fit = AdapterFit(body, [one, replace(one, samples=texts[:1])], [False, False], tmp_path / "fit", 1)
        fit.read(lambda *_: None)
        whole = [one.prompt + text for text in texts]
        wanted = np.stack([r.hidden[0] for r in lm.hidden(whole, [[len(t) - 1] for t in whole])])
        with torch.no_grad():
            frame = _Frame(one, body)
            x = fit._lower[0]
            for layer in fit._layers:
                x = layer(x, frame)
            ends = _normed(x[frame.prompt :], fit._norm, body.eps)[frame.ends].numpy()
            np.testing.assert_allclose(ends, wanted, atol=5e-3)
            for name, parameter in fit._layers.named_parameters():  # as if it had been trained
                parameter.normal_(std=0.1 if name.endswith("b") else parameter.shape[1] ** -0.5)
            fit.head.weight.normal_(std=0.3)
        again = AdapterFit(body, [one, one], [False, False], tmp_path / "other", 1)
        again.read(lambda *_: None)
        assert again.judge(0) == [0.0] * 3
        fit.write(tmp_path / "adapter.gguf", maker_of(lm), 2.0, 0.5)
        logits = 2 * np.array(fit.judge(0)) + 0.5
        with AdapterReward(lm, load_head(tmp_path / "adapter.gguf")) as scorer:
            found = [scorer.rate_text(PROMPT, text).score for text in TEXTS]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=5e-3)
    assert np.ptp(found) > 0.05
    assert fit.judge(1) == pytest.approx(fit.judge(0)[:1], abs=1e-4)  # samples do not see each other


def test_a_killed_training_goes_on(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch
    from tilebeam.training import adapter_fit
    from tilebeam.training.adapter_fit import AdapterFit, ModelBody, Problem

    write_model(path := tmp_path / "model.gguf", preset("tiny", arch="qwen2", type="f32", n_layer=4))
    body = ModelBody(path)
    body.type = torch.float32
    some = [Problem([1, 2, i], [[5, 6], [7, i, 9], [8]], [1.0, 0.0, float(i % 2)]) for i in range(3, 8)]
    monkeypatch.setattr(adapter_fit, "_CHECKPOINT", 0.0)

    class Killed(BaseException):
        pass

    def dies(step: int, *_: Any) -> None:
        if step == 4:  # of 6
            raise Killed

    found = []
    for name, progress in (("whole", lambda *_: None), ("killed", dies), ("killed", lambda *_: None)):
        fit = AdapterFit(body, some, [False] * 4 + [True], tmp_path / name, 1)
        assert fit.steps == (3 if found[1:] else 0)
        fit.read(lambda *_: None)
        try:
            fit.run(3, progress)
        except Killed:
            found.append([])
            continue
        found.append([logit for i in range(5) for logit in fit.judge(i)])
    assert found[2] == pytest.approx(found[0], abs=1e-6)
    assert np.ptp(found[0]) > 1e-3
    with pytest.raises(TilebeamError, match=r"of other samples.*delete it"):
        AdapterFit(body, some[:4], [False] * 4, tmp_path / "killed", 1)
    fit.clean()
    assert not list(tmp_path.glob("killed*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems whose samples are right where a line has a 7."""
    made = tmp_path_factory.mktemp("adapter")
    problems = arithmetic.draw_many(0, "train", 60)
    (made / "items.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in problems))
    (made / "seven.py").write_text("def check(item, text):\n    return '7' in text\n")
    return made


def arguments(folder: Path) -> list[Any]:
    found = ["reward", "adapter", "-m", TINY, "--task", f"jsonl:{folder}/items.jsonl", "--samples", 6, "-n", 40]
    return [*found, "--checker", f"{folder}/seven.py:check", "-t", 1, "--no-chat", "-o", folder / "adapter.gguf"]


def test_it_learns_which_texts_are_right(torch: Any, folder: Path) -> None:
    assert torch
    report = record(*arguments(folder), "--epochs", 8)
    assert report["problems"] == 12
    assert report["auroc"]["the adapter"]["all"] > 0.7
    assert report["auroc"]["log-probability"]["all"] < 0.6
    assert not list(folder.glob("*.lower*")) + list(folder.glob("*.pt"))
    prompt, texts = "3*4+5=", ["12+5=\n17\n", "11+5=\n16\n"]
    with tilebeam.load(TINY, n_ctx=512, n_seq_max=2, threads=1) as lm:
        scorer = AdapterReward(lm, load_head(folder / "adapter.gguf"))
        seven, six = (scorer.rate_text(prompt, text).score for text in texts)
        assert seven > six
        assert scorer.head.maker == maker_of(lm)


def test_what_cannot_be_trained_is_refused(torch: Any, folder: Path, tmp_path: Path) -> None:
    assert torch
    Ran(*arguments(folder)[:-1], tmp_path / "adapter.bin").fails_with("should end in .gguf")
    write_model(gemma := tmp_path / "gemma.gguf", preset("tiny", arch="gemma3", type="f32", n_layer=2))
    Ran(*(gemma if a == TINY else a for a in arguments(folder))).fails_with("families llama, qwen2, qwen3")
    mixture = preset("tiny", arch="llama", type="f32", n_layer=2, n_expert=4, n_expert_used=2)
    write_model(experts := tmp_path / "experts.gguf", mixture)
    Ran(*(experts if a == TINY else a for a in arguments(folder))).fails_with("without experts")


def test_the_seed_is_that_of_the_intervals_too() -> None:
    """As --help says. What is trained is played: a list of logits."""
    rng = np.random.default_rng(0)
    right, problem = (rng.random(40) < 0.5).astype(float), np.arange(40) // 4
    facts = [{"finish": "stop", "logprob": -1.0, "tokens": 1}] * 40
    samples: Any = SimpleNamespace(problem=problem, correct=right, records=facts)
    logits = right + rng.normal(size=40)
    fit: Any = SimpleNamespace(read=lambda _: None, run=lambda *_: None, judge=lambda i: logits[problem == i].tolist())
    found = [reward_adapter._fit(fit, samples, [True] * 10, 1, seed)[0]["auroc"]["the adapter"] for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0]["all"] == found[2]["all"]
    assert found[0]["all_interval"] != found[2]["all_interval"]
