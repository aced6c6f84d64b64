"""Types with blocks of 256 k by hand: random super-blocks, and what they mean by gguf's own numpy code."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gemm_reference import Weights
from gguf.quants import dequantize as gguf_dequantize
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

Array = npt.NDArray[Any]

# Types with blocks of 256 k, and where the FP16 scales of a super-block are: d and dmin, or d.
HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_XS: (0,),
    Type.TQ2_0: (64,),
    Type.TQ1_0: (52,),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ1_S: (0,),
    Type.IQ1_M: (48,),  # in pieces: set_half
}
K_BLOCKS = tuple(HALVES)
K_PANELS = tuple(Type[f"{t.name}_COL"] for t in K_BLOCKS)
GGML = {t: gguf.GGMLQuantizationType(t.ggml) for t in K_BLOCKS}


def set_half(type: Type, blocks: Array, at: int, value: Any) -> None:
    """Write an FP16 scale, or one for each of the blocks (.., bytes). IQ1_M has four bits of it above each 12."""
    half = np.broadcast_to(np.asarray(value, np.float16), blocks.shape[:-1])[..., None].copy()
    if type != Type.IQ1_M:
        blocks[..., at : at + 2] = half.view(np.uint8)
        return
    nibbles = half.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
    top = blocks[..., at + 1 : at + 8 : 2]
    top[...] = (top & 15) | (nibbles << 4).astype(np.uint8)


def random_super_blocks(type: Type, k: int, n: int, rng: np.random.Generator) -> Array:
    """Random bytes with finite scales, uint8 (n, bytes of a row)."""
    size = gguf.GGML_QUANT_SIZES[GGML[type]][1]
    blocks = rng.integers(0, 256, (n, k // 256, size)).astype(np.uint8)
    for at in HALVES[type]:
        set_half(type, blocks, at, rng.standard_normal((n, k // 256)) / 64)
    return blocks.reshape(n, -1)


def values(type: Type, rows: Array) -> Array:
    """Float32 values of super-blocks, (n, k)."""
    return gguf_dequantize(rows, GGML[type])


def make_weights(type: Type, k: int, n: int, rng: np.random.Generator) -> Weights:
    """A random matrix, as ggml's rows or as block panels."""
    plain = ggml_ext.source_type(type) if ggml_ext.is_tiled(type) else type
    rows = random_super_blocks(plain, k, n, rng)
    data = ggml_ext.pack(type, rows.reshape(-1), k, n) if type in K_PANELS else rows
    return Weights(type, k, n, data, values(plain, rows).astype(np.float64))
