"""MUL_MAT alone: the NPU executor against the stock CPU backend, and the share of the machine's limits.

Rounds interleave limits, executor and baseline; figures are medians over rounds, ratios are taken within a round.
Weights are rotated through enough copies that they come from memory, as in a real decode step. Shares: of the int8
peak for many rows, of the read bandwidth for one.

    PYTHONPATH=python:. python bench/gemm.py [--json] [--quick] [--types q4_0,q8_0] [--rows 1,8,16,512]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ggml_cpu
import limits
from tilebeam import _npu

import ggml_ext
from ggml_ext import Type

PLAIN = {"q4_0": Type.Q4_0, "q8_0": Type.Q8_0, "iq4_nl": Type.IQ4_NL, "f16": Type.F16, "f32": Type.F32}
MIN_WEIGHT_BYTES = 64 << 20  # of all copies together: more than the last-level cache keeps


def random_weights(type: str, k: int, n: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bytes of a weight matrix in its plain type; quants of any value, scales around 0.01."""
    if type in ("f16", "f32"):
        values = rng.standard_normal((n, k), np.float32)
        return values.astype(np.float16 if type == "f16" else np.float32).reshape(-1).view(np.uint8)
    quants = 32 if type == "q8_0" else 16
    blocks = rng.integers(0, 256, (n * k // 32, 2 + quants), np.uint8)
    scales = (rng.uniform(0.005, 0.02, n * k // 32)).astype(np.float16)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    return blocks.reshape(-1)


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialized memory that starts on a page, as mapped tiles do."""
    raw = np.empty(size + 4096, np.uint8)
    return raw[-raw.ctypes.data % 4096 :][:size]


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
        self._ffi, self._lib = _npu.load()
        m, k = x.shape
        plain = PLAIN[type]
        kind = ggml_ext.tile_type(plain) if tile_group else ggml_ext.column_type(plain)
        if tile_group and kind is not None:
            data = ggml_ext.quantize(kind, ggml_ext.dequantize(plain, weights, k, n))
        else:
            data = weights if kind is None else ggml_ext.pack(kind, weights, k, n)
        kind = plain if kind is None else kind
        self._memory = [aligned(data.nbytes * copies), aligned(x.nbytes), aligned(m * n * 4)]
        self._memory[0].reshape(copies, -1)[:] = data
        self._memory[1][:] = x.reshape(-1).view(np.uint8)
        self._npu = self._lib.tb_npu_create(threads, self._ffi.NULL if isa is None else isa.encode())
        if self._npu == self._ffi.NULL:
            raise RuntimeError(f"no kernel set {isa}")
        for i, body in enumerate(self._memory):
            if self._lib.tb_npu_map(self._npu, i, self._ffi.cast("void *", body.ctypes.data), body.nbytes, i == 2):
                raise RuntimeError("mapping failed")
        self._ops = self._ffi.new("tb_op[]", copies)
        element = int(ggml_ext.lib.tb_type_size(kind)) or 1
        row = data.nbytes // n if ggml_ext.column_type(plain) is None else 1
        for i in range(copies):
            op = self._ops[i]
            op.code, op.n_src = ggml_ext.lib.TB_OP_MUL_MAT, 2
            self._fill(op.src[0], 0, kind, (k, n), (element, row, data.nbytes), i * data.nbytes)
            self._fill(op.src[1], 1, Type.F32, (k, m), (4, 4 * k, 4 * k * m), 0)
            self._fill(op.dst, 2, Type.F32, (n, m), (4, 4 * n, 4 * n * m), 0)
        self.kernel = self._ffi.string(self._lib.tb_npu_kernel_name(self._npu, self._ops)).decode()
        self.weight_bytes = data.nbytes
        self._shape, self._reply = (m, n), self._ffi.new("tb_reply *")

    def _fill(
        self, t: Any, buffer: int, type: Type, ne: tuple[int, int], nb: tuple[int, int, int], offset: int
    ) -> None:
        t.buffer, t.type, t.offset = buffer, type, offset
        for i, (count, stride) in enumerate(zip((*ne, 1, 1), (*nb, nb[2]), strict=True)):
            t.ne[i], t.nb[i] = count, stride

    def run(self) -> None:
        """Compute all products once."""
        if self._lib.tb_npu_run(self._npu, self._ops, len(self._ops), self._reply) != 0:
            raise RuntimeError(self._ffi.string(self._reply.why).decode())

    def result(self) -> npt.NDArray[np.float32]:
        """The last product, shape (M, N)."""
        return self._memory[2].view(np.float32).reshape(self._shape)

    def close(self) -> None:
        """End the executor's threads; the object cannot be used afterwards."""
        self._lib.tb_npu_free(self._npu)


def seconds_of(run: Callable[[], None], least: float) -> float:
    """Mean time of one call over at least ``least`` seconds."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= least:
            return elapsed / count


def measure(type: str, m: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """One row of the report."""
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
    values, baselines, ratios, peaks, reads = [], [], [], [], []
    for product in (ours, stock):
        product.run()
    error = np.linalg.norm(ours.result() - stock.result()) / np.linalg.norm(stock.result())
    if not error < 0.1:
        raise RuntimeError(f"{type}: the two results differ by {error:.3f}")
    for _ in range(args.rounds):
        peaks.append(limits.int8_gops(args.threads))
        reads.append(limits.read_gbs(args.threads))
        time.sleep(0.005)  # the baseline's workers spin for a while after each run
        own = seconds_of(ours.run, args.seconds)
        base = seconds_of(stock.run, args.seconds)
        time.sleep(0.005)
        values.append(work / own)
        baselines.append(work / base)
        ratios.append(base / own)
    ours.close()
    stock.close()
    rate = median(values)
    bandwidth = traffic * rate / work
    return {
        "name": f"{type} M={m}",
        "kernel": ours.kernel,
        "baseline": round(median(baselines), 2),
        "value": round(rate, 2),
        "unit": "GOPS",
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "gb_per_s": round(bandwidth, 2),
        "int8_peak": round(median(peaks), 1),
        "read_peak": round(median(reads), 2),
        "share_of_int8": round(rate / median(peaks), 3),
        "share_of_read": round(bandwidth / median(reads), 3),
        "share_of_limit": round(bandwidth / median(reads) if m == 1 else rate / median(peaks), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--types", default="q4_0,q8_0,iq4_nl,q4_0_tile", help="also q8_0_tile, f16, f32")
    parser.add_argument("--rows", default="1,4,8,16,512", help="values of M")
    parser.add_argument("-k", type=int, default=2048)
    parser.add_argument("-n", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=limits.machine()["cpus"])
    parser.add_argument("--isa", help="kernel set (default: the best)")
    parser.add_argument("-r", "--rounds", type=int)
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 15)
    args.seconds = 0.05 if args.quick else 0.15
    rng = np.random.default_rng(1)
    rows = []
    for type in args.types.split(","):
        for m in (int(v) for v in args.rows.split(",")):
            row = measure(type, m, args, rng)
            rows.append(row)
            if not args.json:
                print(
                    f"{row['name']:18} {row['value']:8.1f} GOPS {row['gb_per_s']:6.1f} GB/s   "
                    f"{row['ratio']:5.2f}x [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}] of the CPU backend's "
                    f"{row['baseline']:.1f}   {row['share_of_int8']:4.0%} of int8 peak, {row['share_of_read']:4.0%} of "
                    f"read bandwidth   {row['kernel']}",
                    flush=True,
                )
    peak = {"int8_gops": median(r["int8_peak"] for r in rows), "read_gbs": median(r["read_peak"] for r in rows)}
    if args.json:
        print(json.dumps({"bench": "gemm", "machine": limits.machine(), "limits": peak, "rows": rows}))


if __name__ == "__main__":
    main()
