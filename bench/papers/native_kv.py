"""K and V in the matrix unit's layout, and in BF16: what attention would gain, and what BF16 costs a model.

    python -m bench.papers.native_kv [--rows 1,6,16,96] [--json] [--quick]
    python -m bench.papers.native_kv -m MODEL.gguf -f wiki.test.raw    (and perplexities)

An NPU inference service keeps K in tiles of 256 cells and V in tiles of 64, interleaved as its matrix unit reads them.
Here both are that on a CPU (native_kv.cpp, AVX-512): one head against 4096 cells, one thread, rows of queries.
The baseline is the product's kernel of the same step, which reads cells as llama.cpp lays them out, in F16. FP16 tiles
hold the same numbers. BF16 tiles are multiplied by vdpbf16ps, queries and softmax weights in BF16, too: twice the
products of an instruction, and no widening.

scores, accumulation    value: 10^9 operations a second; "error": relative to float64 from the same F16 cells
write                   value: 10^9 bytes a second of new cells, put into tiles one after the other; baseline: copied
perplexity              with -m: of a window's last tokens, all else in float32
"""

from __future__ import annotations

import argparse
import ctypes
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam.cli.bench import numbers

from bench.lib import limits, report
from bench.lib.options import Parser
from bench.lib.report import Pairs
from bench.papers import numpy_scores
from bench.papers.attention_stages import EXACT, TILE, Stages
from bench.papers.numpy_model import F32, Model, Numerics, softmax
from bench.papers.numpy_scores import Way

U16 = npt.NDArray[np.uint16]
DIM, CELLS = 128, 4096
STEPS = {"scores": 0, "accumulation": 2}  # by their place among the product's steps
ISA = "avx512vnni"


def to_bf16(x: F32) -> U16:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded: U16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def bf16(x: F32) -> F32:
    """Round numbers to BF16."""
    rounded: F32 = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    return rounded


class Tiles:
    """A step's product over tiles that were written cell by cell.

    Args:
        step: of STEPS.
        left: queries (rows, DIM) or weights (rows, CELLS).
        cells: K or V, (CELLS, DIM).
        narrow: BF16 instead of FP16.
    """

    def __init__(self, step: str, left: F32, cells: F32, narrow: bool) -> None:
        self._library, self._step = library(), list(STEPS).index(step)
        self._left = to_bf16(left) if narrow else np.ascontiguousarray(left)
        self.cells = to_bf16(cells) if narrow else cells.astype(np.float16).view(np.uint16)
        self.tiles = np.empty_like(self.cells)
        self.write()
        self._narrow, self._rows = narrow, len(left)
        self.result = np.empty((len(left), CELLS if self._step == 0 else DIM), np.float32)

    def write(self) -> None:
        pointers = [ctypes.c_void_p(v.ctypes.data) for v in (self.cells, self.tiles)]
        self._library.tb_native_kv_write(self._step, *pointers, *_sizes(CELLS, DIM))

    def run(self, repeats: int) -> None:
        left, tiles, out = (ctypes.c_void_p(v.ctypes.data) for v in (self._left, self.tiles, self.result))
        self._library.tb_native_kv(
            self._narrow, self._step, left, *_sizes(self._rows), tiles, *_sizes(CELLS, DIM, repeats), out
        )


def library() -> ctypes.CDLL:
    """Load the products.

    Raises:
        RuntimeError: this CPU has no AVX-512.
    """
    found = limits.compile("papers/native_kv.cpp")
    if not found.tb_native_kv_types():
        raise RuntimeError("this CPU has no AVX-512")
    return found


def _sizes(*values: int) -> list[ctypes.c_size_t]:
    return [ctypes.c_size_t(v) for v in values]


def measure(rows: int, narrow: bool, args: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    cells = rng.standard_normal((CELLS, DIM), np.float32).astype(np.float16).astype(np.float32)
    lefts = {"scores": rng.standard_normal((rows, DIM), np.float32)}
    lefts["accumulation"] = softmax(3 * rng.standard_normal((rows, CELLS), np.float32), np.ones((1, CELLS), np.bool_))
    stages = Stages(ISA, CELLS, DIM)
    found = []
    for step, left in lefts.items():
        ours = Tiles(step, left, cells, narrow)
        ours.run(1)
        exact = left.astype(np.float64) @ (cells.T if step == "scores" else cells)
        error = float(np.linalg.norm(ours.result - exact) / np.linalg.norm(exact))
        if error > (1e-2 if narrow else 1e-5):
            raise RuntimeError(f"{step}, {rows} rows: an error of {error:.2g}")
        repeats = max(1, round(args.seconds / report.seconds_of(partial(ours.run, 1), args.seconds / 4)))
        pairs = Pairs([], [])
        for _ in range(args.rounds):
            pairs.ours.append(report.seconds_of(partial(ours.run, repeats), args.seconds) / repeats)
            pairs.baseline.append(stages.seconds(rows, EXACT, repeats)[STEPS[step]])
        name = f"{step}, {rows} {'query' if rows == 1 else 'queries'}, {'BF16' if narrow else 'FP16'}"
        work = 2e-9 * rows * CELLS * DIM
        found.append(report.row(name, pairs, work, "GFLOPS", peak, error=float(f"{error:.2g}")))
    stages.close()
    return found


def writing(step: str, args: argparse.Namespace) -> dict[str, Any]:
    left = np.zeros((1, CELLS if step == "accumulation" else DIM), np.float32)
    tiles = Tiles(step, left, np.zeros((CELLS, DIM), np.float32), False)
    target = np.empty_like(tiles.cells)
    pairs = report.interleave(tiles.write, lambda: np.copyto(target, tiles.cells), args.rounds, args.seconds)
    return report.row(f"write, {'K' if step == 'scores' else 'V'}", pairs, 1e-9 * tiles.cells.nbytes, "GB/s")


def _narrow_scores(q: F32, k: F32, v: F32, seen: Any) -> tuple[F32, F32]:
    weights = softmax(bf16(q) @ bf16(k).T, seen)
    return weights, weights @ v


def _narrow_differences(q: F32, k: F32, v: F32, seen: Any) -> tuple[F32, F32]:
    """Attend as the product does: scores from K's differences from the middle cell of 64, whose score is added."""
    scores = np.empty((len(q), len(k)), np.float32)
    for c in range(0, len(k), TILE):
        tile = k[c : c + TILE]
        middle = tile[len(tile) // 2]
        scores[:, c : c + TILE] = bf16(q) @ bf16(tile - middle).T + (q @ middle)[:, None]
    weights = softmax(scores, seen)
    return weights, bf16(weights) @ bf16(v)


def _narrow_values(q: F32, k: F32, v: F32, seen: Any) -> tuple[F32, F32]:
    weights = softmax(q @ k.T, seen)
    return weights, bf16(weights) @ bf16(v)


def _ways(_model: Model, _prompt: int) -> list[Way]:
    return [
        Way("BF16 queries and keys", Numerics(attention=_narrow_scores)),
        Way("BF16 weights and values", Numerics(attention=_narrow_values)),
        Way("all in BF16, keys by differences", Numerics(attention=_narrow_differences)),
    ]


def main() -> None:
    p = Parser(__doc__, "fewer queries, fewer and shorter rounds")
    numpy_scores.add_options(p)
    p.add_argument("--rows", help="queries, comma separated (default 1,6,16,96; 6 with --quick)")
    p.add_rounds(9, 2)
    args = p.parse()
    args.seconds = 0.005 if args.quick else 0.05
    rows = report.Rows("native_kv", args.json)
    peak = limits.fma_gflops(1, 0.1)
    for count in numbers(args.rows or ("6" if args.quick else "1,6,16,96"), "--rows"):
        for narrow in (False, True)[: library().tb_native_kv_types()]:
            for row in measure(count, narrow, args, peak):
                rows.add(row, f"error {row['error']}")
    for step in STEPS:
        rows.add(writing(step, args))
    if args.model:
        for row in numpy_scores.compare(args, _ways):
            rows.add(row, numpy_scores.note(row))
    rows.finish({"fma_gflops": round(peak, 1)})


if __name__ == "__main__":
    report.start(main)
