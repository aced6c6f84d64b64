"""Draft heads: they follow the model's sequences through forks and cuts, guess what they would guess for the whole text
read at once, and change no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from head_kit import PARAMS, TOKENS, check_guesses, write_head
from tilebeam import LM, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.engine import draft_head
from tilebeam.engine.speculation import MOST_WITH_HEAD, StepCosts
from tilebeam.model import head_file, hub
from tilebeam.model.head_file import model_mark
from tilebeam.native import head_contexts
from tilebeam.native.layer_tap import LayerTap

from bench.lib.synth import preset, write_model

CONFIG = preset("tiny", n_layer=5)
PROMPTS = [list(range(5, 25)), [*range(5, 20), 400, 401], [7]]
OPTIONS: dict[str, Any] = {"n_ctx": 4096, "threads": 1, "n_seq_max": 16, **EXACT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(path := tmp_path_factory.mktemp("models") / "model.gguf", CONFIG)
    return path


@pytest.fixture(scope="module")
def head(model: Path) -> Path:
    return write_head(model.parent / "head.gguf", CONFIG, TOKENS)


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth guessing follows measured time: here a row more never costs any, so that runs are alike."""
    monkeypatch.setattr(StepCosts, "of", lambda *_: 1.0)


@contextmanager
def loaded(model: Path, device: Any, head: Path | None) -> Iterator[LM]:
    with tilebeam.load(model, device, draft=head, lookup=None if head else False, **OPTIONS) as lm:
        yield lm


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kept", [(256, 128), (6, 4)])  # texts are longer than the second
def test_texts_are_those_without_it(
    model: Path, head: Path, device: Any, n: int, kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head, "_WAITING", kept[0])
    monkeypatch.setattr(draft_head, "LAST", kept[1])
    params, prompts = replace(PARAMS, n=n), PROMPTS[: MOST_WITH_HEAD // n]
    with loaded(model, device, None) as lm:
        plain = lm.generate(prompts, params)
    with loaded(model, device, head) as lm:
        guessed = lm.generate(prompts, params)
        assert lm.head is not None
        assert lm.head.failed is None
    assert [[s.token_ids for s in o.outputs] for o in guessed] == [[s.token_ids for s in o.outputs] for o in plain]
    accepted, drafted = (sum(getattr(o.usage, f"{k}_tokens") for o in guessed) for k in ("accepted", "drafted"))
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize("sequences", [16, 3])
def test_it_guesses_as_for_the_text_read_at_once(
    model: Path, head: Path, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the head has few sequences they give way to others, and are decoded again."""
    monkeypatch.setattr(head_file, "_SEQUENCES", sequences)
    with loaded(model, "cpu", head) as lm:
        check_guesses(lm, [PROMPTS, [[*PROMPTS[0], 400, 9], PROMPTS[1]]], replace(PARAMS, n=2))


def test_a_head_of_another_model(model: Path, tmp_path: Path) -> None:
    """It says so itself: sizes fit. In other types, or repacked, a model is still the same."""
    write_model(other := tmp_path / "other.gguf", replace(CONFIG, seed=5))
    write_model(q8 := tmp_path / "q8.gguf", CONFIG, "q8_0")
    repacked = tmp_path / "repacked.gguf"
    gguf_tools.pack(model, repacked)
    marks = [model_mark(path) for path in (model, q8, repacked, other)]
    assert marks[0] == marks[1] == marks[2] != marks[3]
    own = write_head(tmp_path / "head.gguf", CONFIG, TOKENS, mark=marks[0])
    with loaded(q8, "cpu", own) as lm:
        assert lm.head is not None
    with pytest.raises(TilebeamError, match=r"trained for another model .*tilebeam draft train"):
        loaded(other, "cpu", own).__enter__()


def test_a_damaged_head(model: Path, head: Path, tmp_path: Path) -> None:
    whole, cut = head.read_bytes(), tmp_path / "cut.gguf"
    for length in (10, 500, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:length])
        with pytest.raises(TilebeamError, match=r"cut\.gguf"):
            loaded(model, "cpu", cut).__enter__()


def test_models_and_libraries_that_cannot_have_a_head(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LayerTap, "rows", lambda *_: None)
        with pytest.raises(TilebeamError, match="no outputs of the model's layers"):
            loaded(model, "cpu", head).__enter__()
    monkeypatch.setattr(head_contexts, "available", lambda: False)
    with pytest.raises(TilebeamError, match="no functions to run"):
        loaded(model, "cpu", head).__enter__()


def test_a_head_that_fails_costs_no_text(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(model, "cpu", None) as lm:
        plain = lm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids
    decode, left = head_contexts.HeadContexts.decode, iter(range(9))

    def fails_late(self: head_contexts.HeadContexts, n: int, *outputs: int) -> Any:
        if next(left, None) is None:
            raise TilebeamError("llama.cpp failed to decode with the draft head.")
        return decode(self, n, *outputs)

    with loaded(model, "cpu", head) as lm:
        monkeypatch.setattr(head_contexts.HeadContexts, "decode", fails_late)
        with pytest.warns(RuntimeWarning, match="guesses nothing any more"):
            assert lm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids == plain
        assert lm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids == plain


def test_a_head_of_nan_costs_no_text(model: Path, tmp_path: Path) -> None:
    """What it would guess is no token, and llama.cpp ends the process that decodes such."""
    nan = np.full((len(TOKENS), CONFIG.n_embd), np.nan, np.float32)
    head = write_head(tmp_path / "head.gguf", CONFIG, TOKENS, tensors={"output.weight": nan})
    with loaded(model, "cpu", None) as lm:
        plain = lm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids
    with loaded(model, "cpu", head) as lm:
        with pytest.warns(RuntimeWarning, match="its logits are not numbers"):
            assert lm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids == plain
        assert lm._context.follower is None  # layers' outputs are copied no more


def test_rows_that_wait_do_not_keep_batches(model: Path, head: Path) -> None:
    """The states of one sequence are a view of its own rows, whatever was read beside it."""
    with loaded(model, "cpu", head) as lm, lm.raw_decode() as context:
        context.fill([(0, 0, [5, 6], 1), (1, 0, list(range(5, 105)), 1)])
        lm.check_decode(context.decode(102))
        assert lm.head is not None
        row = lm.head._followed[0].features[0]
        assert row.base is not None
        assert len(row.base) == 2
        context.clear()


def test_a_head_of_the_hub(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "local_file", lambda name: str(head) if name == "hf://me/head" else name)
    with tilebeam.load(model, "cpu", draft="hf://me/head", **OPTIONS) as lm:
        assert lm.head is not None


def test_no_lookup_and_a_head_exclude_each_other(model: Path, head: Path) -> None:
    with pytest.raises(TilebeamError, match="with a head, texts are looked up, too"):
        tilebeam.load(model, "cpu", draft=head, lookup=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 2}, "one layer"),
        ({"attention__head_count": 0}, "head_count is 0"),
        ({"attention__head_count_kv": 3}, "no divisor of 2 heads"),
        ({"attention__head_count_kv": [1]}, "needs the metadata eagle3.attention.head_count_kv"),
        ({"rope__dimension_count": 3}, "rope.dimension_count is 3"),
        ({"target_layers": ["a", "b", "c"]}, "three target_layers"),
        ({"target_layers": [1, 2, -1]}, "three target_layers"),
        ({"target_layers": 1}, "needs the metadata eagle3.target_layers"),
        ({"tensors": {"d2t": np.zeros(3)}}, "d2t must hold whole numbers of 64 bits"),
        ({"tensors": {"output.weight": np.zeros(CONFIG.n_embd, np.float32)}}, "as many numbers in d2t"),
        ({"tensors": {"d2t": np.array([1, 2, -1])}}, "tokens of its vocabulary in d2t"),
        (
            {"tensors": {"token_embd.weight": np.zeros((8, CONFIG.n_embd), np.float32)}},
            "token embeddings for its vocabulary",
        ),
        ({"target_hidden_size": 64}, "fc.weight"),
        ({"vocab_size": 77}, "tokens of its vocabulary in d2t"),
        ({"layers": (0, 1)}, "three target_layers"),
        ({"layers": (0, 1, 4)}, "at least 6 layers"),
        ({"vocab_size": 5000}, "is a draft head for a model of"),
    ],
)
def test_heads_that_do_not_fit(model: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """llama.cpp would end the process, or read what is not there."""
    file = write_head(tmp_path / "head.gguf", CONFIG, TOKENS, **changes)
    with pytest.raises(TilebeamError, match=message), loaded(model, "cpu", file):
        pass


def test_hidden_states_are_those_without_it(model: Path, head: Path) -> None:
    """The tap serves both: another layer's states for the samples, the head's layers for the head."""
    params = replace(PARAMS, hidden=True, max_tokens=12)
    found = []
    for draft in (None, head):
        options = OPTIONS | {"hidden_layer": 3, "lookup": None if draft else False}
        with tilebeam.load(model, "cpu", draft=draft, **options) as lm:
            found.append(lm.generate([PROMPTS[0]], params)[0].outputs[0])
    (plain, other) = (one.hidden for one in found)
    assert found[0].token_ids == found[1].token_ids
    assert plain is not None
    assert other is not None
    assert plain.count == other.count
    np.testing.assert_allclose(other.total, plain.total, rtol=1e-4, atol=1e-4)
