"""Products of low-bit weights by tables of partial sums (T-MAC) against the product's own kernels, which multiply int8.

    python -m bench.papers.lut_gemv [--json] [--quick] [--types tq2_0,q2_k] [--rows 1,4,8] [--shapes 1536x8960]

An n-bit weight is n planes of signs. Four activations have 16 sums +-a0 +-a1 +-a2 +-a3; rounded to bytes they are one
table, which stays in a register while the nibbles of 32 or 64 columns look up in it. Per 8 k and 32 columns, with P
planes, AVX2 takes P loads, 3 P steps for nibbles, 2 P look-ups, 4 P steps that add two planes by their values in 16
bits (6 where there is only one), and 2 loads of tables. With scales and float steps, as GCC 12 compiles it, and the
same of the int8 kernels, in which 32 weights take a load, a shift, a mask, vpmaddubsw, an addition and a broadcast:

    instructions per weight    1 bit    TQ2_0    TQ1_0    Q2_K    Q3_K    Q4_0
    tables                     0.053    0.085    0.085    0.15    0.19    0.19
    int8                                0.19     0.6      0.21    0.31    0.22

Building tables takes 2.3 for each k. With more rows nibbles are shared, which leaves 6 P + 2 in place of 10 P + 2, and
of int8's work less than half. T-MAC's 8-bit aggregation, averages of averages, is left out.

The table has all 16 entries, as a look-up reads 16; only eight are computed, the others are their mirror. Kept as half
a table, every look-up would need a sign besides. A table's unit is that of the int8 activations beside it: one for 32 k
with Q4_0, one for 256 k else. The types are ggml's own, but 1 bit: signs with a scale for each 256, which for the
product are TQ2_0 without zeros. Ternary weights are the half sum of two signs, TQ1_0's as TQ2_0's.

One thread; both sides begin with float activations. Weights are rotated through enough copies that they come from
memory (`--mib 0`: one copy, and with small ones the executor's own time for an op counts). Results must have the errors
that rounding to bytes makes, and no others. The share of the limit is that of the read bandwidth, where weights come
from memory.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from tilebeam.native import executor as _npu

from bench.gemm import NpuMulMat
from bench.lib import k_quants, limits, report
from bench.lib.op_list import aligned
from bench.lib.options import Parser
from bench.papers import lut

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
SHAPES = "1536x1536,1536x8960,8960x1536,4096x4096"


@cache
def library() -> ctypes.CDLL:
    return limits.compile("papers/lut_gemv.cpp", "-fno-fast-math")


class LutMulMat:
    """``copies`` products of x (M, K) and packed weights of N columns, tables built anew for each."""

    def __init__(self, f: lut.Format, packed: U8, x: F32, n: int, copies: int) -> None:
        self._weights = aligned(copies * packed.nbytes)
        self._weights.reshape(copies, -1)[:] = packed
        self._x = x
        self.result = np.empty((len(x), n), np.float32)
        pointers = [ctypes.c_void_p(v.ctypes.data) for v in (self._weights, self._x, self.result)]
        sizes = [ctypes.c_size_t(v) for v in (copies, x.shape[1], n, len(x))]
        self._call = (ctypes.c_int(f.number), pointers[0], *sizes[:3], pointers[1], sizes[3], pointers[2])

    def run(self) -> None:
        library().tb_lut(*self._call)


def blocks(type: str, k: int, n: int, rng: np.random.Generator) -> tuple[str, U8]:
    """Draw normally distributed weights in ggml's blocks; return their type for the product's kernels, and them."""
    values = rng.standard_normal((n, k), np.float32) / np.float32(np.sqrt(k))
    if type == "1 bit":
        scale = np.abs(values.reshape(n, -1, lut.BIG)).mean(axis=2, keepdims=True)
        signs = np.where(values.reshape(n, -1, lut.BIG) < 0, -scale, scale)
        return "tq2_0", gguf.quants.quantize(signs.reshape(n, k), Q.TQ2_0).reshape(-1)
    if type == "q4_0":
        return type, gguf.quants.quantize(values, Q.Q4_0).reshape(-1)
    return type, k_quants.quantize(values, Q[type.upper()])


def checked(name: str, f: lut.Format, p: lut.Planes, packed: U8, x: F32, exact: F32) -> float:
    """Return the relative error of the kernel against float32.

    Raises:
        RuntimeError: it is more than rounding tables to bytes makes it.
    """
    product = LutMulMat(f, packed, x, len(p.bits), 1)
    product.run()
    spread = lut.spread(f, p, x)
    wrong = np.abs(product.result - exact)
    if np.linalg.norm(wrong) > 1.2 * np.linalg.norm(spread) or np.any(wrong > 7 * spread + 1e-5 * np.abs(exact).max()):
        raise RuntimeError(f"{name}: further from float32 than int8 tables make it")
    return error(product.result, exact)


def error(result: F32, exact: F32) -> float:
    """Relative to the exact one, of all results together."""
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


def measure(type: str, k: int, n: int, args: argparse.Namespace, add: Callable[[dict[str, Any]], None]) -> None:
    """Return the rows of one type and shape."""
    if k % lut.BIG or n % (2 * lut.COLUMNS):
        raise ValueError(f"{k} x {n}: K must be a multiple of {lut.BIG}, N of {2 * lut.COLUMNS}")
    rng = np.random.default_rng(1)
    f = lut.FORMATS[type]
    plain, weights = blocks(type, k, n, rng)
    p = lut.planes(type, weights, k, n)
    packed = lut.pack(f, p)
    values = gguf.quants.dequantize(weights, Q[plain.upper()]).reshape(n, k)
    for m in (int(v) for v in args.rows.split(",")):
        x = rng.standard_normal((m, k), np.float32)
        exact = x @ values.T
        copies = max(1, -(-(args.mib << 20) // packed.nbytes))
        theirs = NpuMulMat(plain, weights, x, n, copies, 1, "avx2")
        theirs.run()
        work, read = 1e-9 * k * n * m * copies, limits.read_gbs(1)
        name = f"{type}, {k} x {n}, {m} row{'s' if m > 1 else ''}"
        wrong = checked(name, f, p, packed, x, exact)
        ours = LutMulMat(f, packed, x, n, copies)
        pairs = report.interleave(ours.run, theirs.run, args.rounds, args.seconds)
        limit = read * k * n * m / packed.nbytes if args.mib else None
        row = report.row(name, pairs, work, "Gweights/s", limit, kernel=theirs.kernel, read_peak=round(read, 2))
        bits, their_bits = (8 * size / (k * n) for size in (packed.nbytes, theirs.weight_bytes))
        add(
            row
            | {"bits": round(bits, 3), "baseline_bits": round(their_bits, 3)}
            | {"gb_per_s": round(row["value"] * bits / 8 / m, 2)}
            | {"error": round(wrong, 5), "baseline_error": round(error(theirs.result(), exact), 5)}
        )
        theirs.close()


def main() -> None:
    p = Parser(__doc__, "one shape, one copy, fewer and shorter rounds")
    if "avx2" not in _npu.isas():
        raise RuntimeError("this CPU has no AVX2")
    p.add_argument("--types", default=",".join(lut.FORMATS), help="default: all")
    p.add_argument("--rows", default="1,4,8", help="values of M")
    p.add_argument("--shapes", help=f"K x N (default: {SHAPES}, with --quick the first)")
    p.add_count("--mib", usual=256, quick=0, what="of all copies together; 0: one copy")
    p.add_rounds(15, 3)
    args = p.parse()
    args.seconds = 0.01 if args.quick else 0.1
    shapes = args.shapes or (SHAPES.split(",")[0] if args.quick else SHAPES)
    rows = report.Rows("lut_gemv", args.json)
    for shape in shapes.split(","):
        k, n = (int(v) for v in shape.split("x"))
        for type in args.types.split(","):
            measure(type, k, n, args, lambda r: rows.add(r, f"error {r['error']:.2%}, int8 {r['baseline_error']:.2%}"))
    rows.finish({"read_gbs": round(max(r["read_peak"] for r in rows.rows), 2)})


if __name__ == "__main__":
    report.start(main)
