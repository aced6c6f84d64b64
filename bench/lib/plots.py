"""Pictures of a bench's rows (bench/report.py), for its --plot and for the report of all benches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
OURS, STOCK = "#2f6ea5", "#b0622d"
MARKERS = "osv^D*"


def bars(rows: Rows, title: str, path: Path) -> None:
    """Ratios to the baseline as bars with their spread; the axis is logarithmic where they differ much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = panels(1, (9, 1.3 + 0.28 * len(rows)))
    ratios = [row["ratio"] for row in rows]
    spread = [
        [max(0.0, row["ratio"] - row["ratio_min"]) for row in rows],
        [max(0.0, row["ratio_max"] - row["ratio"]) for row in rows],
    ]
    colours = [OURS if ratio >= 1 else STOCK for ratio in ratios]
    look: dict[str, Any] = {"color": colours, "ecolor": "#333333", "capsize": 2, "error_kw": {"linewidth": 0.9}}
    axes[0].barh(range(len(rows)), [ratio - 1 for ratio in ratios], left=1, xerr=spread, **look)
    axes[0].margins(y=0.01)
    axes[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes[0].invert_yaxis()
    axes[0].axvline(1, color="black", linewidth=0.9)
    least, most = min(row["ratio_min"] for row in rows), max(row["ratio_max"] for row in rows)
    if least > 0 and most / min(1.0, least) > 20:
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes[0].xaxis.set_minor_formatter(NullFormatter())
        axes[0].set_xlim(min(1.0, least) / 1.3, most * 1.7)
        for i, row in enumerate(rows):
            axes[0].text(row["ratio_max"] * 1.05, i, f"{row['ratio']:.3g}", fontsize=7, va="center")
    else:
        axes[0].set_xlim(min(0.8, 0.95 * least), max(1.0, most) * 1.12)
        for i, row in enumerate(rows):
            place = max(row["ratio_max"], row["ratio"]) + 0.01 * most
            axes[0].text(place, i, f"{row['ratio']:.2f}", fontsize=7, va="center")
    axes[0].set_xlabel("ratio to the baseline, 1 (lines: the least and the greatest round)", fontsize=9)
    axes[0].grid(axis="x", alpha=0.3)
    axes[0].set_axisbelow(True)
    save(figure, title, path)


def scaling(rows: Rows, title: str, path: Path) -> None:
    """Tokens per second over sequences (the paper's figure 11) and over the length of the prompt (figure 17)."""
    sides = [("n_parallel", [r for r in rows if not r["n_depth"]]), ("n_depth", [r for r in rows if r["n_depth"]])]
    sides = [s for s in sides if s[1]]
    figure, plots = panels(len(sides), (6.2 * len(sides), 4.6))
    for axes, (over, measured) in zip(plots, sides, strict=True):
        batches = sorted({r["n_parallel"] for r in measured}, reverse=True) if over == "n_depth" else [None]
        for batch, marker in zip(batches, MARKERS * len(batches), strict=False):
            line = sorted((r for r in measured if batch in (None, r["n_parallel"])), key=lambda r: r[over])
            for side, name, colour in (("value", "Tilebeam", OURS), ("baseline", "stock CPU backend", STOCK)):
                text = name + ("" if batch is None else f", {batch} sequence{'s' if batch > 1 else ''}")
                look: dict[str, Any] = {
                    "linestyle": "-" if side == "value" else "--",
                    "marker": marker,
                    "color": colour,
                }
                axes.plot([r[over] for r in line], [r[side] for r in line], label=text, **look)
        ticks = sorted({r[over] for r in measured})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel("parallel sequences" if over == "n_parallel" else "tokens of the prompt that all share")
        axes.set_ylabel("tokens/s, all sequences together")
        axes.set_ylim(0, 1.25 * max(max(r["value"], r["baseline"]) for r in measured))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2 if over == "n_depth" else 1, loc="upper left")
    save(figure, title, path)


def draw(bench: str, rows: Rows, title: str, path: Path) -> bool:
    """Draw the picture of a bench's rows; False if they have nothing to draw, no baseline."""
    compared = [row for row in rows if row["baseline"] is not None]
    if compared:
        (scaling if bench == "decode_scaling" else bars)(compared, title, path)
    return bool(compared)


def panels(n: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Make a figure of n panels side by side, of a size in inches, which needs no window system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n, figsize=size, squeeze=False, layout="constrained")
    return figure, list(axes[0])


def save(figure: Any, title: str, path: Path) -> None:
    """Write a figure to a file."""
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
