"""Ways to compute the exponent of attention's softmax, FP16 in and out: what the look-up table is measured against.

    python -m bench.papers.softmax_exp [--json] [--quick]

32-bit exp, a 16-bit fixed-point polynomial, the 64 KiB table with gathers, and what this CPU's attention kernels do
(in registers where they return the table's bits). It is the exponent alone: the paper's figure 14 times the whole
softmax on the NPU, with the row's maximum, the subtraction and the sum. One thread, over that figure's numbers of
queries and KV cells. The baseline of every row is the 32-bit exp, the share of the limit that of a copy from FP16 to
FP16. Errors are in units of the last place of FP16 against the correctly rounded result; the fixed-point way has an
absolute error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam.native import executor as _npu

from bench.lib import limits, report
from bench.lib.options import Parser

Bits = npt.NDArray[np.uint16]
Method = Callable[[Bits, Bits, int], None]  # the last: how many times over
PER_CALL = 1 << 18  # exponents at least for a call from Python


@cache
def exact() -> Bits:
    """exp2 of every non-positive FP16 number, rounded once, as FP16 bits; index 0 is -0."""
    with np.errstate(all="ignore"):
        x = (np.arange(32768, dtype=np.uint16) | np.uint16(0x8000)).view(np.float16).astype(np.float64)
        return np.exp2(x).astype(np.float16).view(np.uint16)


def methods(isa: str) -> dict[str, Method]:
    """Return the ways by name; each reads FP16 bits and writes FP16 bits, the fixed-point one units of 2^-15."""
    lib = limits.compile("papers/softmax_exp.cpp")
    ffi, npu = _npu.load()
    handle = npu.tb_npu_create(1, isa.encode())
    function = int(ffi.cast("uintptr_t", ffi.addressof(npu, "tb_npu_exp2_fp16")))
    kernel = (ctypes.c_void_p * 2)(function, int(ffi.cast("uintptr_t", handle)))

    def of(name: str, more: Any = None) -> Method:
        way = ctypes.cast(getattr(lib, f"tb_exp_{name}"), ctypes.c_void_p)

        def call(source: Bits, out: Bits, repeats: int) -> None:
            buffers = ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(out.ctypes.data)
            lib.tb_exp_repeat(way, *buffers, ctypes.c_size_t(out.size), more, ctypes.c_size_t(repeats))

        return call

    return {
        "float32": of("float32"),
        "fixed16": of("fixed16"),
        "table": of("table", ctypes.c_void_p(exact().ctypes.data)),
        f"kernel {isa}": of("kernel", kernel),
        "copy": of("copy"),
    }


def errors(method: Method, fixed: bool) -> dict[str, float]:
    """Return the errors over all FP16 numbers from -16 to 0: the largest in ulp and the share of wrong ones, or for
    fixed point the largest absolute one."""
    source = np.arange(0x8000, 0x8000 + 0x4C00, dtype=np.uint16)[: 0x4C00 // 64 * 64]
    out = np.zeros_like(source)
    method(source, out, 1)
    want = exact()[: source.size]
    values = out / 32768.0 if fixed else out.view(np.float16).astype(np.float64)
    if fixed:
        wrong = np.abs(values - want.view(np.float16).astype(np.float64))
        return {"max_abs_error": float(wrong.max())}
    ulps = np.abs(out.astype(np.int64) - want.astype(np.int64))
    return {"max_ulp": int(ulps.max()), "wrong_share": float(np.mean(ulps > 0))}


def main() -> None:
    p = Parser(__doc__, "fewer shapes, fewer and shorter rounds")
    p.add_argument("--isa", default=_npu.isas()[0], help="kernel set (default: the best)")
    p.add_rounds(15, 5)
    args = p.parse()
    shapes = [(q, kv) for q in (1, 4, 16) for kv in (1024, 4096, 16384)]
    if args.quick:
        shapes = [(1, 1024), (16, 4096)]
    least = 0.01 if args.quick else 0.02
    ways = methods(args.isa)
    rng = np.random.default_rng(1)
    rows = report.Rows("softmax_exp", args.json)
    copies: list[float] = []
    for queries, cells in shapes:
        # Scores of a softmax lie within some units of the largest; in units of log2.
        source = (-np.abs(rng.standard_normal(queries * cells) * 6)).astype(np.float16).view(np.uint16)
        out = np.zeros_like(source)
        repeats = -(-PER_CALL // source.size)
        work = source.size * repeats * 1e-9

        def run(way: str) -> Callable[[], None]:
            return lambda: ways[way](source, out, repeats)  # noqa: B023

        copy = report.interleave(run("copy"), lambda: None, 3, least, 0.0)
        copies.append(work / min(copy.ours))
        for name, way in ways.items():
            if name in ("copy", "float32"):
                continue
            pairs = report.interleave(run(name), run("float32"), args.rounds, least, 0.0)
            shape = f"{queries} {'query' if queries == 1 else 'queries'} x {cells} cells"
            more = errors(way, name == "fixed16")
            rows.add(report.row(f"{name}, {shape}", pairs, work, "Gexp/s", copies[-1], **more))
    wrong = [f"{name:24} {errors(way, name == 'fixed16')}" for name, way in ways.items() if name != "copy"]
    rows.finish({"copy_g_per_s": round(max(copies), 2)}, *wrong)


if __name__ == "__main__":
    report.start(main)
