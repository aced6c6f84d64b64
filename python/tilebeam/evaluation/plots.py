"""Plots of an evaluation, PNG and SVG: accuracy over budget, and over latency with the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.estimators import Share
from tilebeam.evaluation.eval_report import EvalReport, name_of
from tilebeam.evaluation.results import PASS, Accuracy
from tilebeam.gguf.whole_file import whole_file

_MARKERS = "osD^vPX*<>"
_FORMATS = ("png", "svg")
_LEVEL = "black"  # of the greedy answer
_LEAST_STEP = 0.08  # between names along a front, as a share of the panel's height


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
        ends = []
        main = [r for r in report.rows if (r.model, r.device) == place]
        for row in (r for r in main if r.series == GREEDY):
            ax.axhline(_percent(row), color=_LEVEL, ls="--", lw=1)
            ends.append(End(report.setting.budgets[-1], _percent(row), GREEDY, _LEVEL))
        for i, (series, rows) in enumerate(_lines([r for r in main if r.series != GREEDY])):
            color, marker = styles[series]
            budgets, percents = [r.budget for r in rows], [_percent(r) for r in rows]
            dotted = any(r.oracle for r in rows)
            ax.plot(budgets, percents, ":" if dotted else "-", color=color, marker=marker, ms=4)
            beside = [k * 1.02**i for k in budgets]  # so that the intervals of a budget stand next to each other
            ax.errorbar(beside, percents, _off([r.share for r in rows]), fmt="none", ecolor=color, alpha=0.35, lw=1)
            label = f"{series} (knows the answer)" if dotted else series
            ends.append(End(budgets[-1], _percent(rows[-1]), label, color))
        ax.set_xscale("log", base=2)
        ax.set_xticks(report.setting.budgets, [str(k) for k in report.setting.budgets])
        ax.set_xlabel("budget, candidates per prompt")
        ax.set_title(f"{place[0]}, {place[1]}")
        _set_range(ax, main)
        _label(ax, ends)
    figure.suptitle(_heading(report))
    return figure


def _over_latency(report: EvalReport) -> Any:
    """Draw what everything takes and solves, with 95 % intervals in both directions: a line per model, device and
    series from one sample to the greatest budget, a star at the greedy answer, and steps with names over the points
    that nothing beats."""
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
        costs = [p.latency.seconds for p in line]
        off_x = [[c.value - c.low for c in costs], [c.high - c.value for c in costs]]
        shares = [p.row.share for p in line]
        ax.errorbar(x, y, _off(shares), off_x, fmt="none", ecolor=colors[model], elinewidth=0.7, alpha=0.3)
        marker = {"marker": "*", "ms": 9} if series == GREEDY else {"marker": markers[series], "ms": 4}
        label = ", ".join((model, device, series))
        ax.plot(x, y, dashes[device], color=colors[model], lw=1.2, label=label, **marker)
    front = report.front
    ax.step([p.seconds for p in front], [_percent(p.row) for p in front], where="post", color="black", lw=2, alpha=0.35)
    _set_range(ax, [p.row for p in points])
    bottom, top = ax.get_ylim()
    named: list[End] = []
    for p in front:
        height = _percent(p.row)
        if not named or p is front[-1] or height - named[-1].y >= _LEAST_STEP * (top - bottom):
            named.append(End(p.seconds, height, f"{name_of(p.row)}, {p.row.device}", colors[p.row.model]))
    _label(ax, named)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(EngFormatter(unit="s"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("time per problem; the grey line is the Pareto front")
    ax.legend(fontsize=6)
    figure.suptitle(_heading(report))
    return figure


def _off(shares: Sequence[Share]) -> list[list[float]]:
    """Tell how far the ends of intervals are from their values, below and above, in percent."""
    return [[100 * (s.value - s.low) for s in shares], [100 * (s.high - s.value) for s in shares]]


# --- labels -----------------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """The end of a line in a panel, and what the line is called."""

    x: float
    y: float
    text: str
    color: str


def _label(ax: Any, ends: Sequence[End], gap: float = 0.055) -> None:
    """Write names to the right of the panel, each at the height of its line's end or as near as others leave room.

    Args:
        gap: least distance of two names, as a share of the panel's height.
    """
    bottom, top = ax.get_ylim()
    ordered = sorted(ends, key=lambda e: e.y)
    heights: list[float] = []
    for end in ordered:
        height = (end.y - bottom) / (top - bottom)
        heights.append(max(height, heights[-1] + gap) if heights else height)
    ceiling = 1.0
    for i in reversed(range(len(heights))):  # names that would stand above the panel push others down
        heights[i] = ceiling = min(heights[i], ceiling)
        ceiling -= gap
    for end, height in zip(ordered, heights, strict=True):
        ax.annotate(
            end.text,
            (end.x, end.y),
            (1.03, height),
            textcoords="axes fraction",
            fontsize=7,
            color=end.color,
            va="center",
            arrowprops={"arrowstyle": "-", "color": end.color, "lw": 0.5, "alpha": 0.5},
        )


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


def _lines(rows: list[Accuracy]) -> Iterator[tuple[str, list[Accuracy]]]:
    """Sort the rows of each series by rising budget."""
    for series in dict.fromkeys(r.series for r in rows):
        yield series, sorted((r for r in rows if r.series == series), key=lambda r: r.budget)


def _colors() -> list[str]:
    import matplotlib

    colors: list[str] = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors
