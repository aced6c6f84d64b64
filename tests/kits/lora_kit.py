"""Random LoRA adapters for models, those of synth.py and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from tilebeam.gguf import GGUFFile

Q = gguf.GGMLQuantizationType
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 8,
    type: gguf.GGMLQuantizationType = Q.F32,
    matrices: Sequence[str] = MATRICES,
    strength: float = 0.3,
    seed: int = 0,
    more: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> Path:
    """Write an adapter for the matrices of `model` whose names end so (without ``.weight``). Each product of A and B
    changes what its matrix gives by about `strength` of a unit normal. `more` adds to its metadata."""
    rng = np.random.default_rng(seed)
    with GGUFFile(model) as f:
        entry = f.kv.get("tilebeam.architecture")
        w = gguf.GGUFWriter(path, str(entry.value) if entry else f.architecture)
        w.add_string("general.type", "adapter")
        w.add_string("adapter.type", "lora")
        w.add_float32("adapter.lora.alpha", 2.0 * rank)
        more(w)
        for t in f.tensors.values():
            if t.name.removesuffix(".weight").split(".")[-1] not in matrices:
                continue
            k, n = t.ne[:2]
            stack = t.ne[2:]
            for part, shape, std in (
                ("a", (*stack, rank, k), k**-0.5),
                ("b", (*stack, n, rank), strength / 2 * rank**-0.5),
            ):
                x = (rng.standard_normal(shape) * std).astype(np.float32)
                w.add_tensor(f"{t.name}.lora_{part}", quantize(x, type), raw_dtype=type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
