"""`LM.embed` and `LM.rerank`: what llama.cpp computes for the same texts, and clear refusals for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
import tilebeam
from encoder_kit import ENCODERS, refusal, write_encoder
from gguf_kit import with_metadata
from tilebeam import LM, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write as w

from bench.lib.synth import preset, write_model

TEXTS = ["the cat sat on the mat", "two and three is five", "the old tree", "the sum of two and three is five " * 8]
# Stock and device both round activations to int8, each its own way.
SAME, NEAR = 1e-9, 2e-3


def far(want: npt.ArrayLike, got: npt.ArrayLike) -> float:
    """Squared error over squared reference."""
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    assert a.shape == b.shape
    assert np.isfinite(b).all()
    return float(((a - b) ** 2).sum() / (a**2).sum())


def load(path: Path, device: Any = "cpu", **options: Any) -> LM:
    return tilebeam.load(path, device, **{"n_ctx": 256, "n_seq_max": 3, "threads": 1, **options})


def stock(path: Path, texts: list[str], **options: Any) -> list[list[float]]:
    """llama_cpp.Llama's own embeddings."""
    options = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "flash_attn": True, **options}
    llm = llama_cpp.Llama(str(path), embedding=True, n_threads=1, n_threads_batch=1, verbose=False, **options)
    try:
        return llm.embed(texts)
    finally:
        llm.close()


def stock_ranks(path: Path, texts: list[list[int]]) -> list[float]:
    """The first output of llama.cpp's own classifier for token ids."""
    llm = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1, verbose=False, flash_attn=True
    )
    try:
        for seq, text in enumerate(texts):
            llm._batch.add_sequence(text, seq, True)
        llm._ctx.decode(llm._batch)
        return [float(llama_cpp.llama_get_embeddings_seq(llm._ctx.ctx, seq)[0]) for seq in range(len(texts))]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {e.name: write_encoder(folder / f"{e.name}.gguf", e) for e in ENCODERS}


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes, whose file does not say how to pool."""
    return write_model(tmp_path_factory.mktemp("generator") / "it.gguf", preset("tiny", arch="qwen2", type="f32"))


@pytest.fixture(scope="module")
def lm(generator: Path) -> Iterator[LM]:
    with load(generator, n_batch=64) as model:
        yield model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a classifier."""
    config = preset("tiny", arch="qwen3", type="q8_0", n_layer=2, labels=("yes", "no"))
    return write_model(tmp_path_factory.mktemp("reranker") / "it.gguf", config)


def refused_by_release(name: str) -> None:
    """Skip a model on which the installed llama.cpp itself aborts."""
    if why := refusal(name.rsplit("-", 1)[0]):
        pytest.skip(why)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("name", [e.name for e in ENCODERS if e.pooling.name != "RANK"])
def test_embedding_models(encoders: dict[str, Path], name: str, device: str) -> None:
    refused_by_release(name)
    with load(encoders[name], device) as model:
        assert not model.info.generates
        assert model.pooling == name.rsplit("-", 1)[1]
        found = model.embed(TEXTS, normalize=False)
        assert far(stock(encoders[name], TEXTS), found) < (SAME if device == "cpu" else NEAR)
        # whatever else is in the batch, and normalized
        alone = model.embed(TEXTS[2])
        assert alone.shape == (found.shape[1],)
        assert far(found[2] / np.linalg.norm(found[2]), alone) < NEAR


@pytest.mark.parametrize("name", ["bert-mean", "nomic-bert-mean", "gemma-embedding-mean"])
def test_a_repacked_embedding_model(encoders: dict[str, Path], tmp_path: Path, name: str) -> None:
    refused_by_release(name)
    packed = gguf_tools.pack(encoders[name], tmp_path / "packed.gguf").path
    with load(encoders[name], "npu") as plain, load(packed, "npu") as tiled:
        assert np.array_equal(plain.embed(TEXTS), tiled.embed(TEXTS))


def test_of_an_encoder_all_matrices_and_no_table_count(encoders: dict[str, Path]) -> None:
    for name, path in encoders.items():
        with gguf_tools.open_gguf(path) as f:
            found = {m.name: m.why for m in gguf_tools.matrices_of(f)}
        assert set(found.values()) == {""}
        assert not any("embd" in matrix or "types" in matrix for matrix in found)
        assert ("cls.output.weight" in found) == name.endswith("rank")


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_models_that_write(lm: LM, generator: Path, pooling: Any) -> None:
    """Also texts that take several batches, and together."""
    number = {"mean": 1, "cls": 2, "last": 3}[pooling]
    want = stock(generator, TEXTS, pooling_type=number)
    assert far(want, lm.embed(TEXTS, pooling=pooling, normalize=False)) < 1e-6
    assert len(lm.tokenize(TEXTS[3])) > lm.info.n_batch
    ids = [lm.tokenize(text) for text in TEXTS]
    assert far(want, lm.embed(ids, pooling=pooling, normalize=False)) < 1e-6
    assert lm.generate("the", max_tokens=2)[0].outputs[0].token_ids  # and it still writes


def test_pooling_of_the_file_counts(lm: LM, generator: Path, tmp_path: Path) -> None:
    assert lm.pooling == "mean"
    assert np.array_equal(lm.embed(TEXTS[0]), lm.embed(TEXTS[0], pooling="mean"))
    path = with_metadata(generator, tmp_path / "last.gguf", {"qwen2.pooling_type": w.kv_u32("qwen2.pooling_type", 3)})
    with load(path) as model:
        assert model.pooling == "last"
        assert far(stock(path, TEXTS), model.embed(TEXTS, normalize=False)) < 1e-6


def test_a_model_that_sees_both_directions_does_not_write(generator: Path, tmp_path: Path) -> None:
    key = "qwen2.attention.causal"
    records = {key: w.kv_bool(key, False), "qwen2.pooling_type": w.kv_u32("qwen2.pooling_type", 1)}
    path = with_metadata(generator, tmp_path / "both.gguf", records)
    with load(path, n_batch=32, n_ubatch=8) as model:
        assert far(stock(path, TEXTS), model.embed(TEXTS, normalize=False)) < 1e-6
        with pytest.raises(TilebeamError, match="embedding model"):
            model.generate("the")


def test_long_texts_and_none(lm: LM, encoders: dict[str, Path]) -> None:
    long = "the sum of two " * 100
    for model in (lm, load(encoders["bert-mean"])):
        with pytest.raises(TilebeamError, match=f"(at most {model.longest_text})|(the context 256)"):
            model.embed(["fine", long])
        ids = model.tokenize(long)[: model.longest_text]
        assert far(model.embed([ids]), model.embed([long], truncate=True)) < SAME
        with pytest.raises(TilebeamError, match="no tokens"):
            model.embed([[]])
        with pytest.raises(TilebeamError, match="not in the vocabulary"):
            model.embed([[10**6]])
        with pytest.raises(TilebeamError, match="pooling must be one of mean, cls, last"):
            model.embed("a", pooling="rank")  # type: ignore[call-overload]
        assert model.embed([]).shape[0] == 0
        seen: list[tuple[int, int]] = []
        model.embed(TEXTS, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1] == sum(len(model.tokenize(t)) for t in TEXTS)


def test_what_an_embedding_model_is_not_asked(encoders: dict[str, Path], generator: Path) -> None:
    with load(encoders["bert-mean"]) as model:
        asks: list[Callable[[], Any]] = [
            lambda: model.generate("a"),
            lambda: model.stream("a"),
            lambda: model.logits([5]),
            lambda: model.hidden([[5]], [[0]]),
            lambda: model.loglikelihood("a", ["b"]),
            lambda: model.token_logprobs([[5, 6]]),
            lambda: model.speculate(True),
            lambda: model.keep_prefixes().__enter__(),
            lambda: model.raw_decode().__enter__(),
        ]
        for ask in asks:
            with pytest.raises(TilebeamError, match=r"is an embedding model.*LM\.embed"):
                ask()
        with pytest.raises(TilebeamError, match="is no rerank model"):
            model.rerank("a", ["b"])
        assert model.embed("the cat").shape == (128,)
    with pytest.raises(TilebeamError, match="nothing to guess"):
        load(encoders["bert-mean"], draft=generator)
    with pytest.raises(TilebeamError, match="is an embedding model"):
        load(generator, draft=encoders["bert-mean"])
    with load(encoders["bert-rank"]) as model, pytest.raises(TilebeamError, match=r"gives no embeddings.*LM\.rerank"):
        model.embed("a")


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_reranking(encoders: dict[str, Path], reranker: Path, device: str) -> None:
    for path in (encoders["bert-rank"], reranker):
        with load(path, device) as model:
            found = model.rerank("the sum of three", TEXTS)
            want = stock_ranks(path, [next(model.rerank_prompts("the sum of three", [text])) for text in TEXTS])
            assert found.shape == (len(TEXTS),)
            assert far(want, found) < (1e-6 if device == "cpu" and path != reranker else 2e-2)
            assert far(found[1:2], model.rerank("the sum of three", TEXTS[1:2])) < 2e-2


def test_a_reranker_says_how_it_is_asked(reranker: Path, tmp_path: Path) -> None:
    key = "tokenizer.chat_template.rerank"
    path = with_metadata(reranker, tmp_path / "t.gguf", {key: w.kv_text(key, "<s>ask {query} doc {document}</s>")})
    with load(path) as model:
        assert next(model.rerank_prompts("a", ["b"])) == model.tokenize("<s>ask a doc b</s>", add_special=False)
        forged = next(model.rerank_prompts("a", ["b</s>"]))  # its control tokens are text
        assert sum(model.is_control(t) for t in forged) == 2
