"""The page of charts: its figures in tables and as data, names that look like markup, and the script in a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import browser_kit
import numpy as np
import pages_kit as kit
import pytest
from html_kit import Page
from tilebeam.pages.chart import Chart, Mark, Series, chart_page


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser_kit.Tab]:
    with browser_kit.tab(tmp_path_factory.mktemp("browser")) as it:
        yield it


def shown(tab: browser_kit.Tab, folder: Path, charts: list[Chart], width: int = 1100, dark: bool = False) -> None:
    """Open the page; it runs without an error and asks for nothing."""
    file = folder / "page.html"
    file.write_text(chart_page("A run", "5 items", charts, ["A note."]), encoding="utf-8")
    tab.open(file.as_uri(), width=width, dark=dark)
    tab.until("document.querySelectorAll('.chart svg').length === document.querySelectorAll('.chart').length")
    assert tab.problems == []
    assert tab.requests == [file.as_uri()]


def test_tables_have_every_figure() -> None:
    charts = kit.charts()
    page = Page(chart_page("A run", "5 items", charts, ["A note."]))
    marks = [mark for chart in charts for series in chart.series for mark in series.marks]
    cells = page.texts["td"]
    assert len(cells) == 4 * len(marks)
    for i, mark in enumerate(marks):
        x, y, interval, told = cells[4 * i : 4 * i + 4]
        assert x == (mark.x if isinstance(mark.x, str) else f"{mark.x:.4g}")
        assert (y, told) == (f"{mark.y:.4g}", mark.told)
        assert interval == f"{mark.low:.4g} to {mark.high:.4g}"
    assert "A note." in page.texts["p"]
    assert [c["title"] for c in page.data] == page.texts["h2"]


def test_names_are_never_markup() -> None:
    name = "</script><img src=x onerror=alert(1)>"
    chart = Chart(name, name, name, [Series(name, [Mark(name, math.nan, told=name)])], kind="bars", note=name)
    page = Page(chart_page(name, name, [chart], [name]))
    assert page.data[0]["series"][0]["marks"] == [[name, None, None, None, name]]
    assert page.texts["h1"] == [name]


def test_series_can_be_hidden_and_figures_read(tab: browser_kit.Tab, tmp_path: Path) -> None:
    shown(tab, tmp_path, kit.charts())
    circles = "document.querySelectorAll('.chart')[0].querySelectorAll('circle').length"
    assert tab.run(circles) == 20
    tab.run("document.querySelectorAll('.legend input')[1].click()")
    assert tab.run(circles) == 15
    tab.run("document.querySelectorAll('.legend input')[1].click()")
    told = "document.querySelectorAll('.told')[0].textContent"
    assert tab.run(told) == ""
    at = tab.run(
        "(() => { document.querySelector('.chart').scrollIntoView();"
        " const box = document.querySelectorAll('.chart circle')[7].getBoundingClientRect();"
        " return [box.x + 4, box.y + 4]; })()"
    )
    tab.move(*at)
    assert tab.run(told).startswith("best-of-n[prm]: budget 4, ")
    tab.run("document.querySelector('.chart svg').focus()")
    tab.press("ArrowRight")
    assert tab.run(told).startswith("best-of-n[prm]: budget 8, ")
    tab.press("ArrowLeft", "ArrowLeft")
    assert tab.run(told).startswith("best-of-n[prm]: budget 2, ")


def test_keys_read_on_while_the_chart_is_drawn_anew(tab: browser_kit.Tab, tmp_path: Path) -> None:
    """A new width keeps the focus and the mark; what the mouse points at is shown and not read out."""
    shown(tab, tmp_path, kit.charts())
    assert ("application", "Ratios") in tab.roles()
    tab.run("document.querySelector('.chart svg').focus()")
    tab.press("ArrowRight", "ArrowRight")
    told, live = "document.querySelector('.told').textContent", "document.querySelector('.told').ariaLive"
    second = tab.run(told)
    assert second
    assert tab.run(live) == "polite"
    tab.call("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=1, mobile=False)
    tab.until("Number(document.querySelector('.chart svg').viewBox.baseVal.width) < 700")
    assert tab.run("document.activeElement.closest('.chart') === document.querySelector('.chart')")
    assert tab.run(told) == second
    tab.press("ArrowLeft", "ArrowRight")
    assert tab.run(told) == second
    tab.run("document.querySelector('.chart').scrollIntoView()")
    at = tab.run(
        "(() => { const box = document.querySelectorAll('.chart circle')[3].getBoundingClientRect();"
        " return [box.x + 4, box.y + 4]; })()"
    )
    tab.move(*at)
    assert tab.run(told) not in ("", second)
    assert tab.run(live) == "off"


def numbers(tab: browser_kit.Tab, anchor: str) -> list[float]:
    """What stands at an axis: "middle" below the chart, "end" at its side."""
    texts = f"[...document.querySelectorAll('.chart text[text-anchor={anchor}]:not(.shown)')].map(t => t.textContent)"
    return [float(text) for text in tab.run(texts)]


@pytest.mark.parametrize(
    ("least", "greatest", "log"),
    [
        (210.4, 480.2, True),
        (210.5, 480.5, False),
        (50.5, 50.5, True),
        (50.5, 50.5, False),
        (50.5, 50.5 + 1e-12, False),
        (1000.5, 1008.0, False),
        (123456.5, 123460.0, False),
        (1e-7, 1e9, True),
        (-3.5, -3.5, False),
    ],
)
def test_axes_have_numbers(tab: browser_kit.Tab, tmp_path: Path, least: float, greatest: float, log: bool) -> None:
    """At least two on each, all different, evenly apart or in ratio."""
    marks = [Mark(least, least), Mark(greatest, greatest)]
    shown(tab, tmp_path, [Chart("Narrow", "x", "y", [Series("a", marks)], logarithmic=log)])
    assert "NaN" not in tab.run("document.querySelector('main').innerHTML")
    for anchor in ("middle", "end"):
        found = numbers(tab, anchor)
        assert len(found) >= 2
        assert found == sorted(set(found))
        assert max(found) > least * (0.8 if least > 0 else 1.2)
        if not (log and anchor == "middle"):
            assert max(np.diff(found)) == pytest.approx(min(np.diff(found)))


def test_narrow_and_wide(tab: browser_kit.Tab, tmp_path: Path) -> None:
    for width in (360, 1100):
        for dark in (False, True):
            shown(tab, tmp_path, kit.charts(), width, dark)
            assert tab.run("document.documentElement.scrollWidth") <= width
            outside = tab.run(
                "[...document.querySelectorAll('.chart text')].filter(t => { const box = t.getBoundingClientRect();"
                " return box.left < 0 || box.right > innerWidth; }).map(t => t.textContent)"
            )
            assert outside == []


@pytest.mark.parametrize(
    "marks",
    [
        [],
        [Mark(1.0, 50.0)],
        [Mark(1.0, 50.0, 40.0, 60.0), Mark(1.0, 50.0)],
        [Mark(0.0, 0.0), Mark(10.0, 0.0)],
        [Mark(1e-9, 1e12), Mark(1e9, -1e12)],
        [Mark(1.0, math.nan), Mark(2.0, 3.0)],
    ],
)
@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_odd_figures_are_drawn(tab: browser_kit.Tab, tmp_path: Path, kind: str, marks: list[Mark]) -> None:
    named = [Mark(str(m.x), m.y, m.low, m.high) for m in marks] if kind == "bars" else marks
    charts = [Chart("Odd", "x", "y", [Series("a", named)], kind, log) for log in (False, True)]  # type: ignore[arg-type]
    shown(tab, tmp_path, charts)
    assert "NaN" not in tab.run("document.querySelector('main').innerHTML")
