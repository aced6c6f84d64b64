"""Draft heads of models with recurrent layers: llama.cpp computes their batches in another order, and guesses are taken
back by decoding again from a copy of the state. Models of llama.cpp's test-llama-archs, as in test_recurrent_models.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT, states_behind
from head_kit import PARAMS, TOKENS, check_guesses, write_head
from tilebeam import TilebeamError
from tilebeam.engine.speculation import StepCosts
from tilebeam.native import batch_order, llama

from bench.lib.synth import preset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "archs"))
import run as archs

# Hybrid ones, of which Nemotron-H names its layers' outputs otherwise, and one without attention.
NAMES = ("qwen35-dense", "lfm2-dense", "nemotron_h-dense", "mamba2-dense")
TEXT = [5 + 7 * i % 90 for i in range(60)]
PROMPTS = [TEXT, [*TEXT[:40], 9, 8], [7]]
OPTIONS: dict[str, Any] = {"n_ctx": 2048, "threads": 1, "n_seq_max": 8, **EXACT}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "|".join(name.rpartition("-")[0] for name in NAMES)
    return {path.stem: path for path in archs.save(f"^({names})$", tmp_path_factory.mktemp("models"))}


@pytest.fixture(scope="module")
def head(models: dict[str, Path]) -> Path:
    shape = preset("tiny", n_embd=256, n_vocab=128)
    return write_head(models[NAMES[0]].parent / "head.gguf", shape, TOKENS, layers=(0, 0, 0))


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "of", lambda *_: 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_layers_are_in_the_order_of_the_batch(models: dict[str, Path], name: str) -> None:
    """Of texts of several lengths, in several orders, in one graph and in many, also where all hidden states are
    wanted: each has the rows that it has alone."""
    texts = [[5, 6, 7, 8, 9, 10, 11], [7], [9, 3, 4, 1], [12, 13, 14, 15]]
    n = sum(map(len, texts))
    for n_ubatch in (64, 5, 3):
        options = OPTIONS | {"n_batch": 64, "n_ubatch": n_ubatch}
        with tilebeam.load(models[name], "cpu", hidden_layer=0, **options) as lm, lm.raw_decode() as context:
            alone, tap = np.concatenate([states_behind(lm, text) for text in texts]), context.taps
            assert tap is not None
            for ids, whole in product(((0, 1, 2, 3), (3, 0, 2, 1), (2, 3, 0, 1)), (False, True)):
                context.output_hidden(whole)
                context.fill([(id, 0, text, len(text)) for id, text in zip(ids, texts, strict=True)])
                tap.start(n)
                lm.check_decode(context.decode(n))
                tap.stop()
                context.clear()
                np.testing.assert_allclose(tap.rows((0,)), alone, rtol=1e-3, atol=1e-3 * np.abs(alone).max())


@pytest.mark.parametrize(("name", "device", "n"), [(name, "npu", 1) for name in NAMES] + [(NAMES[0], "cpu", 4)])
def test_texts_are_those_without_it(models: dict[str, Path], head: Path, name: str, device: Any, n: int) -> None:
    params = [replace(PARAMS, n=n), replace(PARAMS, temperature=0)]
    found = list[list[Any]]()
    for draft in (None, head):
        with tilebeam.load(models[name], device, draft=draft, lookup=None if draft else False, **OPTIONS) as lm:
            outputs = [o for p in params for o in lm.generate(PROMPTS[: 8 // n], p)]
            found.append([[s.token_ids for s in o.outputs] for o in outputs])
            assert (lm.head is not None and lm.head.failed is None) == (draft is not None)
    assert found[0] == found[1]
    accepted, drafted = (sum(getattr(o.usage, f"{k}_tokens") for o in outputs) for k in ("accepted", "drafted"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", NAMES)
def test_it_guesses_as_for_the_text_read_at_once(models: dict[str, Path], head: Path, name: str) -> None:
    """Prompts that fork at snapshots of the state, and samples that go on from texts in the cache."""
    with tilebeam.load(models[name], "cpu", draft=head, **OPTIONS) as lm:
        outputs = check_guesses(lm, [PROMPTS, [[*TEXT, 3, 9], PROMPTS[1]], PROMPTS], replace(PARAMS, n=2))
        assert outputs[0].usage.cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_states_behind_a_layer(models: dict[str, Path], head: Path, name: str) -> None:
    """While a head guesses, prompts are read beside them, and right guesses are decoded twice."""
    with tilebeam.load(models[name], "cpu", hidden_layer=0, draft=head, **OPTIONS) as lm:
        outputs = lm.generate(PROMPTS, [replace(PARAMS, n=2, max_tokens=n, hidden=True) for n in (5, 12, 9)])
        assert sum(o.usage.accepted_tokens for o in outputs) > 0
        for prompt, sample in ((o.prompt_token_ids, s) for o in outputs for s in o.outputs):
            tokens = sample.token_ids[:-1]  # nothing is known behind the last one
            wanted = states_behind(lm, [*prompt, *tokens])[len(prompt) :].sum(0)
            assert sample.hidden is not None
            assert sample.hidden.count == len(tokens)
            np.testing.assert_allclose(sample.hidden.total, wanted, atol=2e-3 * np.abs(wanted).max())


def test_an_order_that_is_not_known(models: dict[str, Path], head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another llama.cpp made graphs of a batch in another way."""
    assert batch_order.places([1, 1, 0], 64, rising=False, alone=False).tolist() == [0, 2, 1]
    monkeypatch.setattr(llama, "places", lambda seq, *_, **__: np.arange(len(seq)))
    with pytest.raises(TilebeamError, match=r"cannot have a draft head: .* in an order that is not known"):
        tilebeam.load(models[NAMES[0]], "cpu", draft=head, **OPTIONS)
