"""MUL_MAT alone: the NPU executor against the stock CPU backend, and the share of the machine's limits.

Rounds interleave limits, executor and baseline; figures are medians over rounds, ratios are taken within a round.
Weights are rotated through enough copies that they come from memory, as in a real decode step. Shares: of the int8
peak for many rows, of the read bandwidth for one.

    python -m bench.gemm [--json] [--quick] [--types q4_0,q8_0] [--rows 1,8,16,512]
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from bench.lib import ggml_cpu, limits, report
from bench.lib.op_list import NpuOps, Tensor
from bench.lib.options import Parser

PLAIN = {t.label: t for t in Type if t.is_multiplied and not ggml_ext.is_tiled(t)}
# Where in a block its FP16 scales and minima are, where that is not at the front.
HALVES = {
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "iq1_m": (),  # in pieces
}
MIN_WEIGHT_BYTES = 256 << 20  # of all copies together: a last-level cache keeps a part even of twice its size


def random_weights(type: str, k: int, n: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bytes of a weight matrix in its plain type; quants of any value, scales around 0.01."""
    if type in ("f16", "bf16", "f32"):
        values = rng.standard_normal((n, k), np.float32)
        if type == "bf16":  # the upper halves
            return np.ascontiguousarray(values.view(np.uint16).reshape(-1)[1::2]).view(np.uint8)
        return values.astype(np.float16 if type == "f16" else np.float32).reshape(-1).view(np.uint8)
    plain = PLAIN[type]
    count = n * k // int(ggml_ext.lib.tb_type_block(plain))
    blocks = rng.integers(0, 256, (count, int(ggml_ext.lib.tb_type_size(plain))), np.uint8)
    if type == "mxfp4":  # a power of two
        blocks[:, 0] = rng.integers(119, 122, count)
    if type == "iq1_m":  # the topmost four bits of its scale: 1/128 to 1/64
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20
    for at in () if type == "mxfp4" else HALVES.get(type, (0,)):
        scales = rng.uniform(0.005, 0.02, count).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(-1)


class NpuMulMat:
    """``copies`` products of one shape, one op each, on the executor; tiled weights where the type has tiles.

    Args:
        tile_group: quantize to `tile` grouping instead of packing losslessly.
    """

    def __init__(
        self,
        type: str,
        weights: npt.NDArray[np.uint8],
        x: npt.NDArray[np.float32],
        n: int,
        copies: int,
        threads: int,
        isa: str | None = None,
        tile_group: bool = False,
    ) -> None:
        m, k = x.shape
        plain = PLAIN[type]
        kind = ggml_ext.tile_type(plain) if tile_group else ggml_ext.column_type(plain)
        if tile_group and kind is not None:
            data = ggml_ext.quantize(kind, ggml_ext.dequantize(plain, weights, k, n))
        else:
            data = weights if kind is None else ggml_ext.pack(kind, weights, k, n)
        kind = plain if kind is None else kind
        self.weight_bytes = data.nbytes
        self._npu = NpuOps(threads, isa)
        w, a = self._npu.buffer(np.tile(data, copies)), self._npu.buffer(x)
        self._result, self._shape = self._npu.buffer(m * n * 4, writable=True), (m, n)
        element = int(ggml_ext.lib.tb_type_size(kind)) or 1
        row = data.nbytes // n if ggml_ext.column_type(plain) is None else 1
        for i in range(copies):
            self._npu.add(
                ggml_ext.lib.TB_OP_MUL_MAT,
                Tensor(self._result, Type.F32, (n, m), (4, 4 * n, 4 * n * m)),
                [
                    Tensor(w, kind, (k, n), (element, row, data.nbytes), i * data.nbytes),
                    Tensor(a, Type.F32, (k, m), (4, 4 * k, 4 * k * m)),
                ],
            )
        self.kernel = self._npu.kernel
        self.run, self.close = self._npu.run, self._npu.close

    def result(self) -> npt.NDArray[np.float32]:
        """Return the last product, shape (M, N)."""
        return self._npu.contents(self._result, np.float32).reshape(self._shape)


def measure(type: str, m: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    k, n = args.k, args.n
    tile_group = type.endswith("_tile")
    plain = type.removesuffix("_tile")
    weights = random_weights(plain, k, n, rng)
    x = rng.standard_normal((m, k), np.float32)
    copies = max(1, -(-MIN_WEIGHT_BYTES // weights.nbytes)) if m <= 32 else 1
    ours = NpuMulMat(plain, weights, x, n, copies, args.threads, args.isa, tile_group)
    stock = ggml_cpu.CpuMulMat(plain, weights, x, n, copies, args.threads)
    work = 2e-9 * k * n * m * copies
    traffic = 1e-9 * ours.weight_bytes * copies
    for product in (ours, stock):
        product.run()
    error = np.linalg.norm(ours.result() - stock.result()) / np.linalg.norm(stock.result())
    if not error < 0.1:
        raise RuntimeError(f"{type}: the two results differ by {error:.3f}")
    peak, read = limits.int8_gops(args.threads, 0.1), limits.read_gbs(args.threads)
    pairs = report.interleave(ours.run, stock.run, args.rounds, args.seconds)
    ours.close()
    stock.close()
    rate = work / median(pairs.ours)
    bandwidth = traffic * rate / work
    return report.row(
        f"{type} M={m}",
        pairs,
        work,
        "GOPS",
        kernel=ours.kernel,
        gb_per_s=round(bandwidth, 2),
        int8_peak=round(peak, 1),
        read_peak=round(read, 2),
        share_of_int8=round(rate / peak, 3),
        share_of_read=round(bandwidth / read, 3),
    ) | {"share_of_limit": report.three_digits(bandwidth / read if m == 1 else rate / peak)}


def main() -> None:
    p = Parser(__doc__, "fewer and shorter rounds")
    p.add_argument("--types", default="q4_0,q8_0,iq4_nl,q4_0_tile", help=f"of {', '.join(PLAIN)}, and q8_0_tile")
    p.add_argument("--rows", default="1,4,8,16,512", help="values of M")
    p.add_argument("-k", type=int, default=2048)
    p.add_argument("-n", type=int, default=8192)
    p.add_threads()
    p.add_argument("--isa", help="kernel set (default: the best)")
    p.add_rounds(15, 5)
    args = p.parse()
    args.seconds = 0.05 if args.quick else 0.15
    rng = np.random.default_rng(1)
    rows = report.Rows("gemm", args.json)
    for type in args.types.split(","):
        for m in (int(v) for v in args.rows.split(",")):
            rows.add(measure(type, m, args, rng))
    peaks = {"int8_gops": "int8_peak", "read_gbs": "read_peak"}
    rows.finish({name: median(r[figure] for r in rows.rows) for name, figure in peaks.items()})


if __name__ == "__main__":
    report.start(main)
