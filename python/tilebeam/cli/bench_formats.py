"""The formats in which `tilebeam bench` prints its rows; llama-bench's."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict

from tilebeam._version import __version__
from tilebeam.measure.benchmark import Row
from tilebeam.measure.machine import cpu_info

# Of the table: names and widths; < 0 is left-aligned.
_COLUMNS = {
    "model": -22,
    "size": 10,
    "params": 8,
    "device": -8,
    "threads": 7,
    "npl": 3,
    "test": -10,
    "t/s": 16,
    "vs cpu": 16,
    "CPU ms/t": 8,
}


class Writer:
    """Prints rows as they come; those of one JSON array when all are there."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._rows: list[Row] = []
        self._csv = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")

    def row(self, row: Row) -> None:
        """Take a row, which is complete."""
        self._rows.append(row)
        first = len(self._rows) == 1
        if self._form == "jsonl":
            print(json.dumps(asdict(row)))
        elif self._form == "csv":  # all fields but the single runs, as llama-bench does
            cells = {k: v for k, v in asdict(row).items() if not k.startswith("samples_")}
            self._csv.writerows([cells, cells.values()] if first else [cells.values()])
        elif self._form == "md":
            if first:
                _line(list(_COLUMNS))
                rules = ("-" * (abs(w) - (w > 0)) + (":" if w > 0 else "") for w in _COLUMNS.values())
                print(f"| {' | '.join(rules)} |")
            _line(_cells(row))
        sys.stdout.flush()

    def close(self) -> None:
        """Print what is left; no row comes any more."""
        if self._form == "json":
            print(json.dumps([asdict(row) for row in self._rows], indent=2))
        if self._form != "md" or not self._rows:
            return
        print(f"\ntilebeam {__version__}, {cpu_info()}; vs cpu: median (min-max) of the ratios of adjacent runs")
        partly = {r.model_filename: r.device_share for r in self._rows if r.device == "npu" and r.device_share < 1}
        for path, share in partly.items():
            print(
                f"{path}: tilebeam multiplies by {share:.0%} of the bytes of the weight matrices, the cpu by the rest"
            )


def _line(cells: list[str]) -> None:
    padded = (c.ljust(-w) if w < 0 else c.rjust(w) for c, w in zip(cells, _COLUMNS.values(), strict=True))
    print("| " + " | ".join(padded) + " |")


def _cells(row: Row) -> list[str]:
    ratio = "1" if row.device == "cpu" else "-"
    if row.device != "cpu" and row.ratio_vs_cpu is not None:
        ratio = f"{row.ratio_vs_cpu:.2f} ({row.ratio_vs_cpu_min:.2f}-{row.ratio_vs_cpu_max:.2f})"
    size, count = row.model_size, row.model_n_params
    return [
        row.model_type,
        f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
        f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M",
        row.device.replace("npu", "tilebeam"),
        str(row.n_threads),
        str(row.n_parallel),
        row.test,
        f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        ratio,
        f"{1e3 * row.cpu_seconds_per_token:.3g}",
    ]
