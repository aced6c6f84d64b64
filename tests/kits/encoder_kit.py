"""Tiny random models that give embeddings and ranks: encoders of the BERT family, and Gemma's embedding model.

llama.cpp's test-llama-archs leaves these families out. Weights are Gaussian: two texts get different embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from tilebeam import TilebeamError
from tilebeam.native import releases

from bench.lib.metadata import FIRST_PIECES, add_vocabulary

Q = gguf.GGMLQuantizationType
POOLING = gguf.PoolingType
N_EMBD, N_FF, N_HEAD, N_LAYER, N_CTX = 128, 256, 4, 2, 256
WORDS = ("the", "sum", "of", "two", "and", "three", "is", "five", "a", "cat", "sat", "on", "mat", "old", "tree")


@dataclass(frozen=True)
class Encoder:
    """A model to write: an architecture of llama.cpp, how it pools, and what its rank has outputs for."""

    arch: str
    pooling: gguf.PoolingType
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arch}-{self.pooling.name.lower()}"


ENCODERS = (
    Encoder("bert", POOLING.MEAN),
    Encoder("bert", POOLING.CLS),
    Encoder("bert", POOLING.RANK, tuple("abcdefgh")),
    Encoder("nomic-bert", POOLING.MEAN),
    Encoder("jina-bert-v2", POOLING.MEAN),
    Encoder("jina-bert-v2", POOLING.LAST),
    Encoder("modern-bert", POOLING.CLS),
    Encoder("gemma-embedding", POOLING.MEAN),
)


def refusal(arch: str) -> str:
    """Why the installed release is not asked to run an architecture, or "": llama.cpp itself aborts there."""
    try:
        releases.check_architecture(arch, arch)
    except TilebeamError as error:
        return str(error)
    return ""


def write_encoder(path: Path, encoder: Encoder, type: gguf.GGMLQuantizationType = Q.Q8_0, seed: int = 1) -> Path:
    """The model as a GGUF, its matrices of this type, embeddings and vectors in float32."""
    w, arch = gguf.GGUFWriter(path, encoder.arch), encoder.arch
    gemma = arch == "gemma-embedding"
    w.add_context_length(N_CTX)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_causal_attention(False)
    w.add_pooling_type(encoder.pooling)
    if encoder.labels:
        w.add_classifier_output_labels(list(encoder.labels))
    if gemma:
        w.add_head_count_kv(1)
        w.add_layer_norm_rms_eps(1e-6)
    else:
        w.add_layer_norm_eps(1e-6)
    if gemma or arch == "modern-bert":  # every second layer looks at a window
        w.add_sliding_window(8)
        w.add_sliding_window_pattern([bool(i % 2) for i in range(N_LAYER)])
        w.add_rope_freq_base(10000.0)
    pieces = _vocabulary(w, gemma)
    rng = np.random.default_rng(seed)

    def vector(name: str, n: int, mean: float = 0.0) -> None:
        w.add_tensor(name, rng.normal(mean, 0.1, n).astype(np.float32))

    def table(name: str, rows: int) -> None:
        w.add_tensor(name, rng.normal(0, 1, (rows, N_EMBD)).astype(np.float32))

    def matrix(name: str, k: int, n: int, bias: bool) -> None:
        x = rng.normal(0, 1.5 * k**-0.5, (n, k)).astype(np.float32)
        w.add_tensor(f"{name}.weight", quantize(x, type), raw_dtype=type)
        if bias:
            vector(f"{name}.bias", n)

    table("token_embd.weight", pieces)
    _outside(arch, table, vector)
    for i in range(N_LAYER):
        _layer(f"blk.{i}.", i, arch, matrix, vector)
    if encoder.labels:
        matrix("cls", N_EMBD, N_EMBD, True)
        matrix("cls.output", N_EMBD, len(encoder.labels), True)
    for write in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file):
        write()
    w.close()
    return path


def _outside(arch: str, table: Any, vector: Any) -> None:
    if arch in ("modern-bert", "gemma-embedding"):
        vector("output_norm.weight", N_EMBD, 1.0)
    if arch == "gemma-embedding":
        return
    vector("token_embd_norm.weight", N_EMBD, 1.0)
    if arch != "modern-bert":
        vector("token_embd_norm.bias", N_EMBD)
        table("token_types.weight", 2)
    if arch == "bert":
        table("position_embd.weight", N_CTX)


def _layer(at: str, i: int, arch: str, matrix: Any, vector: Any) -> None:
    if arch == "gemma-embedding":
        head = N_EMBD // N_HEAD
        for name, n in (("attn_q", N_EMBD), ("attn_k", head), ("attn_v", head)):
            matrix(at + name, N_EMBD, n, False)
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{at}{name}.weight", head, 1.0)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"{at}{name}.weight", N_EMBD, 1.0)
        matrix(at + "attn_output", N_EMBD, N_EMBD, False)
        matrix(at + "ffn_gate", N_EMBD, N_FF, False)
        matrix(at + "ffn_up", N_EMBD, N_FF, False)
        matrix(at + "ffn_down", N_FF, N_EMBD, False)
        return
    biased = arch in ("bert", "jina-bert-v2")
    if arch in ("nomic-bert", "modern-bert"):
        matrix(at + "attn_qkv", N_EMBD, 3 * N_EMBD, False)
    else:
        for name in ("attn_q", "attn_k", "attn_v"):
            matrix(at + name, N_EMBD, N_EMBD, biased)
    matrix(at + "attn_output", N_EMBD, N_EMBD, biased)
    # modern-bert: gate and up in one matrix
    matrix(at + "ffn_up", N_EMBD, 2 * N_FF if arch == "modern-bert" else N_FF, arch == "bert")
    matrix(at + "ffn_down", N_FF, N_EMBD, biased)
    if arch in ("nomic-bert", "jina-bert-v2"):
        matrix(at + "ffn_gate", N_EMBD, N_FF, False)
    if arch == "modern-bert":
        for name in ("attn_norm", "ffn_norm") if i else ("ffn_norm",):
            vector(f"{at}{name}.weight", N_EMBD, 1.0)
        return
    for name in ("attn_output_norm", "layer_output_norm"):
        vector(f"{at}{name}.weight", N_EMBD, 1.0)
        vector(f"{at}{name}.bias", N_EMBD)


def _vocabulary(w: gguf.GGUFWriter, gemma: bool) -> int:
    """Words as tokens; returns how many."""
    if gemma:
        prefixes = {"\u2581" + word[:n] for word in WORDS for n in range(len(word) + 1)}
        pieces = [*FIRST_PIECES, *((c, gguf.TokenType.NORMAL) for c in "abcdefghijklmnopqrstuvwxyz")]
        pieces += [(p, gguf.TokenType.NORMAL) for p in sorted(prefixes)]
        add_vocabulary(w, pieces, [float(len(text)) for text, _ in pieces])
        return len(pieces)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *("\u2581" + word for word in WORDS)]
    w.add_tokenizer_model("bert")
    w.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.NORMAL] * len(WORDS)
    w.add_token_types([int(kind) for kind in kinds])
    w.add_token_type_count(2)
    w.add_pad_token_id(0)
    w.add_unk_token_id(1)
    w.add_bos_token_id(2)
    w.add_sep_token_id(3)
    w.add_mask_token_id(4)
    return len(tokens)
