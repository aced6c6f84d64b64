"""The yardstick of tilebeam eval: one greedy answer per item, first in all that is reported; and older folders, which
have none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import eval_kit
import numpy as np
import pytest
from eval_kit import CHECKS, Scripted, ScriptedBench, lines
from tilebeam import SamplingParams, TilebeamError, load
from tilebeam.cli.main import app
from tilebeam.evaluation import estimators as statistics
from tilebeam.evaluation import plots, runner
from tilebeam.evaluation.config import ModelFile
from tilebeam.evaluation.eval_report import EvalReport
from tilebeam.evaluation.tasks.task import Task
from tilebeam.evaluation.worker import EvalJob
from typer.testing import CliRunner

from bench.lib import synth

ALL = ("greedy", "best-of-n", "self-consistency")


def job_of(folder: Path, *methods: str, budgets: tuple[int, ...] = (1, 2, 4)) -> tuple[EvalJob, Task]:
    models = tuple(ModelFile(name, __file__, name) for name in "ab")
    return eval_kit.job_of(folder, models=models, methods=methods, budgets=budgets, scorers=("logprob",))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds."""
    monkeypatch.setattr(plots, "draw", lambda *_: [])


class Watched(ScriptedBench):
    """Knows what was run."""

    done: list[str]

    def run(self, unit: Any, progress: Any = None) -> Any:
        type(self).done.append(unit.key)
        return super().run(unit, progress)


def evaluated(job: EvalJob, task: Task, out: Path, **options: Any) -> tuple[EvalReport, list[str]]:
    """The report, and the units that were run."""
    Watched.done = []
    return runner.evaluate(job, out, task=task, workbench=Watched, **options), Watched.done


@pytest.mark.usefixtures("no_plots")
def test_one_answer_per_item_whatever_seeds_and_budgets(tmp_path: Path) -> None:
    job, task = job_of(tmp_path, *ALL, budgets=(2, 4))
    report, done = evaluated(job, task, tmp_path / "out", latency_items=2)
    assert [key for key in done if "greedy" in key] == [
        f"{model}/npu/greedy@1/seed 1/{span}" for span in ("0-3", "4-7", "8-9") for model in "ab"
    ]
    values = []
    for item in task.items:
        [output] = Scripted().generate([item.prompt], SamplingParams(temperature=0.0, seed=0))
        values.append(task.verdict(item, output.outputs[0].text))
    first = next(r for r in report.rows if r.model == "a")
    assert (first.series, first.budget, first.share.seeds) == ("greedy", 1, 1)
    assert first.share == statistics.share([values])
    assert 0.2 < first.share.value < 0.9
    # The columns are the budgets there are; no method ran at 1.
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| series | figure | 1 | 2 | 4 |" in text
    assert f"| greedy | run | {100 * first.share.value:.1f} (" in text
    assert {m.series for m in report.latencies} >= {"greedy", "pass"}
    assert {p.row.series for p in report.points if p.row.budget == 1} == {"greedy"}
    gains = [c for c in report.comparisons if (c.first.model, c.second.model, c.second.budget) == ("a", "a", 1)]
    assert {(c.first.series, c.first.budget) for c in gains} == {
        (series, k)
        for series in ("best-of-n[logprob]", "self-consistency", "self-consistency[logprob]")
        for k in (2, 4)
    }
    for c in gains:
        assert c.second == first
        assert c.difference == statistics.paired_bootstrap(c.first.values, [values])
    others = [c for c in report.comparisons if (c.first.model, c.second.model) == ("a", "b")]
    assert {c.first.budget for c in others} == {4}


@pytest.mark.usefixtures("no_plots")
def test_an_older_folder_goes_on_with_greedy(tmp_path: Path) -> None:
    """What is there stays byte for byte, and only what is missing is run."""
    older, task = job_of(tmp_path, *ALL[1:])
    job, _ = job_of(tmp_path, *ALL)
    out = tmp_path / "out"
    evaluated(older, task, out, latency_items=1)
    before = (out / "log.jsonl").read_bytes()
    old = json.loads((out / "report.json").read_text())
    report, done = evaluated(job, task, out, latency_items=1)
    assert len(done) == 6
    assert all("greedy" in key for key in done)
    assert (out / "log.jsonl").read_bytes().startswith(before)
    fresh, _ = evaluated(job, task, tmp_path / "fresh")
    assert [r.as_dict() for r in report.rows] == [r.as_dict() for r in fresh.rows]
    assert [r for r in report.as_dict()["accuracy"] if r["series"] != "greedy"] == old["accuracy"]
    assert {m.prompts for m in report.latencies} == {1}
    again, done = evaluated(older, task, out)  # fewer methods than were run: those that the folder began with
    assert done == []
    assert again.as_dict()["accuracy"] == old["accuracy"]
    with pytest.raises(TilebeamError, match=r'methods was \["best-of-n", "self-consistency"\], is \["greedy"\]'):
        evaluated(job_of(tmp_path, "greedy")[0], task, out)


@pytest.mark.usefixtures("no_plots")
def test_a_search_that_is_added_counts_what_was_timed_once(tmp_path: Path) -> None:
    """Methods that take the same work are timed once, under the name of one of them, which then may be another."""
    out = tmp_path / "out"
    job, task = job_of(tmp_path, "greedy", "best-of-n")
    evaluated(job, task, out, latency_items=2)
    report, _ = evaluated(*job_of(tmp_path, *ALL), out, latency_items=2)
    assert {m.series for m in report.latencies} > {"best-of-n[logprob]", "self-consistency"}
    assert {m.prompts for m in report.latencies} == {2}


@pytest.mark.usefixtures("no_plots")
def test_the_command_is_greedy_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: texts are those of `LM.generate` at temperature 0, whatever temperature samples have."""
    synth.write_model(tmp_path / "m.gguf", synth.preset("tiny"))
    (tmp_path / "checks.py").write_text(CHECKS)
    items = [{"prompt": f"Item {i}: ", "answer": str(i % 3)} for i in range(4)]
    task, judge = f"jsonl:{lines(tmp_path / 't.jsonl', *items)}", f"{tmp_path / 'checks.py'}"
    words = ["eval", "-m", str(tmp_path / "m.gguf"), "--task", task, "--checker", f"{judge}:right", "-n", "8"]
    words += ["--extract", f"{judge}:answer", "--temp", "1.5", "--budget", "2", "--seeds", "1,2"]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    (out,) = (tmp_path / "eval").iterdir()
    assert re.fullmatch(r"t-\d{4}-\d\d-\d\d", out.name)
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    greedy = [r for r in found if r["series"] == "greedy"]
    with load(tmp_path / "m.gguf", n_ctx=512, threads=1, lookup=False) as lm:
        outputs = lm.generate([i["prompt"] for i in items], SamplingParams(temperature=0.0, max_tokens=8))
    assert [(r["text"], r["finish"]) for r in greedy] == [
        (o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs
    ]
    assert [r["usage"]["completion_tokens"] for r in greedy] == [len(o.outputs[0].token_ids) for o in outputs]
    report = json.loads((out / "report.json").read_text())
    assert report["setting"]["methods"] == list(ALL)
    assert report["accuracy"][0]["series"] == "greedy"
    assert report["accuracy"][0]["value"] == pytest.approx(np.mean([r["correct"] for r in greedy]))
