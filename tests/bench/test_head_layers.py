"""bench.real.head_layers with a random model: states of all layers are kept, resumed and told apart, and fits find the
layer that tells what is right."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from gguf_kit import with_metadata
from tilebeam import TilebeamError
from tilebeam.gguf import gguf_write as w

from bench.lib import synth
from bench.real import head_layers

QUESTIONS, SAMPLES = 10, 2


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GSM8K's lines, and a log with samples of them by two models."""
    path = tmp_path / "gsm8k_test.jsonl"
    lines = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(QUESTIONS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(head_layers, "LOGS", tmp_path)
    score = {"correct": 1.0, "finish": "stop", "scores": {"logprob": -0.5}}
    samples = [{"text": "a b c d"[: 1 + 2 * i], **score} for i in range(SAMPLES + 1)]
    items = [{"id": str(i), "samples": samples} for i in range(QUESTIONS)]
    with lzma.open(tmp_path / "gsm8k-log.jsonl.xz", "wt") as log:
        print(json.dumps({"tilebeam_eval": 1}), file=log)
        for name in ("0.5B", "1.5B"):
            print(json.dumps({"unit": f"{name}/npu/samples@3/seed 1/0-9", "items": items[: 4 + len(name)]}), file=log)
    return path


def test_states_of_layers_are_taken_and_kept(problems: Path, tmp_path: Path) -> None:
    base = synth.write_model(tmp_path / "base.gguf", synth.preset("tiny", arch="qwen2"))
    key = "tokenizer.chat_template"
    template = w.kv_text(key, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    model = with_metadata(base, tmp_path / "tiny.gguf", {key: template})
    assert sorted(head_layers.kept_samples("0.5B")) == list(range(8))
    given = ("0.5B", model, problems, [0], SAMPLES, 3, tmp_path / "out")
    records, states, names = head_layers.collected(*given)
    assert names == ["l_out-0", "result_norm"]
    n_embd = (states.shape[2] - 6) // 3
    assert states.shape == (3 * SAMPLES, 2, 3 * n_embd + 6)
    assert [(r["unit"], r["row"]) for r in records] == [("0", 0), ("1", 2), ("2", 4)]
    mean, recent, last = np.split(states[0, 0, : 3 * n_embd], 3)  # of a text of one token
    np.testing.assert_array_equal(mean, last)
    np.testing.assert_allclose(recent, last, rtol=2e-3)
    assert not np.array_equal(states[0, 0], states[0, 1])  # what comes behind the last layer is something else
    assert np.isfinite(states).all()
    kept = tmp_path / "out" / "0.5B" / "1.npy"
    np.save(kept, np.zeros_like(np.load(kept)))
    again = head_layers.collected(*given)[1]  # nothing is read twice
    assert not again[2:4].any()
    np.testing.assert_array_equal(again[:2], states[:2])
    with pytest.raises(TilebeamError, match="of other layers"):
        head_layers.collected("0.5B", model, problems, [0, 1], SAMPLES, 3, tmp_path / "out")


def test_the_layer_that_knows_is_found() -> None:
    rng = np.random.default_rng(1)
    records, states = [], rng.normal(0, 1, (120, 2, 18)).astype(np.float16)
    for row in range(0, 120, 3):
        right = rng.integers(0, 2, 3)
        states[row : row + 3, 0, 8] = 3 * right - 1.5  # the last state's first element, behind layer 0
        samples = [{"correct": float(r), "states": 1} for r in right]
        records.append({"unit": str(row), "row": row, "samples": samples})
    rows = list(head_layers.measured(records, states, ["l_out-0", "result_norm"], 2))
    by_case = {(r["layer"], r["part"]): r["all"] for r in rows}
    assert by_case["0", "last"] > 0.95
    assert max(v for case, v in by_case.items() if case != ("0", "last")) < 0.75
    text = "\n".join(head_layers.table({"tiny": rows}))
    assert "| tiny | the final norm | " in text
