"""Training draft heads: texts are collected once and taken up again, the net is what llama.cpp runs, and a little
training makes a head that is right about a model's texts."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tilebeam
from cli_kit import Ran, record
from head_kit import write_head
from tilebeam import LM, Prompt, SamplingParams, TilebeamError
from tilebeam.cli.draft import DraftTextOptions
from tilebeam.engine.speculation import StepCosts
from tilebeam.folder_lock import alone_in
from tilebeam.gguf import open_gguf
from tilebeam.gguf.weights import tensor_values
from tilebeam.training import draft_texts
from tilebeam.training.draft_texts import TOP, DraftText, TextSetting, collect, texts_of

from bench.lib.synth import preset, write_model
from bench.tiny import arithmetic

CONFIG = preset("tiny", n_layer=5)
LAYERS = (0, 1, 3)
SETTING = TextSetting("model", "prompts", LAYERS, 8, 0.7, 1)
PROMPTS = [list(range(3, 12 + i % 3)) for i in range(5)]
SIZES: dict[str, Any] = {"device": "cpu", "n_ctx": 1024, "n_batch": 256, "n_seq_max": 4, "threads": 1}
MODELS = Path(__file__).resolve().parents[2] / "bench" / "tiny" / "models"
TINY = MODELS / "3.1m-q8_0.gguf"


@pytest.fixture
def lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LM]:
    monkeypatch.setattr(draft_texts, "_SHARD", 2)
    write_model(model := tmp_path / "model.gguf", CONFIG)
    head = write_head(tmp_path / "head.gguf", CONFIG, (5, 6), LAYERS)
    with tilebeam.load(model, draft=head, **SIZES) as lm:
        yield lm


def _probs(lm: LM, text: DraftText) -> Any:
    """Return the distributions from which a text's tokens were drawn."""
    logits = lm.logits(text.tokens.tolist())[text.start - 1 : -1].astype(np.float64)
    probs = np.exp(logits - logits.max(1, keepdims=True))
    return probs / probs.sum(1, keepdims=True)


def test_what_is_collected_is_what_the_model_computes(lm: LM, tmp_path: Path) -> None:
    done = list[int]()
    collect(lm, PROMPTS, tmp_path / "work", SETTING, done.append)
    assert done == [2, 2, 1]
    texts = texts_of(tmp_path / "work")
    assert [text.start for text in texts] == [9, 10, 11, 9, 10]
    for text in texts:
        ids = text.tokens.tolist()
        assert ids[: text.start] == list(range(3, 3 + text.start))
        assert len(ids) == text.start + SETTING.max_tokens or ids[-1] in lm._context.model.vocab.ends
        own = slice(text.start - 1, len(ids) - 1)  # what tokens of the text's own were drawn from
        probs = _probs(lm, text)
        assert text.ids.shape == (len(ids), TOP)
        np.testing.assert_allclose(np.take_along_axis(probs, text.ids[own], 1), text.probs[own], atol=2e-3)
        np.testing.assert_allclose(np.sort(probs, 1)[:, : -TOP - 1 : -1], text.probs[own], atol=2e-3)
        assert not text.probs[: text.start - 1].any()
        with lm.raw_decode() as context:
            context.fill([(0, 0, ids, len(ids))])
            lm.check_decode(context.decode(len(ids)))
            assert context.taps is not None
            rows = context.taps.rows(LAYERS)
            assert rows is not None
            np.testing.assert_allclose(rows[:-1], text.features[:-1], rtol=2e-3, atol=2e-2)
    greedy = [text for i, text in enumerate(texts) if i % 2]
    for text in greedy:
        assert (text.tokens[text.start :] == text.ids[text.start - 1 : -1, 0]).all()


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    whole, texts = tmp_path / "00000.npz", tmp_path / "00000.npy"
    np.save(texts, np.zeros((1, 4), np.float16))
    np.savez(whole, **{name: np.zeros(1, np.int32) for name in ("tokens", "ids", "probs", "lengths", "starts")})
    needed = whole.read_bytes().index(b"PK\x01\x02") + 6  # the version of zip
    for path, at in ((texts, texts.read_bytes().index(b"4)")), (whole, needed)):
        former = path.read_bytes()
        path.write_bytes(former[:at] + b"(" + former[at + 1 :])
        with pytest.raises(TilebeamError, match=r"00000\.npz is damaged"):
            texts_of(tmp_path)
        path.write_bytes(former)


def test_a_prompt_ends_where_its_line_does(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\u2028b\n\nc\x0cd\r\n", encoding="utf-8")
    found = DraftTextOptions(text=[tmp_path / "p.txt"]).prompts(lm)
    assert found == [lm.tokenize(text) for text in ("a\u2028b", "c\x0cd")]


def test_prompts_longer_than_a_batch_and_more_than_have_room(lm: LM, tmp_path: Path) -> None:
    """A prompt is read in parts, and what has no room waits: eight texts of 300 tokens, in 1024 cells."""
    prompts = [[3 + (i * j) % 200 for j in range(290)] for i in range(1, 9)]
    collect(lm, prompts, tmp_path / "work", SETTING, lambda _: None)
    texts = texts_of(tmp_path / "work")
    assert [text.tokens[: text.start].tolist() for text in texts] == prompts
    for text in texts:
        own = slice(text.start - 1, len(text.tokens) - 1)
        wanted = np.take_along_axis(_probs(lm, text), text.ids[own], 1)
        np.testing.assert_allclose(wanted, text.probs[own], atol=4e-2)  # cells in another order, of long prompts


def test_a_killed_collection_goes_on(lm: LM, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def dies(_: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        collect(lm, PROMPTS, tmp_path / "work", SETTING, dies)
    first = tmp_path / "work" / "00000.npz"
    written = first.stat().st_mtime_ns
    (tmp_path / "work" / "00001.npy").write_bytes(b"of a shard that was never whole")
    collect(lm, PROMPTS, tmp_path / "work", SETTING, lambda _: None)
    assert first.stat().st_mtime_ns == written
    assert len(texts_of(tmp_path / "work")) == 5
    with pytest.raises(TilebeamError, match="use another --work"):
        collect(lm, PROMPTS, tmp_path / "work", TextSetting("other", "prompts", LAYERS, 8, 0.7, 1), dies)
    (tmp_path / "work" / "setting.json").write_bytes(b'{"model')
    with pytest.raises(TilebeamError, match="use another --work"):
        collect(lm, PROMPTS, tmp_path / "work", SETTING, dies)
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(TilebeamError, match=r"00000\.npz is damaged .* delete it"):
        texts_of(tmp_path / "work")


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch", reason="PyTorch is not installed (pip install tilebeam[train])")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="module")
def trained(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A head of the arithmetic world's largest model, and the reports of its first second and of a longer run."""
    assert torch
    from tilebeam.training import draft_fit

    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 20)  # a step takes as long everywhere
    folder = tmp_path_factory.mktemp("trained")
    questions, out = folder / "questions.txt", folder / "head.gguf"
    questions.write_text("\n".join(arithmetic.draw_many(0, "train", 128)))
    fixed = ("draft", "train", "-m", TINY, "--text", questions, "-n", 48, "--vocab", 64, "--ff", 64, "-t", 1, "-o", out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_fit, "time", clock)
        return out, [record(*fixed, "--minutes", minutes) for minutes in (0.01, 0.35)]


def test_training_goes_on_and_gets_better(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    out, (early, late) = trained
    assert early["steps"] < 15 < 400 < late["steps"]  # of the same checkpoint
    assert late["accepted"] > early["accepted"] + 0.3
    assert late["coverage"] == 1
    assert min(late["right_by_depth"]) > 0.3
    assert json.loads((out.with_suffix(".work") / "setting.json").read_text())["max_tokens"] == 48


def test_the_net_is_what_llama_cpp_runs(torch: Any, trained: tuple[Path, list[dict[str, Any]]]) -> None:
    """Chains of three guesses from several places of a text: the same tokens, with the same probabilities."""
    from tilebeam.training.draft_fit import DEPTH

    out, folder = trained[0], trained[0].with_suffix(".work")
    fit = _fit_of(trained, folder / "checkpoint.pt")
    with torch.no_grad(), open_gguf(out) as file:  # the net as it was written, in Q4_0
        for name, parameter in fit.net.named_parameters():
            tensor = file.tensors[name if name.startswith(("fc.", "output")) else f"blk.0.{name}"]
            parameter.copy_(torch.from_numpy(tensor_values(file, tensor)).reshape(parameter.shape))
        fit.net.fc.weight.mul_(fit.net.scale)
    text = next(text for text in texts_of(folder) if len(text.tokens) > 24)
    embedded, features = (torch.from_numpy(x) for x in _inputs(fit, text))
    with torch.no_grad():
        states = fit.net.chain(embedded, features)
        probs = [torch.softmax(fit.net.output(fit.net.output_norm(s[0])), -1).numpy() for s in states]
    with tilebeam.load(TINY, "cpu", n_ctx=256, n_seq_max=1, threads=1, draft=out) as lm, lm.raw_decode() as context:
        assert lm.head is not None
        for at in range(6, 20, 3):
            ids = text.tokens[: at + 1].tolist()
            context.fill([(0, 0, ids, 1)])
            lm.check_decode(context.decode(len(ids)))
            lm.head._fuse(list(lm.head._followed.values()))
            known, token = lm.head._followed[0], int(text.tokens[at + 1])
            span = (0, known.decoded, [*ids[known.decoded + 1 :], token], known.states[known.decoded :])
            for depth in range(DEPTH):
                ((guess, p, state),) = lm.head.guess([span])
                wanted = probs[depth][at + depth]
                assert p == pytest.approx(wanted.max(), abs=0.03)
                if np.sort(wanted)[-2] < wanted.max() - 0.05:
                    assert guess == fit.tokens[wanted.argmax()]
                if guess != text.tokens[at + depth + 2]:
                    break  # the net's chain goes on with the text's token
                span = (0, at + depth + 1, [guess], [state])
            context.clear()


def _fit_of(trained: tuple[Path, list[dict[str, Any]]], checkpoint: Path, vocab: int = 64) -> Any:
    from tilebeam.training.draft_fit import Fit, ModelWeights

    return Fit(ModelWeights(TINY, 64), texts_of(trained[0].with_suffix(".work")), vocab, checkpoint)


def test_the_loss_is_cross_entropy(torch: Any) -> None:
    """With its gradient, in parts of rows and over the last part."""
    from tilebeam.training.draft_fit import _ROWS, _SparseCrossEntropy

    torch.manual_seed(1)
    z = torch.randn(_ROWS + 9, 16, requires_grad=True)
    weight, ids = torch.randn(50, 16), torch.stack([torch.randperm(50)[:5] for _ in range(_ROWS + 9)])
    probs = torch.softmax(torch.randn(_ROWS + 9, 5), -1)
    loss, hits = _SparseCrossEntropy.apply(z, weight, ids, probs)
    (2 * loss).backward()
    same = z.detach().requires_grad_()
    logits = same @ weight.T
    wanted = -(probs * torch.log_softmax(logits, -1).gather(-1, ids)).sum()
    (2 * wanted).backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    np.testing.assert_allclose(z.grad, same.grad, rtol=1e-4, atol=1e-5)
    likeliest = ids.gather(-1, probs.argmax(-1, keepdim=True))[:, 0]
    assert int(hits) == int((logits.argmax(-1) == likeliest).sum())


def test_batches_without_any_token_of_the_head(trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """They teach nothing, and do not make the weights NaN."""
    fit = _fit_of(trained, tmp_path / "checkpoint.pt")
    fit._places[:] = -1
    fit.run(1e-3, lambda *_: None)
    assert fit.steps == 1
    assert all(bool(parameter.isfinite().all()) for parameter in fit.net.parameters())


def test_a_loss_that_is_no_number(trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    fit = _fit_of(trained, tmp_path / "checkpoint.pt")
    fit.net.fc.weight.data[:] = float("nan")
    with pytest.raises(TilebeamError, match=r"step 0 is no number: delete .*checkpoint\.pt"):
        fit.run(1, lambda *_: None)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_checkpoints_that_cannot_be_taken_up(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (trained[0].with_suffix(".work") / "checkpoint.pt").read_bytes()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(TilebeamError, match="delete it to train anew"):
        _fit_of(trained, path)
    path.write_bytes(kept)
    with pytest.raises(TilebeamError, match="of a head of other texts or sizes"):
        _fit_of(trained, path, vocab=32)
    fit = _fit_of(trained, path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint\.pt"):
        fit.save()
    assert path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]


def _inputs(fit: Any, text: Any) -> tuple[Any, Any]:
    embedded = fit._embeddings[fit._embedding_of[text.tokens[1:]]]
    return embedded[None], text.features[None, :-1].astype(np.float32)


def test_texts_are_those_without_the_head(
    trained: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "of", lambda *_: 1.0)  # a row more costs nothing, so that it is asked
    prompts = [Prompt(p) for p in arithmetic.draw_many(3, "test", 6)]
    params = SamplingParams(temperature=0, max_tokens=48)
    with tilebeam.load(TINY, "cpu", n_ctx=1024, n_seq_max=4, threads=1, draft=trained[0]) as lm:
        guessed = [lm.generate([p], params)[0] for p in prompts]
        lm.use_drafter(None)
        plain = [lm.generate([p], params)[0] for p in prompts]
    assert [o.outputs[0].text for o in guessed] == [o.outputs[0].text for o in plain]
    accepted, tokens = (sum(getattr(o.usage, f"{kind}_tokens") for o in guessed) for kind in ("accepted", "completion"))
    assert accepted / tokens > 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "head.bin"), "should end in .gguf"),
        (("-o", "head.gguf", "--ff", "33"), "no multiple of 32"),
        (("-o", "head.gguf", "-m", MODELS / "0.1m-q8_0.gguf"), "4 layers or more"),
        (("-o", "head.gguf", "-m", MODELS / "hybrid-q8_0.gguf"), "a multiple of 64"),
    ],
)
def test_what_cannot_be_trained(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    assert torch
    monkeypatch.chdir(tmp_path)
    model = () if "-m" in arguments else ("-m", TINY)
    Ran("draft", "train", *model, *arguments).fails_with(message)


def test_a_work_folder_that_another_run_has(torch: Any, tmp_path: Path) -> None:
    assert torch
    arguments = ("draft", "train", "-m", TINY, "-o", tmp_path / "head.gguf", "--work", tmp_path)
    with alone_in(tmp_path, ValueError()):
        Ran(*arguments).fails_with(f"Another tilebeam draft train works in {tmp_path}: ")
    assert "Give prompts" in Ran(*arguments).err  # the lock is free again
