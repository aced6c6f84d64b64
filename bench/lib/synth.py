"""Random, well-behaved GGUF models: the real graph of an architecture, at any size, without a download.

The weights are Gaussian, scaled so that activations keep unit variance through the layers, attention is peaked
rather than uniform, and the logits have a standard deviation of about 2: top-1 agreement and KL divergence against
another implementation then mean something. The tokenizer is a small SentencePiece vocabulary with byte fallback, so
every text tokenizes and every token prints.

The same configuration and seed give the same bytes. Tensors are made and written chunk by chunk: memory stays at a
few dozen MiB whatever the model's size.

    python -m bench.lib.synth OUT --arch qwen2 --preset bench-1.4b --type q4_0
    python -m bench.lib.synth OUT --arch qwen3moe --experts 8 --experts-used 2
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from tilebeam.gguf.weights import from_float
from tilebeam.gguf.whole_file import whole_file

from bench.lib import k_quants
from bench.lib.metadata import FIRST_PIECES, Piece, add_shape, add_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
MIXTURES = ("llama", "qwen3moe", "gpt-oss")  # can have experts; the last two have nothing else
TYPES = {
    "f32": Q.F32,
    "f16": Q.F16,
    "bf16": Q.BF16,
    "q8_0": Q.Q8_0,
    "q4_0": Q.Q4_0,
    "iq4_nl": Q.IQ4_NL,
    "q2_k": Q.Q2_K,
    "q3_k": Q.Q3_K,
    "iq4_xs": Q.IQ4_XS,
    "q1_0": Q.Q1_0,
    "nvfp4": Q.NVFP4,
    "tq1_0": Q.TQ1_0,
    "tq2_0": Q.TQ2_0,
    "q4_k": Q.Q4_K,
    "q5_k": Q.Q5_K,
    "q6_k": Q.Q6_K,
    "q5_0": Q.Q5_0,
    "q4_1": Q.Q4_1,
    "q5_1": Q.Q5_1,
    "mxfp4": Q.MXFP4,
    **{q.name.lower(): q for q in k_quants.GRID_TYPES},
}
BY_GGUF = (Q.Q5_0, Q.Q4_1, Q.Q5_1, Q.MXFP4)  # quantized by gguf's own code
QUANTIZED = (Q.Q8_0, Q.Q4_0, Q.IQ4_NL)
BLOCK = 32  # elements of a block of these types; those of k_quants have more
CHUNK = 1 << 22  # elements made at once
LOGIT_STD = 2.0
# Standard deviation of the attention scores before the softmax: 0 would average all values away; much more makes the
# layers amplify rounding noise beyond what trained models do (int8 activations cost 0.001 nats at 1.5).
SCORE_STD = 1.5
# Standard deviation of the router's logits: the last expert chosen then has a small weight, so that a near tie with the
# next one, which rounding decides, changes little.
ROUTER_STD = 4.0
# Above this many weights, quantized blocks are drawn directly instead of quantizing Gaussian floats.
DIRECT_ABOVE = 150_000_000

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

# ggml's non-linear 4-bit code book (IQ4_NL).
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)

_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "question answer number step result solve equal total sum plus minus times divide each many how much"
)


@dataclass(frozen=True)
class SynthConfig:
    """Shape, types and options of a model to write.

    `types` overrides `type` per role; a role is the tensor's name without block number and `.weight`, e.g.
    {"ffn_down": "q8_0", "output": "f16"}. `tied` None means the architecture's custom (gemma3: tied, others: not).
    """

    arch: str = "llama"
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 512  # of each expert, where there are experts
    n_expert: int = 0  # of MIXTURES: experts per layer, 0 = an ordinary feed-forward network
    n_expert_used: int = 0  # of them for each token
    router_std: float = ROUTER_STD  # of the router's logits; 0: every token goes to the same experts
    n_vocab: int = 1024
    n_ctx_train: int = 8192
    type: str = "q4_0"
    types: dict[str, str] = field(default_factory=dict)
    tied: bool | None = None
    bias: bool = False  # llama only: biases on every matrix (qwen2 always has them on q, k, v)
    rope_base: float = 10000.0
    rope_base_swa: float = 10000.0  # gemma3: local layers; the global ones use rope_base * 100
    rope_factors: bool = False  # llama only: a rope_freqs tensor as in Llama 3
    yarn_factor: float = 0.0  # llama, qwen2, qwen3: YaRN context extension when > 0
    swa: int = 128  # gemma3, gpt-oss: sliding window, 0 = none
    swa_pattern: int = 3  # gemma3: every swa_pattern-th layer is global
    labels: tuple[str, ...] = ()  # qwen3: a classifier over them (cls.output), pooling type RANK, as rerankers have
    controls: tuple[str, ...] = ()  # control tokens besides <s> and </s>: those of a chat template
    rms_eps: float = 1e-6
    seed: int = 1

    def validate(self) -> None:
        """Raise ValueError with the reason when no working model can be made of this configuration."""
        if self.arch not in (*ARCHITECTURES, *MIXTURES):
            known = ", ".join(dict.fromkeys((*ARCHITECTURES, *MIXTURES)))
            raise ValueError(f"unknown architecture {self.arch!r}: choose from {known}")
        for value in (self.type, *self.types.values()):
            if value not in TYPES:
                raise ValueError(f"unknown tensor type {value!r}: choose from {', '.join(TYPES)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.startswith("n_") and not f.name.startswith("n_expert") and value < 1:
                raise ValueError(f"{f.name} must be at least 1, is {value}")
        if self.n_expert and self.arch not in MIXTURES:
            raise ValueError(f"{self.arch} has no experts: choose from {', '.join(MIXTURES)}")
        if self.arch in ("qwen3moe", "gpt-oss") and not self.n_expert:
            raise ValueError(f"{self.arch} needs experts: n_expert and n_expert_used")
        if self.n_expert == 1 or self.n_expert < 0:  # llama.cpp takes one expert for none
            raise ValueError(f"n_expert must be 0 or at least 2, is {self.n_expert}")
        if not (1 <= self.n_expert_used <= self.n_expert or self.n_expert == self.n_expert_used == 0):
            raise ValueError(f"n_expert_used {self.n_expert_used} is not between 1 and n_expert {self.n_expert}")
        if self.n_head % self.n_head_kv:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_head_kv {self.n_head_kv}")
        if self.arch in ("llama", "qwen2") and self.n_head * self.head_dim != self.n_embd:
            raise ValueError(f"{self.arch} needs n_head * head_dim == n_embd, got {self.n_head * self.head_dim}")
        if self.labels and self.arch != "qwen3":
            raise ValueError(f"{self.arch} has no classifier in llama.cpp: choose qwen3")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd")
        minimum = len(_vocabulary_head()) + len(self.controls)
        if self.n_vocab < minimum:
            raise ValueError(f"n_vocab {self.n_vocab} is below {minimum}, the size of the fixed part")
        for t in tensors(self):
            block = gguf.GGML_QUANT_SIZES[t.qtype][0]
            if t.shape[-1] % block:
                raise ValueError(f"{t.name}: {t.shape[-1]} columns do not divide into blocks of {block}")

    @property
    def is_tied(self) -> bool:
        return self.arch == "gemma3" if self.tied is None else self.tied


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {"n_layer": 6, "n_embd": 512, "n_head": 8, "n_head_kv": 4, "n_ff": 1408, "n_vocab": 4096},
    # Qwen2.5-0.5B's shape.
    "bench-0.5b": {
        "n_layer": 24,
        "n_embd": 896,
        "n_head": 14,
        "n_head_kv": 2,
        "n_ff": 4864,
        "n_vocab": 151936,
        "tied": True,
    },
    # Qwen2.5-1.5B's layers with a 32k vocabulary and its own output matrix.
    "bench-1.4b": {
        "n_layer": 28,
        "n_embd": 1536,
        "n_head": 12,
        "n_head_kv": 2,
        "n_ff": 8960,
        "n_vocab": 32000,
        "head_dim": 128,
    },
    # Mixtures: a small whole one, and two layers of real ones with a small vocabulary.
    "bench-moe": {
        "arch": "qwen3moe",
        "n_layer": 12,
        "n_embd": 1024,
        "n_head": 16,
        "n_head_kv": 4,
        "n_ff": 512,
        "n_expert": 64,
        "n_expert_used": 8,
        "n_vocab": 4096,
    },
    "qwen3-30b-a3b": {
        "arch": "qwen3moe",
        "n_layer": 2,
        "n_embd": 2048,
        "n_head": 32,
        "n_head_kv": 4,
        "head_dim": 128,
        "n_ff": 768,
        "n_expert": 128,
        "n_expert_used": 8,
        "n_vocab": 4096,
    },
    "gpt-oss-20b": {
        "arch": "gpt-oss",
        "n_layer": 2,
        "n_embd": 2880,
        "n_head": 64,
        "n_head_kv": 8,
        "n_ff": 2880,
        "n_expert": 32,
        "n_expert_used": 4,
        "n_vocab": 4096,
    },
}


def preset(name: str, **changes: Any) -> SynthConfig:
    """Return the configuration called `name`, of `PRESETS`, with fields replaced."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    return replace(SynthConfig(**PRESETS[name]), **changes)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to write: numpy shape (columns,), (rows, columns) or (experts, rows, columns), and the distribution of
    its elements."""

    name: str
    shape: tuple[int, ...]
    qtype: Q
    mean: float
    std: float

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.qtype]
        return int(self.n_elements // block * size)


def tensors(cfg: SynthConfig) -> list[TensorSpec]:
    """Return the model's tensors in file order."""
    out: list[TensorSpec] = []

    def matrix(name: str, rows: int, cols: int, std: float, stack: tuple[int, ...] = ()) -> None:
        role = name.split(".")[-1]
        out.append(TensorSpec(f"{name}.weight", (*stack, rows, cols), TYPES[cfg.types.get(role, cfg.type)], 0.0, std))

    def norm(name: str, size: int, mean: float = 1.0) -> None:
        out.append(TensorSpec(f"{name}.weight", (size,), Q.F32, mean, 0.1 * mean))

    def bias(name: str, size: int, std: float, stack: tuple[int, ...] = ()) -> None:
        out.append(TensorSpec(f"{name}.bias", (*stack, size), Q.F32, 0.0, std))

    gemma, oss = cfg.arch == "gemma3", cfg.arch == "gpt-oss"
    n_q, n_kv = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    per_head_norm = cfg.arch in ("qwen3", "qwen3moe", "gemma3")
    experts, stack = ("_exps", (cfg.n_expert,)) if cfg.n_expert else ("", ())
    # Queries and keys of unit variance give scores q.k/sqrt(d) of unit variance; both share the gain.
    qk_gain = SCORE_STD**0.5
    k_embd, k_q, k_ff = (n**-0.5 for n in (cfg.n_embd, n_q, cfg.n_ff))
    qk_std = k_embd * (1.0 if per_head_norm else qk_gain)
    # gemma3 multiplies the embedding by sqrt(n_embd) and reads its logits off the same matrix.
    tied_std = LOGIT_STD * k_embd
    matrix("token_embd", cfg.n_vocab, cfg.n_embd, tied_std if cfg.is_tied else 1.0)
    if cfg.rope_factors and cfg.arch == "llama":
        out.append(TensorSpec("rope_freqs.weight", (cfg.head_dim // 2,), Q.F32, 0.0, 0.0))
    for i in range(cfg.n_layer):
        blk = f"blk.{i}"
        norm(f"{blk}.attn_norm", cfg.n_embd)
        for part, size, std in (("q", n_q, qk_std), ("k", n_kv, qk_std), ("v", n_kv, k_embd)):
            matrix(f"{blk}.attn_{part}", size, cfg.n_embd, std)
            if cfg.arch == "qwen2" or oss or (cfg.bias and cfg.arch == "llama"):
                bias(f"{blk}.attn_{part}", size, 0.3)
        if per_head_norm:
            norm(f"{blk}.attn_q_norm", cfg.head_dim, qk_gain)
            norm(f"{blk}.attn_k_norm", cfg.head_dim, qk_gain)
        matrix(f"{blk}.attn_output", cfg.n_embd, n_q, k_q)
        if oss:
            bias(f"{blk}.attn_output", cfg.n_embd, 0.1)
            norm(f"{blk}.attn_sinks", cfg.n_head)
        norm(f"{blk}.{'post_attention_norm' if oss else 'ffn_norm'}", cfg.n_embd)
        # silu(gate) * up of two unit normals has a standard deviation near 0.6.
        if cfg.n_expert:
            shape = (cfg.n_expert, cfg.n_embd)
            out.append(TensorSpec(f"{blk}.ffn_gate_inp.weight", shape, Q.F32, 0.0, cfg.router_std * k_embd))
        matrix(f"{blk}.ffn_gate{experts}", cfg.n_ff, cfg.n_embd, k_embd, stack)
        matrix(f"{blk}.ffn_up{experts}", cfg.n_ff, cfg.n_embd, k_embd, stack)
        matrix(f"{blk}.ffn_down{experts}", cfg.n_embd, cfg.n_ff, 1.6 * k_ff, stack)
        if oss:
            bias(f"{blk}.ffn_gate_inp", cfg.n_expert, 0.1)
            for part, size in (("gate", cfg.n_ff), ("up", cfg.n_ff), ("down", cfg.n_embd)):
                bias(f"{blk}.ffn_{part}_exps", size, 0.1, stack)
        if gemma:
            # Large enough that the token's own embedding does not dominate logits read off the same matrix.
            norm(f"{blk}.post_attention_norm", cfg.n_embd, 2 * LOGIT_STD)
            norm(f"{blk}.post_ffw_norm", cfg.n_embd, 2 * LOGIT_STD)
        elif cfg.bias and cfg.arch == "llama":
            bias(f"{blk}.attn_output", cfg.n_embd, 0.1)
            if not cfg.n_expert:  # llama's experts have none
                bias(f"{blk}.ffn_gate", cfg.n_ff, 0.1)
                bias(f"{blk}.ffn_up", cfg.n_ff, 0.1)
                bias(f"{blk}.ffn_down", cfg.n_embd, 0.1)
    norm("output_norm", cfg.n_embd)
    if not cfg.is_tied:
        matrix("output", cfg.n_vocab, cfg.n_embd, LOGIT_STD * k_embd)
    if cfg.labels:
        out.append(TensorSpec("cls.output.weight", (len(cfg.labels), cfg.n_embd), Q.F32, 0.0, k_embd))
    return out


# --- quantization -----------------------------------------------------------------------------------------------------


def _store_halves(scale: F32) -> U8:
    """Scales as the two bytes of their FP16 values."""
    return scale.astype("<f2").view(np.uint8).reshape(-1, 2)


def quantize(x: F32, qtype: Q) -> U8:
    """Rows of float32, any shape with a last dimension of whole blocks, as the bytes of `qtype` in file order."""
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    if qtype is Q.F32:
        return flat.astype("<f4").view(np.uint8)
    if qtype is Q.F16:
        return flat.astype("<f2").view(np.uint8)
    if qtype is Q.BF16:
        return gguf.quants.quantize(flat, qtype).reshape(-1)
    if qtype in k_quants.TYPES:
        return k_quants.quantize(flat, qtype)
    if qtype in BY_GGUF:
        return gguf.quants.quantize(flat.reshape(-1, BLOCK), qtype).reshape(-1)
    if qtype not in QUANTIZED:
        raise ValueError(f"cannot write {qtype.name}")
    return from_float(qtype, flat.reshape(-1, BLOCK))


def _direct_table(qtype: Q) -> tuple[npt.NDArray[Any], float]:
    """Codes of Gaussian weights by a uniform random index (two codes a byte for 4 bits), and the codes' std."""
    # Quantiles of the normal distribution by a large sorted sample: numpy has no inverse of the error function.
    uniform = (np.arange(256) + 0.5) / 256
    normal = np.sort(np.random.default_rng(0).standard_normal(1 << 16))
    z = np.interp(uniform, (np.arange(1 << 16) + 0.5) / (1 << 16), normal)
    if qtype is Q.Q8_0:
        q8 = np.clip(np.rint(z * (127 / 2.7)), -127, 127).astype(np.int8)
        return q8.view(np.uint8), float(q8.astype(np.float64).std())
    if qtype is Q.Q4_0:
        codes = np.clip(np.rint(z * (8 / 2.2)) + 8, 0, 15).astype(np.uint8)
        values = codes.astype(np.float64) - 8
    else:
        midpoints = (IQ4_NL_VALUES[1:] + IQ4_NL_VALUES[:-1]) * np.float32(0.5)
        codes = np.searchsorted(midpoints, z * (127 / 2.2)).astype(np.uint8)
        values = IQ4_NL_VALUES[codes].astype(np.float64)
    pairs = codes[np.arange(65536) & 255] | (codes[np.arange(65536) >> 8] << 4)
    return pairs.astype(np.uint8), float(np.sqrt((values**2).mean()))


def _direct_chunks(spec: TensorSpec, rng: np.random.Generator) -> Iterator[U8]:
    """Quantized blocks without floats in between: codes by table, scales of random size and sign."""
    table, code_std = _direct_table(spec.qtype)
    n_codes = BLOCK if spec.qtype is Q.Q8_0 else BLOCK // 2
    index_type = np.uint8 if spec.qtype is Q.Q8_0 else np.uint16
    left = spec.n_elements // BLOCK
    while left:
        n = min(left, CHUNK // BLOCK)
        block = np.empty((n, 2 + n_codes), np.uint8)
        # A random sign per block keeps the unsymmetric code books from giving the weights a mean.
        scale = spec.std / code_std * rng.uniform(0.7, 1.3, n) * rng.choice([-1.0, 1.0], n)
        block[:, :2] = _store_halves(scale.astype(np.float32))
        index = np.frombuffer(rng.bytes(n * n_codes * np.dtype(index_type).itemsize), index_type)
        block[:, 2:] = table[index].reshape(n, n_codes)
        yield block.reshape(-1)
        left -= n


def _rope_freqs(n: int) -> F32:
    """Llama 3's shape: high frequencies kept, low ones divided by 8, a ramp between."""
    ramp = np.clip((np.arange(n, dtype=np.float32) / n - 0.4) / 0.25, 0, 1)
    return (1 + 7 * ramp).astype(np.float32)


def _chunks(spec: TensorSpec, seed: int, direct: bool) -> Iterator[U8]:
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.name == "rope_freqs.weight":
        yield quantize(_rope_freqs(spec.n_elements), Q.F32)
    elif direct and spec.qtype in QUANTIZED:
        yield from _direct_chunks(spec, rng)
    elif direct and spec.qtype in (*k_quants.TYPES, *BY_GGUF):  # some blocks, again and again
        some = quantize(rng.standard_normal(CHUNK // 8, np.float32) * np.float32(spec.std), spec.qtype)
        for first in range(0, spec.n_bytes, some.nbytes):
            yield some[: spec.n_bytes - first]
    else:
        left = spec.n_elements
        while left:
            n = min(left, CHUNK)
            x = rng.standard_normal(n, np.float32)
            yield quantize(x * np.float32(spec.std) + np.float32(spec.mean), spec.qtype)
            left -= n


# --- tokenizer and file -----------------------------------------------------------------------------------------------


def _vocabulary_head() -> list[Piece]:
    """Return the start of every vocabulary: specials, all bytes, ASCII, and common words with all their prefixes."""
    normal = gguf.TokenType.NORMAL
    out = [*FIRST_PIECES]
    out += [(chr(c), normal) for c in range(33, 127)] + [("\u2581", normal)]
    seen = {text for text, _ in out}
    for word in _WORDS.split():
        # SentencePiece merges pairs: a word is reached only if every prefix of it is a token too.
        for end in range(1, len(word) + 1):
            piece = "\u2581" + word[:end]
            if piece not in seen:
                seen.add(piece)
                out.append((piece, normal))
    return out


def _write_metadata(w: gguf.GGUFWriter, cfg: SynthConfig, name: str) -> None:
    w.add_name(name)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    gemma = cfg.arch == "gemma3"
    add_shape(
        w,
        n_ctx=cfg.n_ctx_train,
        n_embd=cfg.n_embd,
        n_layer=cfg.n_layer,
        n_ff=cfg.n_ff,
        n_head=cfg.n_head,
        n_head_kv=cfg.n_head_kv,
        head_dim=cfg.head_dim,
        rope_base=cfg.rope_base * (100 if gemma else 1),
        rms_eps=cfg.rms_eps,
        n_vocab=cfg.n_vocab,
    )
    w.add_key_length(cfg.head_dim)
    w.add_value_length(cfg.head_dim)
    if cfg.n_expert:
        w.add_expert_count(cfg.n_expert)
        w.add_expert_used_count(cfg.n_expert_used)
        if cfg.arch != "llama":
            w.add_expert_feed_forward_length(cfg.n_ff)
    if cfg.arch == "gpt-oss":
        w.add_sliding_window(cfg.swa)
    if gemma:
        w.add_sliding_window(cfg.swa)
        w.add_float32("gemma3.rope.freq_base_swa", cfg.rope_base_swa)
        w.add_uint32("gemma3.attention.sliding_window_pattern", cfg.swa_pattern)
    elif cfg.yarn_factor > 0:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(cfg.yarn_factor)
        w.add_rope_scaling_orig_ctx_len(max(1, int(cfg.n_ctx_train / cfg.yarn_factor)))
    if cfg.labels:
        w.add_pooling_type(gguf.PoolingType.RANK)
        w.add_classifier_output_labels(list(cfg.labels))
    pieces = _vocabulary_head() + [(text, gguf.TokenType.CONTROL) for text in cfg.controls]
    pieces += [(f"\u2581t{i}", gguf.TokenType.NORMAL) for i in range(len(pieces), cfg.n_vocab)]
    # Longer pieces first: the score is the merge priority.
    add_vocabulary(w, pieces, [float(len(text)) if kind is gguf.TokenType.NORMAL else 0.0 for text, kind in pieces])
    w.add_tokenizer_pre("default")


def write_model(path: str | Path, cfg: SynthConfig, direct: bool | None = None, progress: bool = False) -> Path:
    """Write the model `cfg` describes to `path` and return it; `path` appears only when complete.

    `direct` draws quantized blocks at random instead of quantizing Gaussian floats: several times faster, the same
    statistics, other weights (default: only for models above 150M weights). Raises ValueError for an impossible
    configuration, OSError if the file cannot be written.
    """
    cfg.validate()
    path = Path(path)
    specs = tensors(cfg)
    if direct is None:
        direct = sum(s.n_elements for s in specs) > DIRECT_ABOVE
    with whole_file(path) as partial:
        w = gguf.GGUFWriter(partial, cfg.arch)
        try:
            _write_metadata(w, cfg, path.stem)
            for s in specs:
                w.add_tensor_info(s.name, s.shape, np.dtype(np.float32), s.n_bytes, raw_dtype=s.qtype)
            w.write_header_to_file()
            w.write_kv_data_to_file()
            w.write_ti_data_to_file()
            if w.fout is None:  # for the type checker: write_header_to_file opened it
                raise OSError(f"{partial}: not open")
            fp = w.fout[0]
            w.write_padding(fp, fp.tell())
            with _bar(path.name, sum(s.n_bytes for s in specs), progress) as written:
                for s in specs:
                    for chunk in _chunks(s, cfg.seed, direct):
                        chunk.tofile(fp)
                        written(chunk.nbytes)
                    w.write_padding(fp, s.n_bytes)
        finally:
            w.close()
    return path


@contextmanager
def _bar(name: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over bytes, if wanted."""
    if not shown:
        yield lambda _: None
        return
    from tilebeam.cli import console

    with console.bar("writing") as progress:
        task = progress.add_task(name, total=total, note="bytes")
        yield lambda size: progress.update(task, advance=size)


def _main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.lib.synth", description="Write a random GGUF model.")
    p.add_argument("out", type=Path)
    p.add_argument("--arch", choices=dict.fromkeys((*ARCHITECTURES, *MIXTURES)), default="llama")
    p.add_argument("--preset", choices=list(PRESETS), default="tiny")
    p.add_argument("--type", choices=list(TYPES), default="q4_0")
    p.add_argument("--role", action="append", default=[], metavar="ROLE=TYPE", help="e.g. ffn_down=q8_0; repeatable")
    p.add_argument("--layers", type=int, help="number of layers instead of the preset's")
    p.add_argument("--experts", type=int, default=0, metavar="N", help="llama, qwen3moe: experts per layer")
    p.add_argument("--experts-used", type=int, default=0, metavar="N", help="of them for each token")
    p.add_argument("--bias", action="store_true", help="llama: biases on every matrix")
    p.add_argument("--rope-factors", action="store_true", help="llama: a rope_freqs tensor")
    p.add_argument("--yarn", type=float, default=0.0, metavar="FACTOR", help="YaRN context extension")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args(argv)
    try:
        roles = dict(part.split("=", 1) for part in a.role)
        changes: dict[str, Any] = {"arch": a.arch, "type": a.type, "types": roles, "seed": a.seed}
        changes |= {"n_expert": a.experts, "n_expert_used": a.experts_used}
        changes |= {"bias": a.bias, "rope_factors": a.rope_factors, "yarn_factor": a.yarn}
        if a.layers is not None:
            changes["n_layer"] = a.layers
        write_model(a.out, preset(a.preset, **changes), progress=True)
    except (ValueError, OSError) as e:
        print(f"{p.prog}: {e}", file=sys.stderr)
        return 1
    print(f"{a.out}: {a.arch} {a.preset} {a.type}, {a.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
