"""FLASH_ATTN_EXT alone: the NPU executor against the stock CPU backend, over what the rows of a batch share.

    python -m bench.attention [--json] [--quick] [--type f16,q8_0] [--depths 4096,16384] [--heads 32,8,64] [-t N]

Heads as in Qwen2.5-1.5B (12 query heads, 2 KV heads of 128), or others by --heads. --depths: instead of the usual cases
one and eight sequences with so many cells each, from memory, and the last 512 tokens of such a prompt. Operations are
counted over the cells that the mask shows, so a kernel that computes hidden cells gains nothing by it; the share is of
the float32 FMA peak. "From memory": as many ops one after the other as it takes for their K and V to fit into no cache,
as in a model, whose layers have a cache of cells each; the other rows run one op again and again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from bench.lib import limits, report
from bench.lib.ggml_cpu import CpuAttention
from bench.lib.op_list import NpuOps, Tensor
from bench.lib.options import Parser

# Of K and V: the executor's type, gguf's, and the bytes of a block.
TYPES = {
    "f16": (Type.F16, gguf.GGMLQuantizationType.F16, 2),
    "q8_0": (Type.Q8_0, gguf.GGMLQuantizationType.Q8_0, 34),
    "q4_0": (Type.Q4_0, gguf.GGMLQuantizationType.Q4_0, 18),
}
KV_PAD = 256  # llama.cpp pads the cells that an attention op sees
MEMORY = 96 << 20  # bytes of K and V that no cache holds
MOST_COPIES = 96


@dataclass(frozen=True)
class Case:
    """`rows` sequences with `own` cells each behind a prompt of `shared` cells; or one sequence's prefill of `rows`."""

    name: str
    rows: int
    shared: int
    own: int
    prefill: bool = False
    from_memory: bool = False

    def mask(self) -> npt.NDArray[np.float16]:
        """Shape (rows, n_kv): 0 where the row sees the cell, else -inf."""
        used = self.shared if self.prefill else self.shared + self.rows * self.own
        mask = np.full((self.rows, -(-used // KV_PAD) * KV_PAD), -np.inf, np.float16)
        for r in range(self.rows):
            if self.prefill:  # the last `rows` of `shared` cells are the rows' own, each sees those up to itself
                mask[r, : self.shared - self.rows + r + 1] = 0
            else:
                mask[r, : self.shared] = 0
                start = self.shared + r * self.own
                mask[r, start : start + self.own] = 0
        return mask


CASES = [
    Case("decode 1 row, 1024 cells", 1, 1024, 0),
    Case("decode 16 rows, 4096 shared, 64 own", 16, 4096, 64),
    Case("decode 16 rows, 1024 own", 16, 0, 1024),
    Case("prefill 512 rows, 4096 cells", 512, 4096, 0, prefill=True),
    Case("decode 1 row, 4096 cells, from memory", 1, 4096, 0, from_memory=True),
    Case("decode 16 rows, 4096 shared, 64 own, from memory", 16, 4096, 64, from_memory=True),
    Case("decode 16 rows, 1024 own, from memory", 16, 0, 1024, from_memory=True),
]


def long_cases(depth: int) -> list[Case]:
    return [
        Case(f"decode 1 row, {depth} cells, from memory", 1, depth, 0, from_memory=True),
        Case(f"decode 8 rows, {depth} own, from memory", 8, 0, depth, from_memory=True),
        Case(f"prefill 512 rows, {depth} cells", 512, depth, 0, prefill=True),
    ]


class NpuAttention:
    """The same op as `CpuAttention` on the executor."""

    def __init__(
        self,
        type: str,
        q: npt.NDArray[np.float32],
        k: npt.NDArray[np.uint8],
        v: npt.NDArray[np.uint8],
        mask: npt.NDArray[np.float16],
        scale: float,
        threads: int,
        isa: str | None,
        copies: int = 1,
    ) -> None:
        self._npu = npu = NpuOps(threads, isa)
        (heads, n, dim), (n_kv, kv_heads, row) = q.shape, k.shape
        kind, _, element = TYPES[type]
        self._out, self._shape = npu.buffer(n * heads * dim * 4, writable=True), (n, heads, dim)
        cache = (dim, n_kv, kv_heads), (element, row * kv_heads, row, row * kv_heads * n_kv)
        query, hidden = npu.buffer(q), npu.buffer(mask)
        for _ in range(copies):
            npu.add(
                ggml_ext.lib.TB_OP_FLASH_ATTN,
                Tensor(self._out, Type.F32, (dim, heads, n), (4, 4 * dim, 4 * dim * heads, 4 * dim * heads * n)),
                [
                    Tensor(query, Type.F32, (dim, n, heads), (4, 4 * dim, 4 * dim * n, 4 * dim * n * heads)),
                    Tensor(npu.buffer(k), kind, *cache),
                    Tensor(npu.buffer(v), kind, *cache),
                    Tensor(hidden, Type.F16, (n_kv, n), (2, 2 * n_kv, 2 * n_kv * n)),
                ],
                [scale, 0.0, 0.0],
            )
        self.kernel = npu.kernel
        self.run, self.close = npu.run, npu.close

    def result(self) -> npt.NDArray[np.float32]:
        """Shape (n, H, D)."""
        return self._npu.contents(self._out, np.float32).reshape(self._shape)


def measure(case: Case, type: str, args: argparse.Namespace, peak: float) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    mask = case.mask()
    heads, kv_heads, dim = args.heads
    q = rng.standard_normal((heads, case.rows, dim), np.float32)
    floats = [rng.standard_normal((mask.shape[1], kv_heads, dim), np.float32) for _ in range(2)]
    k, v = (np.ascontiguousarray(gguf.quantize(x, TYPES[type][1])).view(np.uint8) for x in floats)
    scale = dim**-0.5
    copies = min(MOST_COPIES, -(-MEMORY // (k.nbytes + v.nbytes))) if case.from_memory else 1
    ours = NpuAttention(type, q, k, v, mask, scale, args.threads, args.isa, copies)
    stock = CpuAttention(type, q, k, v, mask, scale, args.threads, copies)
    ours.run()
    stock.run()
    error = np.linalg.norm(ours.result() - stock.result()) / np.linalg.norm(stock.result())
    if not error < 0.05:  # the stock backend sums V in FP16: 0.025 over 30720 cells, where ours is off by 0.0005
        raise RuntimeError(f"{case.name}: the two results differ by {error:.4f}")
    work = 4e-9 * dim * heads * np.count_nonzero(mask == 0) * copies
    pairs = report.interleave(ours.run, stock.run, args.rounds, args.seconds)
    ours.close()
    stock.close()
    return report.row(f"{case.name}, {type}", pairs, work, "GFLOPS", peak, kernel=ours.kernel)


def main() -> None:
    p = Parser(__doc__, "fewer and shorter rounds")
    p.add_argument("--type", default="f16,q8_0", help=f"of K and V, of {', '.join(TYPES)}")
    p.add_argument("--heads", default="12,2,128", help="query heads, KV heads, elements of a head")
    p.add_argument("--depths", default="", help="cells of a sequence: cases of long contexts instead")
    p.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    p.add_threads()
    p.add_argument("--isa", help="kernel set (default: the best)")
    p.add_rounds(11, 3)
    args = p.parse()
    args.heads = tuple(int(n) for n in args.heads.split(","))
    cases = [case for n in args.depths.split(",") if n for case in long_cases(int(n))] or CASES
    args.seconds = 0.05 if args.quick else 0.15
    peak = limits.fma_gflops(args.threads, 0.1)
    rows = report.Rows("attention", args.json)
    for type in args.type.split(","):
        for case in cases:
            if args.only in case.name:
                rows.add(measure(case, type, args, peak))
    rows.finish({"fma_gflops": round(peak, 1)})


if __name__ == "__main__":
    report.start(main)
