"""Draft heads with random weights, for models of bench/lib/synth.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tilebeam.model.head_file import K_MODEL

from bench.lib.synth import SynthConfig


def write_head(
    path: Path,
    model: SynthConfig,
    tokens: Sequence[int],
    layers: Sequence[int] = (0, 1, 2),
    seed: int = 0,
    mark: str = "",
    tensors: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write a head that guesses `tokens` only; it reads the outputs of `layers` of its model.

    Args:
        tensors: others than it would have, by name.
        changes: other metadata, by key without the architecture, "__" for ".".
    """
    rng, n_embd, n_head = np.random.default_rng(seed), model.n_embd, 2
    file = gguf.GGUFWriter(path, "eagle3")
    numbers = {
        "block_count": 1,
        "context_length": 4096,
        "embedding_length": n_embd,
        "feed_forward_length": 64,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "vocab_size": model.n_vocab,
        "target_hidden_size": n_embd,
        "target_layers": [layer + 1 for layer in layers],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    for key, value in numbers.items():
        (file.add_array if isinstance(value, list) else file.add_uint32)(f"eagle3.{key}", value)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("none")
    if mark:
        file.add_string(K_MODEL, mark)
    width = n_embd // n_head
    shapes = {
        "fc": (n_embd, len(layers) * n_embd),
        "output": (len(tokens), n_embd),
        "blk.0.attn_q": (n_embd, 2 * n_embd),
        "blk.0.attn_k": (width, 2 * n_embd),
        "blk.0.attn_v": (width, 2 * n_embd),
        "blk.0.attn_output": (n_embd, n_embd),
        "blk.0.ffn_gate": (64, n_embd),
        "blk.0.ffn_up": (64, n_embd),
        "blk.0.ffn_down": (n_embd, 64),
    }
    made = {
        f"{name}.weight": (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        made[f"{name}.weight"] = np.ones(n_embd, np.float32)
    for name, tensor in {**made, "d2t": np.array(tokens, np.int64), **tensors}.items():
        file.add_tensor(name, tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
