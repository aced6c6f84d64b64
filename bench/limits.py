"""The machine's own limits, measured beside what they are compared with: int8 dot products, float FMAs and reads.

    python -m bench.limits [--json] [--quick]

prints them, for one thread and for all. There is no baseline: the ratio is that of the rounds to their median, and the
share of the limit 1.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench.lib import report
from bench.lib.limits import fma_gflops, int8_gops, machine, read_gbs
from bench.lib.options import Parser


def main() -> None:
    args = Parser(__doc__, "fewer and shorter rounds").parse()
    rounds, seconds = (3, 0.1) if args.quick else (9, 0.5)
    kinds: dict[str, tuple[Callable[[int], float], str]] = {
        "int8": (lambda n: int8_gops(n, seconds), "GOPS"),
        "float": (lambda n: fma_gflops(n, seconds), "GFLOPS"),
        "read": (read_gbs, "GB/s"),
    }
    probes = [(name, threads) for threads in sorted({1, int(machine()["cpus"])}) for name in kinds]
    seen: dict[tuple[str, int], list[float]] = {probe: [] for probe in probes}
    for _ in range(rounds):  # in turn: a virtual machine's bandwidth changes with the cores that it is put on
        for name, threads in probes:
            seen[name, threads].append(kinds[name][0](threads))
    rows = report.Rows("limits", args.json)
    for (name, threads), values in seen.items():
        middle = median(values)
        title = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
        rows.add(report.figures(title, None, round(middle, 2), kinds[name][1], [v / middle for v in values], 1.0))
    rows.finish({r["name"]: r["value"] for r in rows.rows})


if __name__ == "__main__":
    report.start(main)
