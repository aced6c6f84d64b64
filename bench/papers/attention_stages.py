"""What attention's time consists of: scores (QK), softmax and accumulation (PV), and the softmax by its exponent.

    python -m bench.papers.attention_stages [--json] [--quick] [--isa avx2] [-d 128]

The steps of the kernels that models run, on one thread, for one head: `rows` queries against a prompt of 4096 cells of
F16. It is the paper's figure 8, latency over the number of queries, and its figure 14, the whole on-chip softmax (row
maximum, subtraction, exponent, row sum) by how the exponent is computed.

split    value: microseconds of the step, per 64 cells; ratio: 1; "of_all": its share of the three
softmax  value: 10^9 scores a second through the whole softmax with the table's exponents, FP16; baseline: with float32
         exponentials
fp16     value: 10^9 operations a second of the products with FP16 operands and results (TILEBEAM_NUMERICS=fp16);
         baseline: in float32
"""

from __future__ import annotations

import ctypes
from functools import cache
from statistics import median

from tilebeam._ext import lib
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.native import executor as _npu

from bench.lib import ROOT, limits, report
from bench.lib.options import Parser

STEPS = ("scores", "softmax", "accumulation")
TABLE, EXACT, FP16 = 0, int(lib.TB_FLAG_EXACT_EXP), int(lib.TB_FLAG_FP16)
TILE = 64  # cells


@cache
def library() -> ctypes.CDLL:
    """attention_stages.cpp, which takes the kernels from libtilebeam_npu.so."""
    folders = (ROOT / "backend/npu", ROOT / "backend/base", ROOT / "ggml_ext/src")
    fp16 = ROOT / "backend/npu/ops/attention_fp16.cpp"
    return limits.compile("papers/attention_stages.cpp", "-fno-fast-math", *(f"-I{f}" for f in folders), str(fp16))


class Stages:
    """The kernels of one set.

    Raises:
        ValueError: this CPU does not run the set.
    """

    def __init__(self, isa: str, cells: int, dim: int) -> None:
        self._ffi, self._npu = _npu.load()
        self._handle = self._npu.tb_npu_create(1, isa.encode())
        if self._handle == self._ffi.NULL:
            raise ValueError(f"no kernel set {isa!r} here: {', '.join(_npu.isas())}")
        self._kernels = ctypes.c_void_p(int(self._ffi.cast("uintptr_t", self._npu.tb_npu_kernels(self._handle))))
        self._cells, self._dim = cells, dim

    def seconds(self, rows: int, flags: int, repeats: int) -> list[float]:
        out = (ctypes.c_double * 3)()
        library().tb_attention_stages(self._kernels, rows, self._cells, self._dim, flags, repeats, out)
        return [s / repeats for s in out]

    def close(self) -> None:
        self._npu.tb_npu_free(self._handle)


def measure(stages: Stages, rows: int, cells: int, dim: int, rounds: int, least: float) -> list[dict[str, object]]:
    once = sum(stages.seconds(rows, TABLE, 1))
    repeats = max(1, round(least / once))
    found: dict[int, list[list[float]]] = {TABLE: [], EXACT: [], FP16: []}
    for _ in range(rounds):
        for flags, runs in found.items():
            runs.append(stages.seconds(rows, flags, repeats))
    name = f"{rows} {'query' if rows == 1 else 'queries'}"
    columns = {flags: list(zip(*runs, strict=True)) for flags, runs in found.items()}
    table = [median(column) for column in columns[TABLE]]
    tiles = cells / TILE
    lines: list[dict[str, object]] = []
    for step, seconds in zip(STEPS, table, strict=True):
        value = round(1e6 * seconds / tiles, 3)
        more = {"of_all": round(seconds / sum(table), 3), "step": step, "queries": rows}
        lines.append(report.figures(f"split, {name}, {step}", value, value, "us/tile", [1.0], None, **more))
    softmax = report.Pairs(list(columns[TABLE][1]), list(columns[EXACT][1]))
    lines.append(report.row(f"softmax, {name}", softmax, 1e-9 * rows * cells, "Gscores/s", queries=rows))
    products = [[run[0] + run[2] for run in found[flags]] for flags in (FP16, EXACT)]
    work = 4e-9 * rows * cells * dim
    lines.append(report.row(f"fp16, {name}", report.Pairs(*products), work, "GFLOPS", queries=rows))
    return lines


def main() -> None:
    p = Parser(__doc__, "fewer queries, fewer and shorter rounds")
    p.add_argument("--isa", default=_npu.isas()[0], help="kernel set (default: the best)")
    p.add_argument("--queries", help="comma separated (default 1,2,4,8,16,32,64,128; 1,16 with --quick)")
    p.add_argument("-d", "--head-dim", type=int, default=128, help="elements of a head (default 128)")
    p.add_count("--cells", usual=4096, quick=512, what="cells of the prompt")
    p.add_rounds(15, 2)
    o = p.parse()
    asked = numbers(o.queries or ("1,16" if o.quick else "1-128*2"), "--queries")
    rows = report.Rows("attention_stages", o.json)
    stages = Stages(o.isa, o.cells, o.head_dim)
    with console.bar("stages") as progress:
        task = progress.add_task("", total=len(asked), note="")
        for queries in asked:
            for line in measure(stages, queries, o.cells, o.head_dim, o.rounds, 0.002 if o.quick else 0.05):
                rows.add(line)
            progress.update(task, advance=1)
    stages.close()
    rows.finish()


if __name__ == "__main__":
    report.start(main)
