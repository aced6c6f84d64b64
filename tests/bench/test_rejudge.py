"""bench.real.rejudge: kept samples get the answers and verdicts of today's code, and evaluations go on with the log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tilebeam import TilebeamError
from tilebeam.evaluation.config import ModelFile, Setting
from tilebeam.evaluation.log import Log
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task

from bench.real import rejudge
from bench.real.search_cost import Evaluation

ROW = Evaluation("gsm8k", "GSM8K", "gsm8k", ("gsm8k_test*.jsonl",), 1, ())


def sample(text: str, answer: str | None, correct: float) -> dict[str, Any]:
    return {"text": text, "answer": answer, "correct": correct, "tokens": 3}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(rejudge, "LOGS", tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    return argparse.Namespace(data=tmp_path, out=tmp_path, write=False)


def setting(task_digest: str) -> Setting:
    model = (ModelFile("m", "m.gguf", "x"),)
    return Setting(model, ("npu",), TaskOptions("gsm8k:gsm8k_test.jsonl"), task_digest, ("self-consistency",), (3,))


def test_samples_and_searches_are_judged_again(options: argparse.Namespace, tmp_path: Path) -> None:
    of_old = setting("of old code")
    header = {"tilebeam_eval": 1, "digest": of_old.digest, "setting": of_old.as_dict()}
    samples = [sample("#### 1 + 1 = 2", "1", 0.0), sample("it is 2.0", "2", 1.0), sample("#### 2", "3", 0.0)]
    drawn = {"unit": "samples", "items": [{"id": "0", "samples": samples}], "seconds": 1}
    beam = {"unit": "beam", "items": [{"id": "0", **sample("no", "2", 1.0), "score": 0.5}], "seconds": 2}
    packed = rejudge.LOGS / "gsm8k-log.jsonl.xz"
    rejudge.save(packed, [header, drawn, beam])
    rejudge.save(rejudge.LOGS / "gsm8k-latency.jsonl.xz", [header, {"unit": "latency", "seconds": 3}])
    before = packed.read_bytes()

    told = list(rejudge.told([ROW], options))
    assert told == [
        "gsm8k: 4 texts, 3 other answers, 3 other verdicts, 0 other scores",
        "  samples, item 0: '1' (0) is '2' (1), right is '2'",
        "  samples, item 0: '3' (0) is '2' (1), right is '2'",
        "  beam, item 0: '2' (1) is None (0), right is '2'",
    ]
    assert packed.read_bytes() == before  # without --write nothing is written

    options.write = True
    assert list(rejudge.told([ROW], options)) == told
    options.write = False
    assert list(rejudge.told([ROW], options)) == ["gsm8k: 4 texts, 0 other answers, 0 other verdicts, 0 other scores"]
    today = setting(open_task(TaskOptions(f"gsm8k:{tmp_path / 'gsm8k_test.jsonl'}")).digest)
    for name, units in (("log", ["samples", "beam"]), ("latency", ["latency"])):
        log = tmp_path / f"{name}.jsonl"
        log.write_text("".join(json.dumps(r) + "\n" for r in rejudge.read(rejudge.LOGS / f"gsm8k-{name}.jsonl.xz")))
        with Log(log, today) as opened:
            assert list(opened.records) == units
        with pytest.raises(TilebeamError, match="begun with another setting"):
            Log(log, of_old)
