"""Embeddings and ranks: encoders without a causal mask, and pooling, on the device against the stock CPU backend.

`llama_cpp.Llama(embedding=True)` after `tilebeam.register()` is the interface. Everything runs in processes of its own:
`register` changes llama_cpp for all of a process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import process_kit
import pytest
from encoder_kit import ENCODERS, refusal, write_encoder
from tilebeam import gguf as gguf_tools

from bench.lib.synth import preset, write_model

TEXTS = ["the cat sat on the mat", "two and three is five", "the old tree", "the sum of two and three is five " * 8]

# For each file: what its texts give one by one through Llama, what they give in one batch, and the graph's splits.
WORKER = """
import ctypes, json, re, sys
import llama_cpp as lc
register, paths, texts, flash = json.loads(sys.argv[1])
if register:
    import tilebeam
    tilebeam.register()
lines = []
log = lc.llama_log_callback(lambda level, text, data: lines.append(text.decode(errors="replace")))
lc.llama_log_set(log, ctypes.c_void_p(0))
for path in paths:
    options = {"n_gpu_layers": -1 if register else 0, "n_threads": 1, "n_threads_batch": 1, "flash_attn": flash}
    llm = lc.Llama(path, embedding=True, n_ctx=256, n_batch=256, n_ubatch=256, verbose=True, **options)
    pooling = llm.pooling_type()
    rank = pooling == lc.LLAMA_POOLING_TYPE_RANK
    width = lc.llama_model_n_cls_out(llm.model) if rank else llm.n_embd()
    alone = [] if rank else [d["embedding"] for d in llm.create_embedding(texts)["data"]]
    params = lc.llama_context_params.from_buffer_copy(llm.context_params)
    params.n_seq_max, params.n_ctx, params.kv_unified = len(texts), 256, True
    lines.clear()
    context = lc.llama_init_from_model(llm.model, params)
    found = re.findall(r"splits = ([0-9]+)", "".join(lines))
    tokens = [(t, p, s) for s, text in enumerate(texts) for p, t in enumerate(llm.tokenize(text.encode()))]
    batch = lc.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
        batch.seq_id[i][0] = sequence
    assert lc.llama_decode(context, batch) == 0
    together = [lc.llama_get_embeddings_seq(context, s)[:width] for s in range(len(texts))]
    lc.llama_batch_free(batch)
    lc.llama_free(context)
    llm.close()
    print("RESULT", json.dumps([alone, together, int(found[-1])]))
"""


def embeddings(register: bool, *paths: Path, flash: bool = True, **environment: str) -> list[Any]:
    """(alone, together, splits) of each file; the first two shaped [texts, outputs]."""
    spec = json.dumps([register, [str(path) for path in paths], TEXTS, flash])
    done = process_kit.python(WORKER, spec, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [(np.array(alone), np.array(together), splits) for alone, together, splits in found]


def far(want: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Squared error over squared reference."""
    assert want.shape == got.shape
    assert np.isfinite(got).all()
    return float(((want - got) ** 2).sum() / (want**2).sum())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Encoders, and a decoder with a classifier as rerankers are made of, all in Q8_0."""
    folder = tmp_path_factory.mktemp("models")
    reranker = preset("tiny", arch="qwen3", type="q8_0", n_layer=2, labels=("yes", "no"))
    return {e.name: write_encoder(folder / f"{e.name}.gguf", e) for e in ENCODERS if not refusal(e.arch)} | {
        "qwen3-rank": write_model(folder / "qwen3-rank.gguf", reranker)
    }


@pytest.fixture(scope="module")
def stock(models: dict[str, Path]) -> dict[str, Any]:
    return dict(zip(models, embeddings(False, *models.values()), strict=True))


# Both round activations to int8, each its own way; a pool over one token averages nothing.
LIMIT = 2e-3


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "plain"])
def test_pooled_embeddings_are_those_of_the_stock_backend(
    models: dict[str, Path], stock: dict[str, Any], flash: bool
) -> None:
    found = embeddings(True, *models.values(), flash=flash)
    for name, (alone, together, splits) in zip(models, found, strict=True):
        want_alone, want_together, _ = stock[name]
        error = far(want_together, together)
        assert error < LIMIT, name
        assert (len(alone) == 0) == name.endswith("rank")
        if len(alone):
            assert far(want_alone, alone) < LIMIT, name
        # texts of a batch do not see each other
        assert far(together, alone if len(alone) else together) < 1e-9, name
        # and one text's embedding is not another's
        assert min(far(a, b) for i, a in enumerate(together) for b in together[:i]) > 5 * error, name
        assert splits == 2, name


def test_repacked_encoders_give_the_same_bits(models: dict[str, Path], tmp_path: Path) -> None:
    names = [n for n in models if n in ("bert-mean", "nomic-bert-mean", "gemma-embedding-mean", "qwen3-rank")]
    packed = [gguf_tools.pack(models[n], tmp_path / models[n].name).path for n in names]
    found = embeddings(True, *(models[n] for n in names), *packed)
    for plain, tiled in zip(found[: len(names)], found[len(names) :], strict=True):
        assert np.array_equal(plain[0], tiled[0])
        assert np.array_equal(plain[1], tiled[1])


def test_of_an_encoder_all_matrices_and_no_table_count(models: dict[str, Path]) -> None:
    for name in models.keys() - {"qwen3-rank"}:
        with gguf_tools.open_gguf(models[name]) as f:
            found = {m.name: m.why for m in gguf_tools.matrices_of(f)}
        assert set(found.values()) == {""}
        assert not any("embd" in matrix or "types" in matrix for matrix in found)
        assert ("cls.output.weight" in found) == name.endswith("rank")
