"""What quantizing a model's weights costs, by method: llama.cpp's own, and Tilebeam's with and without search.

    python -m bench.quantize_error [-m MODEL.gguf] [--imatrix IMATRIX.gguf] [--json] [--quick]

Every matrix that a layer multiplies by is quantized from the same float32 values by every method. The value is the
squared error, summed over the model, as a share of the squared values; the baseline is that of llama.cpp's round to
nearest in the same type, what it does without an importance matrix. With --imatrix a row has the weighted error too,
and there are methods that were told the importance ("imatrix"). Without -m it is gemma-3-270m (--quick: a small random
model, two matrices).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.cli import console
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.imatrix_file import importance_of, load_imatrix
from tilebeam.gguf.quantize import ErrorSum, Floats, quantize_rows
from tilebeam.gguf.weights import fits_tiles, has_values, to_float

from bench.lib import gemma, models, report
from bench.lib.options import Parser

_NO_ERROR = 1e-30  # of weights that a type holds as they are
# What Tilebeam quantizes to, in either grouping.
PLAIN = tuple(t for t in Type if not ggml_ext.is_tiled(t) and ggml_ext.tile_type(t) is not None)
# (values (N, K), importance or None) -> (type, stored bytes)
Method = Callable[[Floats, Floats | None], tuple[Type, ggml_ext.Bytes]]


def llama(plain: Type) -> Method:
    import llama_cpp

    lib = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    call: Any = lib.ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def run(x: Floats, w: Floats | None) -> tuple[Type, ggml_ext.Bytes]:
        n, k = x.shape
        out = np.empty(n * ggml_ext.row_bytes(plain, k), np.uint8)
        call(plain.ggml, x.ctypes.data, out.ctypes.data, 0, n, k, None if w is None else w.ctypes.data)
        return plain, out

    return run


def tiles(type: Type, search: bool, threads: int) -> Method:

    def run(x: Floats, w: Floats | None) -> tuple[Type, ggml_ext.Bytes]:
        return type, quantize_rows(type, x, search=search, weights=w, threads=threads)

    return run


def methods(threads: int) -> dict[str, tuple[Type, bool, Method]]:
    """Name -> (plain type, is it told the importance, how)."""
    out: dict[str, tuple[Type, bool, Method]] = {}
    for plain in PLAIN:
        out[f"{plain.label} llama.cpp"] = (plain, False, llama(plain))
        if plain != Type.Q8_0:  # whose quantizer in llama.cpp heeds no importance
            out[f"{plain.label} llama.cpp, imatrix"] = (plain, True, llama(plain))
        for grouping, type in (("column", ggml_ext.column_type(plain)), ("tile", ggml_ext.tile_type(plain))):
            if type is not None:
                out[f"{plain.label} {grouping}"] = (plain, False, tiles(type, False, threads))
                out[f"{plain.label} {grouping}, search"] = (plain, False, tiles(type, True, threads))
                out[f"{plain.label} {grouping}, search, imatrix"] = (plain, True, tiles(type, True, threads))
    return out


def row(name: str, error: ErrorSum, base: ErrorSum, seconds: float, weighted: bool) -> dict[str, Any]:
    ours, baseline = (100 * e.relative_rms**2 for e in (error, base))
    more = {"weights_per_second": round(error.count / seconds)}
    if weighted:
        more["weighted_error_ratio"] = round(base.weighted / error.weighted, 4)
    ratios = [max(base.squared, _NO_ERROR) / max(error.squared, _NO_ERROR)]
    return report.figures(name, round(baseline, 5), round(ours, 5), "% of values^2", ratios, None, **more)


def measure(path: Path, imatrix: Path | None, threads: int, most: int | None) -> list[dict[str, Any]]:
    """Quantize the first `most` matrices (None: all) by every method.

    Raises:
        RuntimeError: the file has no matrix that tiles could hold.
    """
    importance = load_imatrix(imatrix) if imatrix else {}
    todo = {name: m for name, m in methods(threads).items() if imatrix or not m[1]}
    sums = {name: ErrorSum() for name in todo}
    seconds = dict.fromkeys(todo, 0.0)
    with GGUFFile(path) as f, console.bar("quantize") as progress:
        wanted = [t for t in f.tensors.values() if fits_tiles(t) and len(t.ne) == 2 and has_values(t.type)][:most]
        if not wanted:
            raise RuntimeError(f"{path} has no matrix that tiles could hold")
        task = progress.add_task("", total=len(wanted), note="")
        for t in wanted:
            progress.update(task, advance=1, description=t.name)
            x = to_float(t.type, f.read(t.offset, t.nbytes), t.k, t.rows)
            found = importance_of(importance, t)
            w = None if found is None else np.ascontiguousarray(found[0])
            for name, (_, told, method) in todo.items():
                started = time.perf_counter()
                type, data = method(x, w if told else None)
                seconds[name] += time.perf_counter() - started
                sums[name].add_values(x, ggml_ext.dequantize(type, data, t.k, t.rows), w)
    return [
        row(name, sums[name], sums[f"{plain.label} llama.cpp"], seconds[name], imatrix is not None)
        for name, (plain, _, _) in todo.items()
    ]


def main() -> None:
    p = Parser(__doc__, "a small model, two matrices")
    p.add_model("GGUF with the best weights at hand", "gemma-3-270m")
    p.add_argument("--imatrix", type=Path, help="importance matrix of this model")
    p.add_threads()
    args = p.parse()
    path = args.model or (models.synthetic("small", "f16") if args.quick else gemma.model())
    rows = report.Rows("quantize_error", args.json)
    for found in measure(path, args.imatrix, args.threads, 2 if args.quick else None):
        rows.add(found)
    rows.finish()


if __name__ == "__main__":
    report.start(main)
