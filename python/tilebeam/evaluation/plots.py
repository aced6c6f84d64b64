"""Plots of an evaluation, PNG and SVG: accuracy over budget, and over latency with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.estimators import Mean
from tilebeam.evaluation.eval_report import EvalReport
from tilebeam.evaluation.results import PASS, Accuracy, grouped
from tilebeam.gguf.whole_file import whole_file

_MARKERS = "osD^vPX*<>"
_LEVEL = "black"  # of the greedy answer
_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 7}  # legends, to the right of a panel


def draw(report: EvalReport, out: Path) -> list[Path]:
    """Write accuracy.png and .svg, and if latency was measured latency, too; return the files.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    # The object interface only: no window system, and nothing of the caller's pyplot changes. With a salt of its own
    # and without a date the same figures give the same SVG file, whose text is text.
    with matplotlib.rc_context({"svg.hashsalt": "tilebeam", "svg.fonttype": "none", "font.size": 9}):
        written = _save(_over_budget(report), out / "accuracy")
        if any(not p.row.oracle for p in report.points):
            written += _save(_over_latency(report), out / "latency")
    return written


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = []
    for kind, metadata in (("png", None), ("svg", {"Date": None})):
        paths.append(stem.with_suffix(f".{kind}"))
        with whole_file(paths[-1]) as partial:
            figure.savefig(partial, format=kind, dpi=150, metadata=metadata)
    return paths


def _figure(columns: int, width: float = 6.4) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.set_ylabel("accuracy, %")
    return figure, axes


def _over_budget(report: EvalReport) -> Any:
    """Draw one panel per model and device, one line per series, with intervals; bounds that know the answer are
    dotted, the greedy answer is a level."""
    places = list(dict.fromkeys((r.model, r.device) for r in report.rows))
    figure, axes = _figure(len(places))
    names = dict.fromkeys(r.series for r in report.rows if r.series != GREEDY)
    styles = dict(zip(names, zip(cycle(_colors()), cycle(_MARKERS), strict=False), strict=False))
    for ax, place in zip(axes, places, strict=True):
        main = [r for r in report.rows if (r.model, r.device) == place]
        for row in (r for r in main if r.series == GREEDY):
            ax.axhline(_percent(row), color=_LEVEL, ls="--", lw=1, label=GREEDY)
        chosen = grouped((r for r in main if r.series != GREEDY), lambda r: r.series)
        for i, (series, rows) in enumerate(chosen.items()):
            rows.sort(key=lambda r: r.budget)
            color, marker = styles[series]
            budgets, percents = [r.budget for r in rows], [_percent(r) for r in rows]
            dotted = any(r.oracle for r in rows)
            label = f"{series} (knows the answer)" if dotted else series
            ax.plot(budgets, percents, ":" if dotted else "-", color=color, marker=marker, ms=4, label=label)
            beside = [k * 1.02**i for k in budgets]  # so that the intervals of a budget stand next to each other
            ax.errorbar(beside, percents, _off([r.share for r in rows]), fmt="none", ecolor=color, alpha=0.35, lw=1)
        ax.set_xscale("log", base=2)
        ax.set_xticks(report.setting.budgets, [str(k) for k in report.setting.budgets])
        ax.set_xlabel("budget, candidates per prompt")
        ax.set_title(f"{place[0]}, {place[1]}")
        _set_range(ax, main)
        ax.legend(**_BESIDE)
    figure.suptitle(_heading(report))
    return figure


def _over_latency(report: EvalReport) -> Any:
    """Draw what everything takes and solves, with 95 % intervals in both directions: a line per model, device and
    series from one sample to the greatest budget, a star at the greedy answer, and steps over the points that nothing
    beats."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    points = [p for p in report.points if not p.row.oracle]
    figure, [ax] = _figure(1, width=9.6)
    colors = dict(zip(dict.fromkeys(p.row.model for p in points), cycle(_colors()), strict=False))
    dashes = dict(zip(dict.fromkeys(p.row.device for p in points), cycle(("-", "--", ":")), strict=False))
    markers = dict(zip(dict.fromkeys(p.row.series for p in points), cycle(_MARKERS), strict=False))
    for model, device, series in dict.fromkeys((p.row.model, p.row.device, p.row.series) for p in points):
        own = [p for p in points if (p.row.model, p.row.device) == (model, device)]
        line = sorted((p for p in own if p.row.series == series), key=lambda p: p.row.budget)
        if series != GREEDY and line[0].row.budget > 1:  # of one sample there is nothing to choose
            line = [p for p in own if p.row.series == PASS] + line
        x, y = [p.seconds for p in line], [_percent(p.row) for p in line]
        off_x, off_y = _off([p.latency.seconds for p in line], 1), _off([p.row.share for p in line])
        ax.errorbar(x, y, off_y, off_x, fmt="none", ecolor=colors[model], elinewidth=0.7, alpha=0.3)
        marker = {"marker": "*", "ms": 9} if series == GREEDY else {"marker": markers[series], "ms": 4}
        label = ", ".join((model, device, series))
        ax.plot(x, y, dashes[device], color=colors[model], lw=1.2, label=label, **marker)
    front = report.front
    ax.step([p.seconds for p in front], [_percent(p.row) for p in front], where="post", color="black", lw=2, alpha=0.35)
    _set_range(ax, [p.row for p in points])
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(EngFormatter(unit="s"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("time per problem; the grey line is the Pareto front")
    ax.legend(**_BESIDE)
    figure.suptitle(_heading(report))
    return figure


def _off(means: Sequence[Mean], times: int = 100) -> list[list[float]]:
    """Tell how far the ends of intervals are from their values, below and above; by default of shares, in percent."""
    return [[times * (m.value - m.low) for m in means], [times * (m.high - m.value) for m in means]]


def _set_range(ax: Any, rows: Sequence[Accuracy]) -> None:
    """Choose heights that hold all intervals, with a little room."""
    low, high = 100 * min(r.share.low for r in rows), 100 * max(r.share.high for r in rows)
    room = 0.04 * max(high - low, 1.0)
    ax.set_ylim(low - room, high + room)


def _percent(row: Accuracy) -> float:
    return 100 * row.share.value


def _heading(report: EvalReport) -> str:
    n = len(report.items)
    return f"{report.title}, {n} {'item' if n == 1 else 'items'}"


def _colors() -> list[str]:
    import matplotlib

    colors: list[str] = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors
