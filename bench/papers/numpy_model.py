"""A Qwen2 model in numpy, float32, whose numerics a bench may change: what nothing faster is needed for.

The graph is llama.cpp's (src/models/qwen2.cpp). One pass reads a window of tokens and gives the logits of its last
ones; `Numerics` sees what enters each product, all of attention, and may drop tokens between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.weights import tensor_values

F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
# One head: queries (n, d), divided by sqrt(d), keys and values (n, d), mask (n, n) of cells that are seen -> the
# weights that values are summed with (n, n), and the sums (n, d).
Attention = Callable[[F32, F32, F32, npt.NDArray[np.bool_]], tuple[F32, F32]]
# Layer, and one of SITES: what enters a product, (tokens, inputs), and leaves as the product sees it.
Activations = Callable[[int, str, F32], F32]
# Layer, weights (n,) that each token gives the first one, mean over heads and layers so far, positions (n,) that are
# left -> which of these stay.
Pruning = Callable[[int, F32, Ints], npt.NDArray[np.bool_]]

SITES = ("qkv", "attn_output", "ffn_up", "ffn_down")


def softmax_attention(q: F32, k: F32, v: F32, seen: npt.NDArray[np.bool_]) -> tuple[F32, F32]:
    weights = softmax(q @ k.T, seen)
    return weights, weights @ v


def softmax(scores: F32, seen: npt.NDArray[np.bool_]) -> F32:
    """Over the last axis; what is not seen weighs nothing."""
    scores = np.where(seen, scores, np.float32(-np.inf))
    weights: F32 = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


@dataclass(frozen=True)
class Numerics:
    """How a pass computes; as it stands, in float32 and with all tokens."""

    activations: Activations = lambda _layer, _site, x: x
    attention: Attention = softmax_attention
    pruning: Pruning | None = None


@dataclass(frozen=True)
class Logits:
    """Of a window's last tokens, (n, vocabulary), and the mean share of tokens that the layers read."""

    values: F32
    read: float


class Model:
    """A GGUF file of the architecture qwen2, dequantized: 4 bytes for each weight.

    Raises:
        ValueError: it is of another architecture.
    """

    def __init__(self, path: Path) -> None:
        with GGUFFile(path) as f:
            arch = f.kv["general.architecture"].value
            if arch != "qwen2":
                raise ValueError(f"{path} is a model of the architecture {arch}, not qwen2")
            number = {name: f.kv[f"qwen2.{name}"].value for name in _NUMBERS}
            self._weights: Mapping[str, F32] = {t.name: tensor_values(f, t) for t in f.tensors.values()}
        self.n_layer, self._heads = int(number["block_count"]), int(number["attention.head_count"])
        self._heads_kv = int(number["attention.head_count_kv"])
        self._eps = np.float32(number["attention.layer_norm_rms_epsilon"])
        self._rope_base = float(number["rope.freq_base"])
        self._head_dim = int(number["embedding_length"]) // self._heads
        self.n_vocab = len(self._weights["token_embd.weight"])

    def logits(self, tokens: npt.NDArray[np.int32], last: int, how: Numerics) -> Logits:
        """Read tokens at positions 0, 1 .. and give the logits of the last ones, which are never dropped."""
        w = self._weights
        x = w["token_embd.weight"][tokens]
        positions = np.arange(len(tokens))
        to_first, read = np.zeros(len(tokens), np.float32), 0
        for layer in range(self.n_layer):
            read += len(positions)
            mixed, first = self._attention(layer, x, positions, how)
            x = x + how.activations(layer, "attn_output", mixed) @ self._of(layer, "attn_output").T
            h = how.activations(layer, "ffn_up", self._norm(x, self._of(layer, "ffn_norm")))
            gate, up = h @ self._of(layer, "ffn_gate").T, h @ self._of(layer, "ffn_up").T
            h = gate / (1 + np.exp(-gate)) * up
            x = x + how.activations(layer, "ffn_down", h) @ self._of(layer, "ffn_down").T
            to_first += first
            if how.pruning is not None:
                stays = how.pruning(layer, to_first / np.float32(layer + 1), positions)
                stays = stays | (positions >= len(tokens) - last)
                x, positions, to_first = x[stays], positions[stays], to_first[stays]
        x = self._norm(x[len(x) - last :], w["output_norm.weight"])
        values = x @ w.get("output.weight", w["token_embd.weight"]).T
        return Logits(values, read / (self.n_layer * len(tokens)))

    def _of(self, layer: int, name: str) -> F32:
        return self._weights[f"blk.{layer}.{name}.weight"]

    def _norm(self, x: F32, weight: F32) -> F32:
        normed: F32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._eps) * weight
        return normed

    def _attention(self, layer: int, x: F32, positions: Ints, how: Numerics) -> tuple[F32, F32]:
        """Return what all heads read, (n, heads * d), and the mean weight that each token gives the first."""
        h = how.activations(layer, "qkv", self._norm(x, self._of(layer, "attn_norm")))
        q, k, v = (
            (h @ self._of(layer, f"attn_{name}").T + self._weights[f"blk.{layer}.attn_{name}.bias"]).reshape(
                len(h), -1, self._head_dim
            )
            for name in "qkv"
        )
        q, k = self._rope(q, positions) / np.float32(np.sqrt(self._head_dim)), self._rope(k, positions)
        seen = positions[:, None] >= positions
        first = np.zeros(len(h), np.float32)
        heads = []
        for head in range(self._heads):
            own = head * self._heads_kv // self._heads
            weights, mixed = how.attention(q[:, head], k[:, own], v[:, own], seen)
            heads.append(mixed)
            first += weights[:, 0] / np.float32(self._heads)
        return np.concatenate(heads, axis=1), first

    def _rope(self, x: F32, positions: Ints) -> F32:
        """Rotary positions of (n, heads, d); halves of a head are turned together (ggml's NEOX mode)."""
        half = self._head_dim // 2
        angles = positions[:, None] * self._rope_base ** (-np.arange(half) / half)
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


_NUMBERS = (
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
)
