"""Pages in a real browser: no errors, no requests, the keyboard, what a screen reader is told, narrow and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser_kit
import pages_kit as kit
import pytest
from tilebeam import SearchResult
from tilebeam.pages.search_page import search_page


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser_kit.Tab]:
    with browser_kit.tab(tmp_path_factory.mktemp("browser")) as it:
        yield it


def shown(tab: browser_kit.Tab, folder: Path, method: str, result: SearchResult, **options: object) -> None:
    """Open the page of a result; it runs without an error and asks for nothing."""
    file = folder / "page.html"
    file.write_text(search_page(method, [result]), encoding="utf-8")
    tab.open(file.as_uri(), **options)  # type: ignore[arg-type]
    assert tab.problems == []
    assert tab.requests == [file.as_uri()]


def test_the_tree_by_keyboard(tab: browser_kit.Tab, tmp_path: Path) -> None:
    """A branch opens and closes; behind it come its candidates, and Enter opens one."""
    result = kit.beams(8, 4, 3)
    shown(tab, tmp_path, "beam", result)
    nodes = len({t.steps[: i + 1] for t in [*result.trajectories, *result.pruned] for i in range(len(t.steps))})
    visible = "[...document.querySelectorAll('.tree .step')].filter(e => e.checkVisibility()).length"
    assert tab.run(visible) == nodes  # few enough to be shown at once
    tab.run("document.querySelector('.tree summary').focus()")
    tab.press("Enter")
    assert tab.run(visible) < nodes
    tab.press("Enter")
    assert tab.run(visible) == nodes
    tab.run("document.querySelector('.fate.best').focus()")
    assert not tab.run(f"document.querySelector('#q0-c{result.best_index} details').open")
    tab.press("Enter")
    tab.until(f"document.querySelector('#q0-c{result.best_index} details').open")
    tab.press("Tab")
    assert tab.run(f"document.activeElement.closest('tr').id === 'q0-c{result.best_index}'")


def test_a_text_keeps_its_first_line_break(tab: browser_kit.Tab, tmp_path: Path) -> None:
    result = kit.vote(3)
    for candidate in result.candidates:
        candidate.text = "\n\n  a"
    shown(tab, tmp_path, "self-consistency", result)
    texts = tab.run("[...document.querySelectorAll('pre.text')].map(e => e.textContent)")
    assert texts == ["\n\n  a"] * 4  # the answer, and three candidates


def test_a_large_tree_opens_where_it_matters(tab: browser_kit.Tab, tmp_path: Path) -> None:
    result = kit.beams(256)
    shown(tab, tmp_path, "beam", result)
    visible = "[...document.querySelectorAll('.tree .step')].filter(e => e.checkVisibility())"
    rows = tab.run(f"{visible}.length")
    assert len(result.trajectories[result.best_index].steps) <= rows < 256 + 40
    assert tab.run("document.querySelectorAll('.fate.best').length") == 1
    right = f"{visible}.map(e => Math.round(e.querySelector('.score').getBoundingClientRect().right))"
    assert len(set(tab.run(right))) == 1  # in one column
    closed = tab.run(
        "[...document.querySelectorAll('.tree > details > summary')].map("
        "row => [row.querySelector('.said').textContent, row.querySelector('.inside').textContent])"
    )
    for said, below in closed:
        under = [t for t in result.trajectories if t.steps[0].strip() == said]
        lost = [p for p in result.pruned if p.steps[0].strip() == said and len(p.steps) > 1]
        parts = [f"{len(under)} candidate{'s' if len(under) > 1 else ''}"] if under else []
        assert below == ", ".join(parts + ([f"{len(lost)} lost"] if lost else []))
    tab.run("document.querySelector('.fate.best').click()")
    tab.until(f"document.querySelector('#q0-c{result.best_index} details').open")


@pytest.mark.parametrize("n", [4, 256])
@pytest.mark.parametrize("dark", [False, True])
def test_narrow_and_wide(tab: browser_kit.Tab, tmp_path: Path, n: int, dark: bool) -> None:
    """Nothing runs off the side, and text stands out from its ground in both schemes."""
    for width in (360, 1100):
        for method, result in (("adaptive", kit.adaptive(n)), ("beam", kit.beams(n))):
            shown(tab, tmp_path, method, result, width=width, dark=dark)
            assert tab.run("document.documentElement.scrollWidth") <= width
    colors = tab.run(
        "['--text', '--dim', '--accent', '--lost'].map(n => getComputedStyle(document.documentElement)"
        ".getPropertyValue(n)).concat(getComputedStyle(document.documentElement).getPropertyValue('--back'))"
    )
    *front, back = map(luminance, colors)
    for light in front:
        assert (max(light, back) + 0.05) / (min(light, back) + 0.05) >= 4.5, colors


def luminance(color: str) -> float:
    """Relative, of #rrggbb, as WCAG 2 defines it."""
    parts = [int(color.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_a_screen_reader_is_told(tab: browser_kit.Tab, tmp_path: Path) -> None:
    shown(tab, tmp_path, "beam", kit.beams(8, 4, 3))
    assert ("group", "Tree of steps") in tab.roles()
    result = kit.adaptive(6)
    shown(tab, tmp_path, "adaptive", result)
    told = tab.roles()
    assert ("table", "Answers with their votes") in told
    assert ("table", "Candidates") in told
    assert ("heading", "Answer") in told
    assert [name for role, name in told if role == "rowheader" and name.startswith(f"{result.answer} ·")]


def test_without_scripts_the_answer_and_all_candidates_are_there(tab: browser_kit.Tab, tmp_path: Path) -> None:
    result = kit.beams(8, 4, 3)
    file = tmp_path / "page.html"
    file.write_text(search_page("beam", [result]), encoding="utf-8")
    tab.open(file.as_uri(), scripts=False)
    told = tab.roles()
    assert len([r for r, _ in told if r == "row"]) >= len(result.candidates)
    assert any(result.best.text.splitlines()[0] in name for _, name in told)


def test_hostile_texts_run_nothing(tab: browser_kit.Tab, tmp_path: Path) -> None:
    result = kit.vote(4)
    for candidate in result.candidates:
        candidate.text = "</pre></script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    shown(tab, tmp_path, "self-consistency", result)
    assert tab.run("window.ran === undefined")
    assert tab.run("document.querySelectorAll('img').length") == 0


def test_formulas_and_bold_are_shown_as_what_they_mean(tab: browser_kit.Tab, tmp_path: Path) -> None:
    """Of the answer at once, of a candidate when it is opened; a button shows what was written. Code stays as it is."""
    result = kit.vote(3)
    for candidate in result.candidates:
        candidate.text = "**so**\n\\[ \\frac{48}{2} \\]\n\\boxed{72} <img src=x onerror='window.ran = 1'>"
    code = (result.best_index + 1) % 3
    result.candidates[code].text = "def f(x, *a):\n    return x ** 2 + a[0] * $HOME  # __init__"
    shown(tab, tmp_path, "self-consistency", result)
    assert tab.run("document.querySelector('.card .rich strong').textContent") == "so"
    assert tab.run("document.querySelectorAll('.card .rich math').length") == 2
    assert tab.run("document.querySelector('.card pre.text').hidden")
    tab.run("document.querySelector('.card .raw').click()")
    assert tab.run("document.querySelector('.card .rich').hidden && !document.querySelector('.card pre.text').hidden")
    assert tab.run("document.querySelectorAll('.candidates .rich').length") == 0
    tab.run("document.querySelectorAll('.candidates details').forEach((e) => { e.open = true; })")
    tab.until("document.querySelectorAll('.candidates .rich').length === 2")
    assert not tab.run(f"document.querySelector('#q0-c{code} pre').hidden")
    assert tab.run("window.ran === undefined")
    assert tab.problems == []
