"""What quantizing a model's weights costs, by method: llama.cpp's own, and Tilebeam's with and without search.

    python -m bench.quantize_error model-f32.gguf --imatrix model.imatrix.gguf --json out.json

Every matrix that a layer multiplies by is quantized from the same float32 values by every method. Errors are summed
over the model, as they are and weighted with the importance matrix, and shown as shares of llama.cpp's round to nearest
in the same type (what it does without an importance matrix). Methods called "imatrix" were told the importance.
llama.cpp's function runs on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.imatrix import importance_of, load_imatrix
from tilebeam.gguf.quantize import ErrorSum, Floats, quantize_rows
from tilebeam.gguf.weights import fits_tiles, has_values, to_float

GGML_NUMBER = {Type.Q4_0: 2, Type.Q8_0: 8, Type.IQ4_NL: 20}
# (values (N, K), importance or None) -> (type, stored bytes)
Method = Callable[[Floats, Floats | None], tuple[Type, ggml_ext.Bytes]]


def llama(plain: Type) -> Method:
    """ggml_quantize_chunk of the installed llama.cpp."""
    import llama_cpp

    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    call: Any = lib.ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def run(x: Floats, w: Floats | None) -> tuple[Type, ggml_ext.Bytes]:
        n, k = x.shape
        out = np.empty(n * ggml_ext.row_bytes(plain, k), np.uint8)
        call(GGML_NUMBER[plain], x.ctypes.data, out.ctypes.data, 0, n, k, None if w is None else w.ctypes.data)
        return plain, out

    return run


def tiles(type: Type, search: bool, threads: int) -> Method:
    """Tilebeam's quantizer."""

    def run(x: Floats, w: Floats | None) -> tuple[Type, ggml_ext.Bytes]:
        return type, quantize_rows(type, x, search=search, weights=w, threads=threads)

    return run


def methods(threads: int) -> dict[str, tuple[Type, bool, Method]]:
    """Name -> (plain type, is it told the importance, how)."""
    out: dict[str, tuple[Type, bool, Method]] = {}
    for plain in GGML_NUMBER:
        out[f"{plain.label} llama.cpp"] = (plain, False, llama(plain))
        if plain != Type.Q8_0:  # whose quantizer in llama.cpp heeds no importance
            out[f"{plain.label} llama.cpp, imatrix"] = (plain, True, llama(plain))
        for grouping, type in (("column", ggml_ext.column_type(plain)), ("tile", ggml_ext.tile_type(plain))):
            if type is not None:
                out[f"{plain.label} {grouping}"] = (plain, False, tiles(type, False, threads))
                out[f"{plain.label} {grouping}, search"] = (plain, False, tiles(type, True, threads))
                out[f"{plain.label} {grouping}, search, imatrix"] = (plain, True, tiles(type, True, threads))
    return out


def measure(path: Path, imatrix: Path | None, threads: int, limit: int | None) -> dict[str, dict[str, float]]:
    """Figures by method; ratios of errors, and weights quantized per second."""
    importance = load_imatrix(imatrix) if imatrix else {}
    todo = {name: m for name, m in methods(threads).items() if imatrix or not m[1]}
    sums = {name: ErrorSum() for name in todo}
    seconds = dict.fromkeys(todo, 0.0)
    with GGUFFile(path) as f:
        wanted = [t for t in f.tensors.values() if fits_tiles(t) and len(t.ne) == 2 and has_values(t.type)][:limit]
        if not wanted:
            sys.exit(f"{path} has no matrix that tiles could hold")
        for i, t in enumerate(wanted, 1):
            print(f"\r{i}/{len(wanted)} {t.name:40}", end="", file=sys.stderr)
            x = to_float(t.type, f.read(t.offset, t.nbytes), t.k, t.rows)
            found = importance_of(importance, t)
            w = None if found is None else np.ascontiguousarray(found[0])
            for name, (_, told, method) in todo.items():
                started = time.perf_counter()
                type, data = method(x, w if told else None)
                seconds[name] += time.perf_counter() - started
                sums[name].add_values(x, ggml_ext.dequantize(type, data, t.k, t.rows), w)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    out = {}
    for name, (plain, _, _) in todo.items():
        e, base = sums[name], sums[f"{plain.label} llama.cpp"]
        out[name] = {
            "relative_rms": e.relative_rms,
            "squared_error_ratio": e.squared / base.squared,
            "weighted_error_ratio": e.weighted / base.weighted,
            "weights_per_second": e.count / seconds[name],
        }
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("model", type=Path, help="GGUF with the best weights at hand")
    p.add_argument("--imatrix", type=Path, help="importance matrix of this model")
    p.add_argument("--tensors", type=int, help="only so many matrices")
    p.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--json", type=Path, help="write all figures")
    a = p.parse_args()
    figures = measure(a.model, a.imatrix, a.threads, a.tensors)
    print(f"{'method':34}{'rel. RMS %':>11}{'error':>8}{'weighted':>10}{'Mweights/s':>12}")
    for name, x in figures.items():
        rates = f"{x['squared_error_ratio']:8.4f}{x['weighted_error_ratio']:10.4f}"
        print(f"{name:34}{100 * x['relative_rms']:11.3f}{rates}{x['weights_per_second'] / 1e6:12.1f}")
    if a.json:
        about = {"model": a.model.name, "threads": a.threads, "figures": figures}
        a.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
