"""The memory that llama.cpp keeps for each token, as a file's header tells it."""

from __future__ import annotations

from dataclasses import dataclass

from tilebeam import gguf as gguf_tools
from tilebeam.model.load_options import KvType

# Bytes of an element of the KV cache.
KV_BYTES: dict[KvType, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
# In the names of tensors: of layers that keep a state beside a KV cache, or instead.
_RECURRENT = ("ssm_", "shortconv", "time_mix")


@dataclass(frozen=True)
class Cache:
    """The memory that a model keeps for each token, at least.

    Attributes:
        k, v: elements in the KV cache, of all layers together.
        recurrent: layers may keep states of whole texts as well, or instead.
        entries: tokens and merges of the vocabulary.
        window: tokens of the sliding window that some layers have, 0 if none.
    """

    k: int = 0
    v: int = 0
    recurrent: bool = False
    entries: int = 0
    window: int = 0


def cache_of(gguf: gguf_tools.Source, architecture: str) -> Cache:
    """Read a file's header for what llama.cpp keeps of each token. Layers that it may leave out count nothing."""
    metadata = gguf_tools.model_kv(gguf)

    def values(*keys: str, default: int = 0) -> list[int]:
        found: list[int] = []
        for key in keys:
            value = gguf_tools.value_of(metadata, f"{architecture}.{key}")
            found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        return found or [default]

    heads = max(1, *values("attention.head_count"))
    size = min(values("embedding_length")) // heads
    k = min(filter(None, values("attention.key_length", "attention.key_length_swa", default=size)), default=0)
    v = min(filter(None, values("attention.value_length", "attention.value_length_swa", default=size)), default=0)
    if max(values("attention.key_length_mla")) > 0:
        v = 0  # its values are a part of its keys
    n_layer = min(values("block_count"))
    for left_out in ("attention.shared_kv_layers", "nextn_predict_layers"):
        n_layer -= max(values(left_out))
    of_layers = values("attention.head_count_kv", default=heads)
    # Layers of one kind: beside those with a matrix of their own for K, fused ones belong to another kind of attention.
    for kind in ("attn_k", "attn_qkv", "attn_kv_a_mqa"):
        attending = [i for i in range(n_layer) if f"blk.{i}.{kind}.weight" in gguf.tensors]
        if attending:
            break
    kv_heads = sum(of_layers[min(i, len(of_layers) - 1)] for i in attending)
    recurrent = len(attending) < n_layer or any(part in name for name in gguf.tensors for part in _RECURRENT)
    lists = [gguf.kv.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges")]
    entries = sum(entry.array[1] for entry in lists if entry is not None and entry.array is not None)
    window = max(values("attention.sliding_window"))
    return Cache(kv_heads * k, kv_heads * v, recurrent, entries, window)
