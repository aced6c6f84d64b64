"""The page of an evaluation: accuracy against budget, tokens and seconds, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tilebeam.evaluation.config import GREEDY
from tilebeam.pages.chart import Chart, Mark, Series, chart_page

if TYPE_CHECKING:
    from tilebeam.evaluation.report import Report
    from tilebeam.evaluation.results import Row

_ALONE = "One prompt at a time from an empty cache."
_INTERVAL = "Bands and bars: Wilson's 95 % interval over items."


def evaluation_page(report: Report) -> str:
    """An HTML file."""
    items = len(report.items)
    subtitle = f"{items} {'item' if items == 1 else 'items'}, setting {report.setting.digest[:12]}"
    charts = [_choices(report)] if report.setting.likelihood else _charts(report)
    return chart_page(report.title, subtitle, charts, report.notes)


def _charts(report: Report) -> list[Chart]:
    rows = [row for row in report.rows if row.main]
    found = []
    for model, device in dict.fromkeys((r.model, r.device) for r in rows):
        own = [r for r in rows if (r.model, r.device) == (model, device)]
        series = _series([r for r in own if r.series != GREEDY], lambda r: r.series, lambda r: float(r.budget))
        budgets = sorted({r.budget for r in own})
        series[:0] = [Series(GREEDY, [_mark(r, k) for k in budgets], dashed=True) for r in own if r.series == GREEDY]
        title = f"Accuracy over budget: {model} on {device}"
        found.append(Chart(title, "candidates per prompt", "accuracy, %", series, logarithmic=True, note=_INTERVAL))
    costs = _series(rows, _placed, lambda r: r.tokens + r.scored_tokens)
    told = "Tokens sampled and tokens read by a reward model, per item."
    found.append(Chart("Accuracy over tokens", "tokens per item", "accuracy, %", costs, logarithmic=True, note=told))
    if report.points:
        found.append(_over_seconds(report))
        cpu = {id(p.row): p.latency.cpu_seconds.value for p in report.points}
        series = _series([p.row for p in report.points], _placed, lambda r: cpu[id(r)])
        title, axis = "Accuracy over CPU-seconds", "CPU-seconds per prompt, mean"
        found.append(Chart(title, axis, "accuracy, %", series, logarithmic=True, note=_ALONE))
    return found


def _over_seconds(report: Report) -> Chart:
    """All that was timed, and the Pareto front."""
    seconds = {id(p.row): p.seconds for p in report.points}
    series = _series([p.row for p in report.points], _placed, lambda r: seconds[id(r)])
    front = [_mark(p.row, p.seconds, _placed(p.row) + ": ") for p in report.front]
    series.append(Series("Pareto front", front, dashed=True, step=True))
    told = f"{_ALONE} The Pareto front is the best accuracy for so many seconds."
    return Chart(
        "Accuracy over seconds", "seconds per prompt, mean", "accuracy, %", series, logarithmic=True, note=told
    )


def _choices(report: Report) -> Chart:
    """Figures of choices, of which none has a budget."""
    named = [(f"{r.model} {r.device}, {r.figure}", r) for r in report.rows]
    marks = [Mark(name, *_percent(r), told=f"{name}: {_said(r)}") for name, r in named]
    series = [Series("accuracy", marks)]
    return Chart("Accuracy", "figure", "accuracy, %", series, kind="bars", note=_INTERVAL)


def _series(rows: Sequence[Row], name: Callable[[Row], str], cost: Callable[[Row], float]) -> list[Series]:
    found = []
    for one in dict.fromkeys(map(name, rows)):
        own = sorted((r for r in rows if name(r) == one), key=lambda r: r.budget)
        oracle = any(r.oracle for r in own)
        found.append(Series(f"{one} (knows the answer)" if oracle else one, _marks(own, cost), dashed=oracle))
    return found


def _marks(rows: Iterable[Row], cost: Callable[[Row], float]) -> list[Mark]:
    return [_mark(r, cost(r)) for r in rows]


def _mark(row: Row, cost: float, lead: str = "") -> Mark:
    spent = f"{row.tokens:.0f} tokens" + (f" and {row.scored_tokens:.0f} scored" if row.scored_tokens else "")
    return Mark(cost, *_percent(row), told=f"{lead}budget {row.budget}, {_said(row)}, {spent} per item")


def _percent(row: Row) -> tuple[float, float, float]:
    return 100 * row.share.value, 100 * row.share.low, 100 * row.share.high


def _said(row: Row) -> str:
    value, low, high = _percent(row)
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def _placed(row: Row) -> str:
    return f"{row.model} {row.device}, {row.series}"
