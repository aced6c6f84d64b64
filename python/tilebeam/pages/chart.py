"""Pages of charts: series of figures with their intervals, drawn by a script, and the same figures in tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilebeam.pages.document import document
from tilebeam.pages.markup import Html, join, table, tag


@dataclass(frozen=True)
class Mark:
    """One figure.

    Attributes:
        x: where it stands; of bars a name.
        y: the figure.
        low, high: its interval, None without one.
        told: what is said of it when somebody points at it, and in the table.
    """

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    told: str = ""


@dataclass(frozen=True)
class Series:
    """Figures that belong together.

    Attributes:
        name: of the series.
        marks: by rising x.
        dashed: it is a bound or a baseline.
        step: each figure holds until the next one.
    """

    name: str
    marks: Sequence[Mark]
    dashed: bool = False
    step: bool = False


@dataclass(frozen=True)
class Chart:
    """One drawing.

    Attributes:
        title: of the chart.
        x, y: what the axes show.
        series: what is drawn.
        kind: "lines", or "bars" side by side, which have names as x.
        logarithmic: the axis of costs of lines, the axis of figures of bars.
        base: where bars begin.
        note: what a reader must know.
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    kind: Literal["lines", "bars"] = "lines"
    logarithmic: bool = False
    base: float = 0.0
    note: str = ""


def chart_page(title: str, subtitle: str, charts: Sequence[Chart], notes: Sequence[str] = ()) -> str:
    """An HTML file.

    Args:
        title: of the page.
        subtitle: a line below it.
        charts: what it shows.
        notes: sentences below all of them.
    """
    header = tag("header", tag("p", "Tilebeam", class_="brand"), tag("h1", title), tag("p", subtitle, class_="note"))
    sections = [_section(i, chart) for i, chart in enumerate(charts)]
    body = join(header, tag("main", sections, [tag("p", note, class_="note") for note in notes]))
    return document(f"{title} - Tilebeam", "chart", body, [_data(chart) for chart in charts])


def _section(i: int, chart: Chart) -> Html:
    """Where the script draws, and the table."""
    return tag(
        "section",
        tag("h2", chart.title, id=f"chart-{i}"),
        tag("p", chart.note, class_="note") if chart.note else None,
        tag("div", class_="chart", data_chart=i),
        tag("p", class_="told note", role="status"),
        tag("ul", class_="legend", aria_label="Series"),
        tag("details", tag("summary", "Table"), _table(chart)),
        aria_labelledby=f"chart-{i}",
    )


def _table(chart: Chart) -> Html:
    rows = []
    for series in chart.series:
        for mark in series.marks:
            interval = "" if mark.low is None or mark.high is None else f"{mark.low:.4g} to {mark.high:.4g}"
            x = mark.x if isinstance(mark.x, str) else f"{mark.x:.4g}"
            cells = (
                tag("th", series.name, scope="row"),
                tag("td", x, class_=None if isinstance(mark.x, str) else "n"),
                tag("td", f"{mark.y:.4g}", class_="n"),
                tag("td", interval, class_="n"),
                tag("td", mark.told),
            )
            rows.append(tag("tr", cells))
    named = "" if chart.kind == "bars" else "n"
    columns = [("Series", ""), (chart.x, named), (chart.y, "n"), ("Interval", "n"), ("", "")]
    return table(chart.title, columns, [tag("tbody", rows)])


def _data(chart: Chart) -> dict[str, Any]:
    series = [
        {
            "name": s.name,
            "dashed": s.dashed,
            "step": s.step,
            "marks": [[m.x, m.y, m.low, m.high, m.told] for m in s.marks],
        }
        for s in chart.series
    ]
    return {
        "title": chart.title,
        "x": chart.x,
        "y": chart.y,
        "kind": chart.kind,
        "log": chart.logarithmic,
        "base": chart.base,
        "series": series,
    }
