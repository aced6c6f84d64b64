"""The machine's own limits, measured beside what they are compared with: int8 dot products, float FMAs and reads.

    python -m bench.limits [--json] [--quick]

prints them, for one thread and for all. There is no baseline: the ratio is that of the rounds to their median, and the
share of the limit 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.lib import report
from bench.lib.limits import fma_gflops, int8_gops, machine, read_gbs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
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
    rows: list[dict[str, Any]] = []
    for (name, threads), values in seen.items():
        middle = median(values)
        rows.append(
            {
                "name": f"{name}, {threads} thread{'s' if threads > 1 else ''}",
                "baseline": None,
                "value": round(middle, 2),
                "unit": kinds[name][1],
                "ratio": 1.0,
                "ratio_min": round(min(values) / middle, 3),
                "ratio_max": round(max(values) / middle, 3),
                "share_of_limit": 1.0,
            }
        )
        if not args.json:
            print(f"{rows[-1]['name']:20} {middle:10.1f} {kinds[name][1]:7} ({min(values):.1f} - {max(values):.1f})")
    if args.json:
        report.emit("limits", {r["name"]: r["value"] for r in rows}, rows)


if __name__ == "__main__":
    main()
