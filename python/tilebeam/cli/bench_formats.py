"""The formats in which `tilebeam bench` prints its rows; llama-bench's."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol

from tilebeam._version import __version__
from tilebeam.measure.benchmark import Row
from tilebeam.measure.machine import cpu_info


class Writer(Protocol):
    """Prints rows as they come."""

    def row(self, row: Row) -> None:
        """Take a row, which is complete."""
        ...

    def close(self) -> None:
        """Print what is left; no row comes any more."""
        ...


class MarkdownWriter:
    """llama-bench's table, with the number of sequences and the ratio to the CPU."""

    _COLUMNS = (
        ("model", -22),
        ("size", 10),
        ("params", 8),
        ("device", -8),
        ("threads", 7),
        ("npl", 3),
        ("test", -10),
        ("t/s", 16),
        ("vs cpu", 16),
        ("CPU ms/t", 8),
    )

    def __init__(self) -> None:
        self._started = False
        self._partly: dict[str, float] = {}  # files of which the NPU multiplies a part only

    def row(self, row: Row) -> None:
        """Print a line of the table, the head of it before the first."""
        if row.device == "npu" and row.device_share < 1:
            self._partly[row.model_filename] = row.device_share
        if not self._started:
            self._started = True
            self._line([name for name, _ in self._COLUMNS])
            print("| " + " | ".join("-" * (abs(w) - (w > 0)) + (":" if w > 0 else "") for _, w in self._COLUMNS) + " |")
        ratio = "-"
        if row.ratio_vs_cpu is not None and row.ratio_vs_cpu_min is not None and row.ratio_vs_cpu_max is not None:
            ratio = f"{row.ratio_vs_cpu:.2f} ({row.ratio_vs_cpu_min:.2f}-{row.ratio_vs_cpu_max:.2f})"
        self._line(
            [
                row.model_type,
                size(row.model_size),
                count(row.model_n_params),
                row.device.replace("npu", "tilebeam"),
                str(row.n_threads),
                str(row.n_parallel),
                row.test,
                f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
                ratio if row.device != "cpu" else "1",
                f"{1e3 * row.cpu_seconds_per_token:.3g}",
            ]
        )

    def _line(self, cells: list[str]) -> None:
        padded = (c.ljust(-w) if w < 0 else c.rjust(w) for c, (_, w) in zip(cells, self._COLUMNS, strict=True))
        print("| " + " | ".join(padded) + " |", flush=True)

    def close(self) -> None:
        """Say what was measured with, below the table."""
        if self._started:
            print(f"\ntilebeam {__version__}, {cpu_info()}; vs cpu: median (min-max) of the ratios of adjacent runs")
        for path, share in self._partly.items():
            print(
                f"{path}: tilebeam multiplies by {share:.0%} of the bytes of the weight matrices, the cpu by the rest"
            )


class JsonWriter:
    """One JSON array."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        """Keep a row until all are there."""
        self._rows.append(asdict(row))

    def close(self) -> None:
        """Print all rows."""
        print(json.dumps(self._rows, indent=2))


class JsonLinesWriter:
    """One JSON object per line, as soon as it is measured."""

    def row(self, row: Row) -> None:
        """Print a line."""
        print(json.dumps(asdict(row)), flush=True)

    def close(self) -> None:
        """Do nothing: nothing is left to print."""


class CsvWriter:
    """Comma separated, all fields but the single runs, as llama-bench does."""

    _FIELDS = tuple(f.name for f in fields(Row) if not f.name.startswith("samples_"))

    def __init__(self) -> None:
        self._started = False

    def row(self, row: Row) -> None:
        """Print a line of fields, their names before the first."""
        if not self._started:
            self._started = True
            self._print(self._FIELDS)
        self._print([getattr(row, name) for name in self._FIELDS])

    def _print(self, values: Sequence[Any]) -> None:
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
        sys.stdout.write(line.getvalue())
        sys.stdout.flush()

    def close(self) -> None:
        """Do nothing: nothing is left to print."""


WRITERS: dict[str, Callable[[], Writer]] = {
    "md": MarkdownWriter,
    "json": JsonWriter,
    "jsonl": JsonLinesWriter,
    "csv": CsvWriter,
}


def size(n: int) -> str:
    """Spell bytes as llama-bench prints them."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def count(n: int) -> str:
    """Spell parameters as llama-bench prints them."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"
