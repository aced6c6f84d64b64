"""bench/lib/rounds.py: a bench measured in slices loses no round, mixes no settings and leaves out disturbed rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.lib import report, rounds

SETTING = {"bench": "any", "threads": 2}


class Load:
    """Stands in for what measures how busy the machine is."""

    share = 0.0

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(name="load")
def _load(monkeypatch: pytest.MonkeyPatch) -> Load:
    load = Load()
    monkeypatch.setattr(rounds, "OtherLoad", lambda: load)
    monkeypatch.setattr(rounds, "_LONG", -1.0)
    return load


def one(log: Any, case: str, **figures: float) -> None:
    assert log.begin(case)
    log.end(**figures)


@pytest.mark.usefixtures("load")
def test_rounds_are_kept_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.rounds"
    one(rounds.Rounds(path, SETTING), "a", ours=1.0, baseline=2.0, limit=10.0)
    log = rounds.Rounds(path, SETTING)
    assert "a" in log
    assert "b" not in log
    assert log.fewest(["a", "b"]) == 0
    assert log.begin("a")  # and is killed while it writes
    path.write_text(path.read_text(encoding="utf-8") + '{"case": "a", "to', encoding="utf-8")
    log = rounds.Rounds(path, SETTING)
    one(log, "a", ours=1.0, baseline=4.0, limit=12.0)
    one(log, "a", ours=2.0, baseline=4.0, limit=20.0)
    row = rounds.Rounds(path, SETTING).row("a", 8.0, "things/s", more=True)
    assert (row["name"], row["value"], row["baseline"]) == ("a", 8.0, 2.0)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (2.0, 2.0, 4.0)
    assert (row["rounds"], row["more"], row["share_of_limit"]) == (3, True, None)
    assert (log.median("a", "limit"), log.overall("limit", ["a", "b"])) == (12.0, 12.0)


def test_disturbed_rounds_count_only_without_others(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = rounds.Rounds(tmp_path / "x", SETTING)
    load.share = 0.5
    one(log, "a", ours=1.0, baseline=9.0)
    assert log.count("a") == 0
    assert log.row("a", 1.0, "x")["ratio"] == 9.0
    assert log.row("a", 1.0, "x")["others"] == 0.5
    log.warn()
    assert "50%" in capsys.readouterr().err
    load.share = 0.0
    one(log, "a", ours=1.0, baseline=2.0)
    assert log.count("a") == 1
    assert log.row("a", 1.0, "x")["ratio"] == 2.0
    log.warn()
    assert not capsys.readouterr().err
    load.share = 0.5
    for _ in range(3):  # a machine that is never quiet is not measured for ever
        one(log, "b", ours=1.0, baseline=2.0)
    assert log.count("b") == 1


@pytest.mark.usefixtures("load")
def test_no_round_begins_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rounds, "_STARTED", 100.0)
    log = rounds.Rounds(None, SETTING, seconds=10.0)
    assert log.begin("a")
    now[0] += 4.0
    log.end(ours=1.0, baseline=1.0)
    assert log.begin("a")  # 6 s are left, 4 are needed
    now[0] += 3.0
    log.end(ours=1.0, baseline=1.0)
    assert not log.begin("a")
    assert not log.begin("unknown")
    with pytest.raises(RuntimeError, match="no round"):
        log.end(ours=1.0, baseline=1.0)


def test_other_files_and_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    rounds.Rounds(path, SETTING)
    with pytest.raises(ValueError, match="delete it or name another file"):
        rounds.Rounds(path, SETTING | {"threads": 1})
    for text in ("no line", "\n", "no JSON\n", json.dumps(SETTING) + "\n{}\n", json.dumps(SETTING) + "\n[1]\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="does not hold rounds"):
            rounds.Rounds(path, SETTING)
        assert path.read_text(encoding="utf-8") == text  # it may be somebody's file


def test_a_small_share_of_a_limit_is_not_none() -> None:
    assert report.figures("tiny", None, 1.0, "x", [1.0], 0.000123456)["share_of_limit"] == 0.000123
    assert report.figures("whole", None, 1.0, "x", [1.0], 0.87654)["share_of_limit"] == 0.877
