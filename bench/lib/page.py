"""The page of a bench's rows: what `bench.lib.plots` draws, to point at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilebeam.pages.chart import Chart, Mark, Series, chart_page

Rows = Sequence[Mapping[str, Any]]


def write(bench: str, rows: Rows, title: str, path: Path) -> bool:
    """Write the page; False if there is nothing to compare with, no baseline."""
    compared = [row for row in rows if row["baseline"] is not None]
    if compared:
        charts = _scaling(compared) if bench == "decode_scaling" else []
        told = "Lines: the least and the greatest round. Above 1 Tilebeam is better."
        path.write_text(chart_page(title, told, [*charts, _ratios(compared)]), encoding="utf-8")
    return bool(compared)


def _ratios(rows: Rows) -> Chart:
    least, most = min(r["ratio_min"] for r in rows), max(r["ratio_max"] for r in rows)
    marks = [Mark(r["name"], r["ratio"], r["ratio_min"], r["ratio_max"], _told(r)) for r in rows]
    wide = least > 0 and most / min(1.0, least) > 20
    series = [Series("ratio", marks)]
    return Chart("Ratios", "", "ratio to the baseline", series, kind="bars", logarithmic=wide, base=1.0)


def _told(row: Mapping[str, Any]) -> str:
    rates = f"{row['value']:.4g} against {row['baseline']:.4g} {row['unit']}"
    return f"{row['name']}: {rates}, ratio {row['ratio']:.3g} ({row['ratio_min']:.3g} to {row['ratio_max']:.3g})"


def _scaling(rows: Rows) -> list[Chart]:
    """Tokens per second over sequences and over the length of the prompt."""
    found = []
    for over, title in (("n_parallel", "parallel sequences"), ("n_depth", "tokens of the prompt that all share")):
        measured = [r for r in rows if bool(r["n_depth"]) == (over == "n_depth")]
        batches = sorted({r["n_parallel"] for r in measured}) if over == "n_depth" else [None]
        series = []
        for batch in batches:
            line = sorted((r for r in measured if batch in (None, r["n_parallel"])), key=lambda r: r[over])
            for side, name in (("value", "Tilebeam"), ("baseline", "stock CPU backend")):
                marks = [Mark(r[over], r[side], told=_told(r)) for r in line]
                several = "" if batch is None else f", {batch} sequence{'s' if batch > 1 else ''}"
                series.append(Series(name + several, marks, dashed=side == "baseline"))
        if measured:
            found.append(Chart(f"Tokens/s over {title}", title, "tokens/s, all sequences together", series))
    return found
