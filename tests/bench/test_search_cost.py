"""bench.real.search_cost: logs survive packing, a slice ends on time and goes on, and what its document says is what
reports have."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tilebeam import TilebeamError

from bench.real import search_cost

ROW = search_cost.Evaluation("gsm8k", "GSM8K", "gsm8k", ("gsm8k_test*.jsonl",), 200, ())


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(search_cost, "LOGS", tmp_path / "logs")
    (tmp_path / "gsm8k_test.jsonl").touch()
    return argparse.Namespace(data=tmp_path, out=tmp_path / "out", threads=2, latency_items=0)


def test_logs_are_kept_packed_and_unpacked_where_they_are_missing(options: argparse.Namespace) -> None:
    folder = options.out / "gsm8k"
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("first\nsecond\n")
    search_cost.pack(ROW, folder)
    assert [p.name for p in search_cost.LOGS.iterdir()] == ["gsm8k-log.jsonl.xz"]  # nothing was timed
    (folder / "log.jsonl").write_text("a newer one\n")
    search_cost.unpack(ROW, folder)
    assert (folder / "log.jsonl").read_text() == "a newer one\n"
    (folder / "log.jsonl").unlink()
    search_cost.unpack(ROW, folder)
    assert (folder / "log.jsonl").read_text() == "first\nsecond\n"


def test_a_slice_ends_when_its_time_is_over_and_the_next_goes_on(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is run is told by its words; the program itself is `tilebeam eval`, which other tests interrupt."""
    ran: list[list[str]] = []
    log = options.out / "gsm8k" / "log.jsonl"

    def program(words: list[str], until: float) -> bool:
        del until
        ran.append(words)
        if "--so-far" in words:
            (log.parent / "report.json").write_text(json.dumps({"items": len(log.read_text().splitlines())}))
        else:
            log.write_text((log.read_text() if log.exists() else "") + "unit\n")
        return "--so-far" in words

    monkeypatch.setattr(search_cost, "program", program)
    models = {"0.5B": Path("a.gguf"), "1.5B": Path("b.gguf")}
    for done in (1, 2):
        assert search_cost.run(ROW, models, options, time.monotonic() + 60) == {"items": done}
        log.unlink()  # the next machine has what was packed
    assert search_cost.run(ROW, models, options, None) == {"items": 2}  # only reports
    assert ["--so-far" in words for words in ran] == [False, True, False, True, True]
    assert ran[0] == ran[1][:-1]
    options.latency_items = 3
    search_cost.run(ROW, models, options, None)  # times what is done, and runs no more
    assert ran[-1] == [*ran[0], "--latency-items", "3", "--latency-device", "npu,cpu", "--so-far"]
    options.data = None
    assert search_cost.run(ROW, models, options, None) is None


def test_a_program_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(TilebeamError, match="tilebeam eval ended with status"):
        search_cost.program(["eval", "--task", "none", "-o", str(tmp_path)], time.monotonic() + 60)


def figure(series: str, budget: int, value: float) -> dict[str, Any]:
    row = {"model": "0.5B", "device": "npu", "series": series, "budget": budget, "figure": "maj@k"}
    return row | {"value": value, "low": value - 0.05, "high": value + 0.05}


def test_the_document_has_the_reports_figures() -> None:
    greedy, single = figure("greedy", 1, 0.45), figure("pass", 1, 0.3)
    vote, weighted = figure("self-consistency", 16, 0.4), figure("self-consistency[head]", 16, 0.5)
    ranked = {"all": 0.8, "all_interval": [0.7, 0.9], "within": 0.75, "within_interval": None, "whole": None}
    cost = {"device": "cpu", "seconds": 3.0, "cpu_seconds": 6.0, "accuracy": 0.5}

    def timed(device: str, series: str, budget: int, seconds: float, accuracy: float) -> dict[str, Any]:
        interval = {"value": seconds, "low": seconds - 1, "high": seconds + 1}
        times = {"seconds": interval, "cpu_seconds": {"value": 2 * seconds}, "prompts": 5, "accuracy": accuracy}
        return {"model": "0.5B", "device": device, "series": series, "budget": budget} | times

    measured = [
        timed("cpu", "pass", 1, 8, 0.3),
        timed("npu", "pass", 1, 4, 0.3),
        timed("npu", "self-consistency[head]", 4, 7, 0.4),
        timed("npu", "self-consistency[head]", 16, 20, 0.5),
    ]
    report = {
        "items": 100,
        "digest": "0123456789abcdef",
        "accuracy": [greedy, single, vote, weighted],
        "rankings": [{"model": "0.5B", "samples": 1600, "right": 0.3, "cut": 0.1, "rows": {"head": ranked}}],
        "comparisons": [
            {"first": vote, "second": weighted, "value": -0.1, "low": -0.15, "high": -0.04},
            {"first": single, "second": greedy, "value": -0.15, "low": -0.2, "high": -0.1},
            {"first": weighted, "second": greedy, "value": 0.05, "low": -0.01, "high": 0.11},
            {"first": weighted, "second": greedy | {"model": "1.5B"}, "value": -0.2, "low": -0.3, "high": -0.1},
        ],
        "latency": measured,
        "points": [m | {"seconds": m["seconds"]["value"]} for m in measured],
        "overtaking": [
            {"search": weighted | cost, "single": greedy | cost | {"model": "1.5B", "seconds": 4.0, "accuracy": 0.45}}
        ],
    }
    text = "\n".join(search_cost.section(ROW, report))
    assert "100 of 200 items" in text
    rows = [line for line in text.splitlines() if line.startswith("| 0.5B |")]
    assert rows[0] == "| 0.5B | greedy, one answer | 45 (40-50) |  |"
    assert "| 0.5B | any of k samples (bound) | 30 (25-35) |  |" in text
    assert "| 0.5B | one sample | -15.0 (-20.0 to -10.0) |  |" in text
    assert "| 0.5B | votes weighted by the head |  | +5.0 (-1.0 to +11.0) |" in text
    assert "-20.0 (-30.0" not in text  # against the other model's
    assert "| 0.5B | votes weighted by the head |  | 50 (45-55) |" in text
    assert "| head | 0.800 (0.70 to 0.90) | 0.750 | - | - |" in text
    assert "| model | samples | votes weighted by the head, against majority |" in text
    assert "| 0.5B | 16 | +10.0 (+4.0 to +15.0) |" in text
    assert "| 0.5B | stock | 8 (7-9), 16 |  |  |" in text
    assert "| 0.5B | Tilebeam | 4 (3-5), 8 | 7 (6-8), 14 | 20 (19-21), 40 |" in text
    assert "takes 8.0 s and solves 30 %; 4 samples on Tilebeam, votes weighted by the head, take 7.0 s and" in text
    assert "the greedy answer of 1.5B 45 % in 4.0 s" in text
    timed_greedy = [timed("cpu", "greedy", 1, 7.5, 0.45), timed("npu", "greedy", 1, 3, 0.45), *measured]
    report |= {"latency": timed_greedy, "points": [m | {"seconds": m["seconds"]["value"]} for m in timed_greedy]}
    text = "\n".join(search_cost.section(ROW, report))
    assert "| model | backend | greedy | 1 | 4 | 16 |" in text
    assert "| 0.5B | Tilebeam | 3 (2-4), 6 | 4 (3-5), 8 | 7 (6-8), 14 | 20 (19-21), 40 |" in text
    assert "the greedy answer on the stock backend takes 7.5 s and solves 45 %; no search on Tilebeam" in text
    assert "Seconds per problem" not in "\n".join(search_cost.section(ROW, report | {"latency": []}))
    assert "On cpu 0.5B with 16 samples, votes weighted by the head, solves 50 % in 3.0 s a problem" in text
