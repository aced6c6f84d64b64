"""bench/run_all.py: its list is complete, its report keeps what worked, and a bench that fails loses nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import run_all

BENCH = Path(__file__).resolve().parents[2] / "bench"


def a_report(name: str, **more: Any) -> dict[str, Any]:
    row = {"name": "a | b", "baseline": 1.0, "value": 2.0, "unit": "x/s", "ratio": 2.0, "ratio_min": 1.5}
    row |= {"ratio_max": 2.5, "share_of_limit": None} | more
    return {"bench": name, "machine": {"cpu": "this one"}, "limits": {"peak": 3.0}, "rows": [row]}


@pytest.fixture(name="scripts")
def _scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree with benches of our own, which run_all runs instead."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    texts = {
        "good": f"import sys\nprint('noise')\nprint({json.dumps(json.dumps(a_report('good')))})\nprint('more')",
        "fails": "import sys\nprint('the reason', file=sys.stderr)\nsys.exit(3)",
        "hangs": "import time\ntime.sleep(600)",
        "silent": "",
        "partial": f"print({json.dumps(json.dumps({'bench': 'partial', 'machine': {}, 'limits': {}, 'rows': [{}]}))})",
    }
    for name, text in texts.items():
        (tmp_path / "bench" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(run_all, "BENCHES", tuple(run_all.Bench(name, f"Title of {name}") for name in texts))


def test_the_list_has_every_bench_with_the_shared_form() -> None:
    scripts = {f"bench.{path.stem}": path for path in BENCH.glob("*.py")}
    scripts |= {f"bench.papers.{path.stem}": path for path in (BENCH / "papers").glob("*.py")}
    sources = {module: path.read_text(encoding="utf-8") for module, path in scripts.items()}
    assert {b.module for b in run_all.BENCHES} == {m for m, text in sources.items() if re.search(r"\bRows\(", text)}
    for bench in run_all.BENCHES:
        source = sources[bench.module]
        assert "Parser(" in source
        assert "start(main)" in source
        assert ("rounds.add_options(" in source) == bench.sliced


@pytest.mark.usefixtures("scripts")
def test_a_failing_bench_loses_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    started: list[str] = []
    benches = run_all.chosen("", "hangs")
    results = run_all.run_all(benches, folder, run_all.How(True, 60), lambda _, bench: started.append(bench.name))
    assert started == ["good", "fails", "silent", "partial"]
    assert [r.report is not None for r in results] == [True, False, False, False]
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "| a \\| b | 1 | 2 | x/s | 2 (1.5 - 2.5) | - |" in text
    assert "![Title of good](good.png)" in text
    assert (folder / "good.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "fails.png").exists()
    assert json.loads((folder / "good.json").read_text(encoding="utf-8")) == a_report("good") | {"quick": True}
    assert "exit status 3: the reason" in text
    assert "the reason" in (folder / "fails.log").read_text(encoding="utf-8")
    assert "it printed no JSON object" in text
    assert "lacks rows[].baseline" in text
    assert "Not run yet" not in text


def test_the_report_shows_a_picture_that_is_there(tmp_path: Path) -> None:
    """An earlier run without a baseline left none."""
    bench = run_all.Bench("one", "Title of one")
    (tmp_path / "one.json").write_text(json.dumps(a_report("one") | {"quick": False}), encoding="utf-8")
    for links in ([], ["![Title of one](one.png)"]):
        result = run_all.kept(bench, tmp_path, run_all.How(keep=True))
        assert result is not None
        assert [line for line in run_all.section(result) if "](" in line] == links
        (tmp_path / "one.png").touch()


@pytest.mark.usefixtures("scripts")
def test_a_bench_that_hangs_is_stopped(tmp_path: Path) -> None:
    results = run_all.run_all(run_all.chosen("hangs", ""), tmp_path / "out", run_all.How(timeout=1))
    assert results[0].error == "stopped after 1 s"


@pytest.mark.usefixtures("scripts")
def test_the_report_is_kept_up_to_date(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    seen: list[str] = []

    def look(done: int, _: Any) -> None:
        if done:
            seen.append((folder / "report.md").read_text(encoding="utf-8"))

    run_all.run_all(run_all.chosen("good,fails", ""), folder, run_all.How(timeout=60), look)
    assert len(seen) == 1
    assert "Title of good" in seen[0]
    assert "Not run yet: fails." in seen[0]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="no bench nothing; there are limits, gemm"):
        run_all.chosen("nothing", "")


def test_a_report_grows_over_several_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--keep: other benches and other rows stay, new figures replace old ones, a failure keeps what there was."""
    script, other = tmp_path / "bench" / "one.py", tmp_path / "bench" / "two.py"
    script.parent.mkdir()
    (script.parent / "__init__.py").touch()
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    one, two = run_all.Bench("one", "Title of one", sliced=True), run_all.Bench("two", "Title of two")
    monkeypatch.setattr(run_all, "BENCHES", (one, two))
    folder = tmp_path / "out"

    def text(how: Any, *benches: Any) -> str:
        run_all.run_all(benches, folder, how)
        return str((folder / "report.md").read_text(encoding="utf-8"))

    row = "import json, sys\nreport = json.loads({!r})\n{}\nprint(json.dumps(report))\n"
    of_arguments = "report['rows'][0] |= {'name': sys.argv[2], 'value': float(sys.argv[3])}"
    script.write_text(row.format(json.dumps(a_report("one")), of_arguments), encoding="utf-8")
    other.write_text(row.format(json.dumps(a_report("two")), ""), encoding="utf-8")
    text(run_all.How(arguments=("this", "1")), one)
    text(run_all.How(keep=True), two)
    text(run_all.How(keep=True, arguments=("that", "2")), one)
    so_far = text(run_all.How(keep=True, arguments=("this", "3")), one)
    assert [line.split(" | ")[:3] for line in so_far.splitlines() if line.startswith("| th")] == [
        ["| this", "1", "3"],
        ["| that", "1", "2"],
    ]
    assert "Title of two" in so_far
    script.write_text("import sys\nsys.exit('no such luck')", encoding="utf-8")
    so_far = text(run_all.How(keep=True), one)
    assert "| that | 1 | 2 |" in so_far
    assert "no such luck" in so_far
    assert "Title of two" not in text(run_all.How(), one)
    assert "Title of two" not in text(run_all.How(quick=True, keep=True), one)
    script.write_text("import sys\nsys.exit(' '.join(sys.argv[1:]))", encoding="utf-8")
    rounds = folder / "one.rounds"
    assert f"--json --resume {rounds} --seconds 30" in text(run_all.How(keep=True, slice=30), one)
    earlier = a_report("one") | {"machine": {"cpu": "another"}}
    assert run_all.merged(earlier, a_report("one")) == a_report("one")


def test_every_form_of_picture(tmp_path: Path) -> None:
    rows = [
        a_report("x")["rows"][0]
        | {"name": f"{way}, {n}", "way": way, "baseline_way": "plain", "shape": f"{n} wide", "shape_of": ""}
        for n in (1, 2)
        for way in ("fast", "faster")
    ]
    rows = [row | {"n_parallel": 1 + i % 2, "n_depth": 512 * (i // 2)} for i, row in enumerate(rows)]
    for name in (*run_all.plots.FORMS, "any"):
        picture = tmp_path / f"{name}.png"
        assert run_all.plots.draw(name, rows, name, picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
    bare = [row | {"baseline": None} for row in rows]
    assert not run_all.plots.draw("any", bare, "limits have no baseline", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
