"""Plots of an evaluation, PNG and SVG: accuracy over budget, and accuracy over latency with the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilebeam.gguf.whole_file import whole_file

if TYPE_CHECKING:
    from tilebeam.evaluation.report import Report
    from tilebeam.evaluation.results import Row

_MARKERS = "osD^vPX*<>"
_FORMATS = ("png", "svg")


def draw(report: Report, out: Path) -> list[Path]:
    """Write accuracy.png and .svg, and if latency was measured latency.png and .svg; the files written.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    # The object interface only: no window system, and nothing of the caller's pyplot changes. With a salt of its own
    # and without a date the same figures give the same SVG file, whose text is text.
    with matplotlib.rc_context({"svg.hashsalt": "tilebeam", "svg.fonttype": "none", "font.size": 9}):
        written = _save(_over_budget(report), out / "accuracy")
        if report.points:
            written += _save(_over_latency(report), out / "latency")
    return written


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(f".{kind}") for kind in _FORMATS]
    for path in paths:
        with whole_file(path) as partial:
            kind = path.suffix.removeprefix(".")
            figure.savefig(partial, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return paths


def _figure(columns: int, width: float = 6.4) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.set_ylabel("accuracy, %")
    return figure, list(axes)


def _over_budget(report: Report) -> Any:
    """One panel per model and device, one line per series, with intervals; bounds that know the answer are dotted."""
    places = list(dict.fromkeys((r.model, r.device) for r in report.rows))
    figure, axes = _figure(len(places))
    styles = _styles([r.series for r in report.rows])
    for ax, place in zip(axes, places, strict=True):
        for series, rows in _lines([r for r in report.rows if r.main and (r.model, r.device) == place]):
            color, marker = styles[series]
            budgets = [r.budget for r in rows]
            dotted = any(r.oracle for r in rows)
            label = f"{series} (knows the answer)" if dotted else series
            line = ":" if dotted else "-"
            ax.plot(budgets, [100 * r.share.value for r in rows], line, color=color, marker=marker, ms=4, label=label)
            low, high = ([100 * getattr(r.share, side) for r in rows] for side in ("low", "high"))
            ax.fill_between(budgets, low, high, color=color, alpha=0.10, lw=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(report.setting.budgets, [str(k) for k in report.setting.budgets])
        ax.set_xlabel("budget, candidates per prompt")
        ax.set_title(f"{place[0]}, {place[1]}")
        ax.legend(fontsize=7)
    figure.suptitle(report.task.name)
    return figure


def _over_latency(report: Report) -> Any:
    """All models, devices, methods and budgets in one plot, one line per method from its least budget to its greatest;
    the front as steps: what accuracy is to be had for so many seconds."""
    from matplotlib.ticker import LogFormatter

    figure, (ax,) = _figure(1, width=9.6)
    places = list(dict.fromkeys((p.row.model, p.row.device) for p in report.points))
    colors = dict(zip(places, cycle(_colors()), strict=False))
    markers = dict(zip(dict.fromkeys(p.row.series for p in report.points), cycle(_MARKERS), strict=False))
    seconds = {id(p.row): p.seconds for p in report.points}
    for place in places:
        for series, rows in _lines([p.row for p in report.points if (p.row.model, p.row.device) == place]):
            hollow = any(r.oracle for r in rows)
            ax.plot(
                [seconds[id(r)] for r in rows],
                [100 * r.share.value for r in rows],
                ":" if hollow else "-",
                color=colors[place],
                marker=markers[series],
                markerfacecolor="none" if hollow else colors[place],
                ms=5,
                lw=1,
                label=f"{place[0]} {place[1]}, {series}",
            )
            ax.annotate(f"{rows[-1].budget}", (seconds[id(rows[-1])], 100 * rows[-1].share.value), fontsize=6)
    if front := report.front:
        ax.step(
            [p.seconds for p in front],
            [100 * p.row.share.value for p in front],
            where="post",
            color="black",
            lw=2,
            alpha=0.35,
            label="Pareto front",
        )
    ax.set_xscale("log")
    for axis in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    ax.set_xlabel("median seconds per prompt")
    ax.set_title(report.task.name)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def _lines(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each series by rising budget."""
    for series in dict.fromkeys(r.series for r in rows):
        yield series, sorted((r for r in rows if r.series == series), key=lambda r: r.budget)


def _colors() -> list[str]:
    import matplotlib

    colors: list[str] = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors


def _styles(series: list[str]) -> dict[str, tuple[str, str]]:
    """A color and a marker for each series, the same in all panels."""
    return dict(zip(dict.fromkeys(series), zip(cycle(_colors()), cycle(_MARKERS), strict=False), strict=False))
