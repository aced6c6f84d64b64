"""Metadata that llama.cpp asserts instead of checking: what would end the process is refused here with a sentence.

llama.cpp refuses missing keys, wrong types and wrong tensor shapes by itself; only its assertions (and divisions) on
plain numbers are repeated here, as in llama-model.cpp, llama-vocab.cpp and ggml.c of the pinned llama.cpp.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from .contents import model_kv
from .errors import GGUFError
from .gguf_file import STRING, value_of
from .split import Source

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_HEAD = 8192
MAX_SIZE = 1 << 20
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
LIMITS = (
    ("block_count", 1, MAX_LAYERS),
    ("embedding_length", 1, MAX_SIZE),
    ("expert_count", 0, MAX_EXPERTS),
    ("attention.key_length", 1, MAX_HEAD),
    ("attention.value_length", 1, MAX_HEAD),
)
# Their graphs demand keys and values of one size.
EQUAL_HEADS = ("llama", "qwen2", "qwen3")
DENSE = ("llama", "qwen2", "qwen3", "gemma3", "eagle3")
# What the general.type of a file that is no model means, and what to do with it.
NOT_MODELS = {
    "adapter": "is an adapter, not a model: load its model, and name the adapter by lora= or --lora",
    "mmproj": "is not a model but the part of one that reads images or sound (mmproj), which Tilebeam does not run: "
    "load the language model that it belongs to",
    "imatrix": "is not a model but an importance matrix, which llama-quantize takes",
}


def require_model(f: Source) -> None:
    """Raise GGUFError, which says where it is wanted, if a file is no model but belongs to one."""
    kind = value_of(f.kv, "general.type")
    kind = "adapter" if "adapter.type" in f.kv else "mmproj" if f.architecture == "clip" else kind
    if isinstance(kind, str) and kind in NOT_MODELS:
        raise GGUFError(f"{f.path} {NOT_MODELS[kind]}")


class _Metadata:
    """The metadata of a model under its architecture's prefix."""

    def __init__(self, f: Source, architecture: str) -> None:
        self._path, self._architecture, self._kv = f.path, architecture, model_kv(f)

    def get(self, name: str) -> Any:
        return value_of(self._kv, f"{self._architecture}.{name}")

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def need(self, ok: bool, name: str, why: str) -> None:
        if not ok:
            raise GGUFError(f"{self._path}: {self._architecture}.{name} is {_short(self.get(name))}, {why}")

    def within(self, name: str, low: int, high: int) -> None:
        given = self.get(name)
        for n in given if isinstance(given, list) else [given]:
            if isinstance(n, int) and not isinstance(n, bool):
                self.need(low <= n <= high, name, f"not between {low} and {high}")


def check_model(f: Source, architecture: str) -> None:
    """Raise GGUFError if it is no model, or the metadata of one of this architecture would make llama.cpp abort."""
    require_model(f)
    m = _Metadata(f, architecture)
    for name, low, high in LIMITS:
        m.within(name, low, high)
    experts, used = (m.get(name) or 0 for name in ("expert_count", "expert_used_count"))
    if isinstance(experts, int) and isinstance(used, int):
        m.need((0 < used <= experts) or experts == used == 0, "expert_used_count", f"of {experts} experts")
    if architecture in DENSE:
        _check_heads(m)
    scaling = m.get("rope.scaling.type")
    m.need(not isinstance(scaling, str) or scaling in ROPE_SCALINGS, "rope.scaling.type", "which is unknown")
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        eps = m.get(name)
        m.need(not isinstance(eps, float) or (math.isfinite(eps) and eps >= 0), name, "no epsilon")
    if architecture in EQUAL_HEADS:
        keys, values = m.get("attention.key_length"), m.get("attention.value_length")
        m.need(None in (keys, values) or keys == values, "attention.value_length", f"but keys have {keys}")
    _check_vocabulary(f)


def _check_heads(m: _Metadata) -> None:
    """Check the attention of every layer: no head count may be 0, and heads share keys, values and rotation evenly."""
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        m.within(name, 1, MAX_SIZE)
    heads, kv_heads = m.integer("attention.head_count"), m.integer("attention.head_count_kv")
    if heads is not None and kv_heads is not None:
        m.need(heads % kv_heads == 0, "attention.head_count_kv", f"no divisor of {heads} heads")
    rope, length = m.integer("rope.dimension_count"), m.integer("attention.key_length")
    if rope is None:
        return
    n_embd = m.integer("embedding_length")
    if m.get("attention.key_length") is None and heads is not None and n_embd is not None:
        length = n_embd // heads
    top = MAX_HEAD if length is None else length
    m.need(0 < rope <= top and rope % 2 == 0, "rope.dimension_count", f"not even or not between 2 and {top}")


def _check_vocabulary(f: Source) -> None:
    """Check the vocabulary: lists that do not belong together are read past their end, and tokens that occur twice are
    asserted not to."""
    tokens = f.kv.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.array is None or tokens.array[0] != STRING:
        return
    count = tokens.array[1]
    for name in ("scores", "token_type"):
        beside = f.kv.get(f"tokenizer.ggml.{name}")
        if beside is not None and (beside.array is None or beside.array[1] != count):
            raise GGUFError(f"{f.path}: tokenizer.ggml.{name} does not have one entry for each of {count} tokens")
    # By hand: a vocabulary may have hundreds of thousands of tokens, and the reader has checked all lengths.
    raw, at, length, texts = tokens.raw, tokens.body + 12, struct.Struct("<Q").unpack_from, []
    for _ in range(count):
        begin = at + 8
        at = begin + length(raw, at)[0]
        texts.append(raw[begin:at])
    if b"\0" in b"".join(texts):
        texts = [text.partition(b"\0")[0] for text in texts]  # llama.cpp reads C strings
    # llama.cpp gives empty tokens names of their own.
    if len(set(texts)) + max(0, texts.count(b"") - 1) != count:
        raise GGUFError(f"{f.path}: the vocabulary has a token twice")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
