"""tilebeam eval: the log under kills and torn lines, figures that are those of the algorithms themselves, the timed
pass, plots. Models are scripted; test_eval_models.py has real ones."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_kit import Scripted, ScriptedBench, job_of, lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam import (
    BestOfN,
    LogProb,
    SamplingParams,
    SelfConsistency,
    TilebeamError,
)
from tilebeam.cli.evaluate_view import Bars
from tilebeam.evaluation import plots, ranking, runner
from tilebeam.evaluation.config import ModelFile, differences, item_seed
from tilebeam.evaluation.eval_report import EvalReport
from tilebeam.evaluation.log import Log
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.task import Task
from tilebeam.evaluation.worker import EvalJob
from tilebeam.gguf.fingerprint import fingerprint
from tilebeam.outputs import Progress


def evaluated(job: EvalJob, task: Task, out: Path, **options: Any) -> EvalReport:
    return runner.evaluate(job, out, task=task, workbench=ScriptedBench, **options)


@pytest.fixture
def no_plots() -> Iterator[None]:
    """For tests that evaluate often; plots have a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda *_: [])
        yield


def files(out: Path) -> dict[str, Any]:
    """What does not depend on the clock."""
    report = json.loads((out / "report.json").read_text())
    return {"results": (out / "results.jsonl").read_text(), "accuracy": report["accuracy"], "c": report["comparisons"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[EvalJob, Task, Path]:
    """An evaluation that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    job, task = job_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda *_: [])
        evaluated(job, task, folder / "out")
    return job, task, folder / "out"


def test_figures_are_those_of_the_algorithms(whole: tuple[EvalJob, Task, Path]) -> None:
    """At the greatest budget the samples are all there are: the real algorithms, run by hand, must choose alike."""
    job, task, out = whole
    rows = {
        (r["series"], r["figure"], r["budget"]): r for r in json.loads((out / "report.json").read_text())["accuracy"]
    }
    model = Scripted()
    best, voted, first = [], [], []
    for seed in job.setting.seeds:
        for item in task.items:
            params = SamplingParams(**dict(job.setting.sampling), seed=item_seed(seed, item.id), logprobs=True)
            best.append(task.verdict(item, BestOfN(LogProb()).infer(model, item.prompt, 6, sampling=params).best.text))
            vote = SelfConsistency(task.extract, weighting="logprob").infer(model, item.prompt, 6, sampling=params)
            voted.append(float(vote.answer == item.answer))
            first.append(task.verdict(item, vote.candidates[0].text))
    assert rows["best-of-n[logprob]", "best@k", 6]["value"] == pytest.approx(np.mean(best))
    assert rows["self-consistency[logprob]", "weighted@k", 6]["value"] == pytest.approx(np.mean(voted))
    assert 0.2 < np.mean(first) < 0.9
    for k in (1, 2, 4, 6):
        verified, passed = rows["best-of-n[verifier]", "best@k", k], rows["pass", "pass@k", k]
        assert verified["value"] == pytest.approx(passed["value"])
        assert (verified["items"], verified["seeds"]) == (10, 3)
        assert rows["adaptive", "run", k]["tokens"] <= passed["tokens"] * 1.5
    assert rows["pass", "pass@k", 1]["value"] == rows["self-consistency", "maj@k", 1]["value"]


@pytest.mark.usefixtures("no_plots")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_killed_anywhere_it_goes_on_to_the_same_files(
    whole: tuple[EvalJob, Task, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    job, task, out = whole
    folder = tmp_path_factory.mktemp("killed")
    log = (out / "log.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(log)), label="bytes that were written")
    (folder / "log.jsonl").write_bytes(log[:cut])
    before = log[:cut].count(b"\n")
    done: list[str] = []

    class Watched(ScriptedBench):
        def run(self, unit: Any, progress: Any = None) -> Any:
            done.append(unit.key)
            return super().run(unit, progress)

    runner.evaluate(job, folder, task=task, workbench=Watched)
    assert files(folder) == files(out)
    assert len(done) == log.count(b"\n") - max(1, before)  # what was finished was not done again


def test_another_setting_is_refused_with_what_differs(whole: tuple[EvalJob, Task, Path]) -> None:
    job, task, out = whole
    content = (out / "log.jsonl").read_bytes()
    other = replace(job, setting=replace(job.setting, seeds=(1, 2), sampling={"temperature": 0.5}))
    with pytest.raises(
        TilebeamError, match=r"sampling.temperature was null, is 0.5; seeds was \[1, 2, 3\], is \[1, 2\]"
    ):
        evaluated(other, task, out)
    assert (out / "log.jsonl").read_bytes() == content
    moved = replace(job.setting, models=(replace(job.setting.models[0], path="elsewhere"),))
    assert moved.digest == job.setting.digest  # where a file lies does not matter


def test_a_damaged_log_is_named_by_line(whole: tuple[EvalJob, Task, Path], tmp_path: Path) -> None:
    job, _, out = whole
    rows = (out / "log.jsonl").read_bytes().splitlines(keepends=True)
    for line in (b"{]", b"[" * 100000, b"7", b'{"unit": 1}'):
        (tmp_path / "log.jsonl").write_bytes(b"".join([*rows[:2], line + b"\n", *rows[2:]]))
        with pytest.raises(TilebeamError, match="line 3 is damaged"):
            Log(tmp_path / "log.jsonl", job.setting)
    for head in (
        b"{}\n",
        b'{"tilebeam_eval": 1}\n',
        b'{"tilebeam_eval": 1, "digest": "", "setting": []}\n{"unit": "u"}\n',
    ):
        (tmp_path / "log.jsonl").write_bytes(head)
        with pytest.raises(TilebeamError, match="not a log"):
            Log(tmp_path / "log.jsonl", job.setting)


def test_a_log_without_results_takes_another_setting(whole: tuple[EvalJob, Task, Path], tmp_path: Path) -> None:
    """What went wrong at once, because of a model or an option, can be set right in the same folder."""
    job, _, _ = whole
    path = tmp_path / "log.jsonl"
    other = replace(job.setting, seeds=(1, 2))
    with Log(path, job.setting):
        pass
    with Log(path, other) as log:
        log.add({"unit": "u"})
    assert [json.loads(line).get("digest") for line in path.read_text().splitlines()] == [other.digest, None]
    with pytest.raises(TilebeamError, match="another setting"):
        Log(path, job.setting)


def test_two_processes_do_not_write_one_log(whole: tuple[EvalJob, Task, Path]) -> None:
    job, _, out = whole
    with Log(out / "log.jsonl", job.setting), pytest.raises(TilebeamError, match="Another process"):
        Log(out / "log.jsonl", job.setting)


@pytest.mark.usefixtures("no_plots")
def test_half_a_character_in_a_name_ends_no_evaluation(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"prompt": "a1", "answer": "1", "id": "\ud83d"})  # of an emoji
    task = open_task(options := TaskOptions(f"jsonl:{path}"))
    for _run in range(2):  # the second reads what the first wrote
        job, _ = job_of(tmp_path, task=options, task_digest=task.digest, seeds=(1,), methods=("greedy",))
        assert [item.id for item in evaluated(job, task, tmp_path / "out").items] == ["\ud83d"]
    assert json.loads((tmp_path / "out" / "results.jsonl").read_text())["id"] == "\ud83d"


@pytest.mark.usefixtures("no_plots")
def test_the_timed_pass_takes_turns_and_can_be_had_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, task = job_of(tmp_path, models=(ModelFile("a", str(tmp_path / "t.jsonl"), "x"), ModelFile("b", __file__, "y")))
    benches: list[ScriptedBench] = []

    def bench(job: EvalJob, task: Task, keep: int) -> ScriptedBench:
        benches.append(ScriptedBench(job, task, keep))
        return benches[-1]

    report = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench)
    assert report.latencies == []
    report = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench, latency_items=2)
    later = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench, latency_items=3)
    listed = runner.timed_configurations(job.setting)
    configurations = [(c.series, c.budget) for c in listed]
    assert configurations[:2] == [("greedy", 1), ("pass", 1)]
    assert ("best-of-n[logprob]", 1) not in configurations  # one sample is one sample
    assert ("adaptive", 1) in configurations
    untimed = 2 * len({series for series, _ in configurations})  # each series of each model ran once before
    turns = benches[1].timed[untimed:]
    assert len(turns) == 2 * 2 * len(configurations)
    per_item = [turns[: len(turns) // 2], turns[len(turns) // 2 :]]
    for item, part in zip(task.items, per_item, strict=False):
        assert sorted((m, series, k) for m, series, k, _ in part) == sorted(
            (m, *c) for m in "ab" for c in configurations
        )
        assert {i for *_, i in part} == {item.id}
        # Both models are spread over the whole: neither has one half, nor do budgets or series come in their order.
        half = [m for m, *_ in part[: len(part) // 2]]
        assert 0 < half.count("a") < len(half)
        assert [(series, k) for m, series, k, _ in part if m == "a"] != configurations
    assert len(benches[2].timed) - untimed == 2 * len(configurations)  # the third prompt alone
    assert {m.prompts for m in later.latencies} == {3}
    alike = [c.alike for c in listed if len(c.alike) > 1]
    # Who reads what decoding left is timed once for all; who runs a program or a model, apart.
    assert set(alike) == {("best-of-n[logprob]", "self-consistency", "self-consistency[logprob]")}
    assert {(m.series, m.budget): m.median for m in later.latencies} == {
        (s, c.budget): float(c.budget) for c in listed for s in c.alike or (c.series,)
    }
    assert not any(p.row.oracle for p in later.front)
    best = max(p.row.share.value for p in later.points if not p.row.oracle)
    assert max(p.row.share.value for p in later.front) == best
    with pytest.raises(TilebeamError, match="not a GGUF file"):  # found before anything runs
        runner.evaluate(job, tmp_path / "out", task=task, workbench=bench, latency_devices=["cpu"])
    monkeypatch.setattr(runner.gguf_tools, "is_repacked", lambda _: False)
    elsewhere = runner.evaluate(
        job, tmp_path / "out", task=task, workbench=bench, latency_items=1, latency_devices=["cpu", "npu"]
    )
    assert len(benches[3].timed) - untimed == 2 * len(configurations)  # on the CPU alone
    assert {m.prompts for m in elsewhere.latencies if m.device == "cpu"} == {1}
    shares = {(p.row.model, p.row.series, p.row.budget, p.row.device): p.row.share for p in elsewhere.points}
    assert len(shares) == 2 * len(later.points)
    assert all(share == shares[(*name, "npu")] for (*name, _), share in shares.items())


def test_plots_and_report_are_files_that_open(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install tilebeam[plot])")
    job, task = job_of(tmp_path)
    out = tmp_path / "out"
    evaluated(job, task, out, latency_items=1)
    written = {}
    for name in ("accuracy", "latency"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        text = "".join(ElementTree.parse(out / f"{name}.svg").getroot().itertext())
        assert "self-consistency[logprob]" in text
        assert ("Pareto front" in text) == (name != "accuracy")
        assert "items" in text
        written[name] = (out / f"{name}.svg").read_bytes()
    report = (out / "report.md").read_text()
    for part in (
        "| self-consistency | maj@k |",
        "## Pareto front",
        "![latency](latency.png)",
        "| self-consistency@6 | greedy |",
    ):
        assert part in report
    evaluated(job, task, out)
    assert written == {name: (out / f"{name}.svg").read_bytes() for name in written}  # the same figures, the same file


@pytest.mark.usefixtures("no_plots")
def test_items_without_answers_are_answered_without_a_verdict(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"prompt": "a1"}, {"prompt": "b2", "id": "two"})
    task = open_task(TaskOptions(f"jsonl:{path}"))
    changes: dict[str, Any] = {"task": TaskOptions(f"jsonl:{path}"), "task_digest": task.digest, "seeds": (1,)}
    job, _ = job_of(tmp_path, **changes, scorers=("logprob",))
    report = evaluated(job, task, tmp_path / "out", latency_items=1)
    assert not report.comparisons
    assert not report.points
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["value"] for row in written["accuracy"]} == {None}
    assert {row["series"] for row in written["latency"]} == {row["series"] for row in written["accuracy"]}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "no verdict" in text
    assert "nan" not in text
    found = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    drawn = [item for item in found if item["series"] == "samples"]
    assert [item["id"] for item in drawn] == ["0", "two"]
    for item in drawn:
        answers = [s["answer"] for s in item["samples"]]
        assert item["votes"] == {a: answers.count(a) for a in item["votes"]}
        assert sum(item["votes"].values()) == len(answers) - answers.count(None)
    with pytest.raises(TilebeamError, match="--scorer verifier needs items with answers"):
        evaluated(job_of(tmp_path, **changes)[0], task, tmp_path / "other")


def test_the_bar_moves_with_items_not_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, str]] = []
    bars = Bars()
    with bars.phase("evaluate", 10, 2):
        assert bars._bar is not None
        monkeypatch.setattr(bars._bar, "update", lambda _, **state: shown.append((state["completed"], state["note"])))
        for ended in (0, 7, 8, 24, 32):
            bars.batch(4, Progress(finished=ended, total=32, running=3, tokens=9, seconds=1.0))
        bars.finished(4)
    assert [done for done, _ in shown] == [2, 2, 3, 5, 6, 6]
    assert shown[0][1] == "3 running, 9 t/s"


@pytest.mark.usefixtures("no_plots")
def test_what_is_done_so_far_can_be_reported(tmp_path: Path) -> None:
    job, task = job_of(tmp_path)
    with pytest.raises(TilebeamError, match="No item is done"):
        evaluated(job, task, tmp_path / "nothing", so_far=True)
    out = tmp_path / "out"
    complete = evaluated(job, task, out)
    everything = (out / "log.jsonl").read_text().splitlines()
    units = [json.loads(line)["unit"] for line in everything[1:]]
    spans = list(dict.fromkeys(unit.rpartition("/")[2] for unit in units))
    assert len(spans) > 1
    assert any(unit.startswith("m/npu/adaptive") for unit in units)
    # The first span is done by all, the second lacks one unit, and a search has not begun.
    lacking = next(unit for unit in units if unit.endswith(f"/{spans[1]}"))
    kept = [
        line
        for line, unit in zip(everything[1:], units, strict=True)
        if unit.rpartition("/")[2] in spans[:2] and unit != lacking and not unit.startswith("m/npu/adaptive")
    ]
    (out / "log.jsonl").write_text("\n".join([everything[0], *kept]) + "\n")
    report = evaluated(job, task, out, so_far=True)
    n = int(spans[0].partition("-")[2]) + 1
    assert [item.id for item in report.items] == [item.id for item in task.items[:n]]
    assert {r.share.items for r in report.rows} == {n}
    assert "adaptive" not in {r.series for r in report.rows}
    assert len((out / "log.jsonl").read_text().splitlines()) == 1 + len(kept)  # nothing was run
    assert json.loads((out / "report.json").read_text())["items"] == n
    timed = evaluated(job, task, out, so_far=True, latency_items=2)
    assert {latency.series for latency in timed.latencies} == {r.series for r in timed.rows}
    assert len((out / "log.jsonl").read_text().splitlines()) == 1 + len(kept)
    again = evaluated(job, task, out)
    assert [r.as_dict() for r in again.rows] == [r.as_dict() for r in complete.rows]


@pytest.mark.usefixtures("no_plots")
def test_a_method_with_other_options_is_another_method(tmp_path: Path) -> None:
    """Reports call the only search of a kind by its name, whatever its options: what it did is not another's."""
    sure, unsure = (f"adaptive:confidence={share}" for share in (0.99, 0.5))
    for methods in ((), ("adaptive",), (sure,), (unsure,), (unsure, sure)):
        job, task = job_of(tmp_path, methods=("greedy", *methods), scorers=(), seeds=(1,))
        report = evaluated(job, task, tmp_path / "out", latency_items=2)
        fresh = evaluated(job, task, tmp_path / "-".join(methods), latency_items=2)
        assert [r.as_dict() for r in report.rows] == [r.as_dict() for r in fresh.rows]
        assert [replace(m, cpu_seconds=None) for m in report.latencies] == [
            replace(m, cpu_seconds=None) for m in fresh.latencies
        ]


@pytest.mark.usefixtures("no_plots")
def test_models_take_turns_so_that_a_stopped_run_has_the_same_items_of_all(tmp_path: Path) -> None:
    job, task = job_of(tmp_path)
    first = job.setting.models[0]
    both, _ = job_of(tmp_path, models=(first, replace(first, name="n")))
    evaluated(both, task, tmp_path / "out")
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()[1:]
    spans = [json.loads(line)["unit"].rpartition("/")[2] for line in lines]
    assert len(set(spans)) == 3
    assert spans == sorted(spans, key=lambda span: int(span.partition("-")[0]))
    assert {json.loads(line)["unit"].partition("/")[0] for line in lines[: len(lines) // 3]} == {"m", "n"}
    # In what order units are done makes no difference.
    alone = evaluated(job, task, tmp_path / "alone")
    whole = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [r.as_dict() for r in alone.rows] == [r for r in whole["accuracy"] if r["model"] == "m"]


def test_how_well_scorers_tell_right_samples_is_reported(whole: tuple[EvalJob, Task, Path]) -> None:
    job, _, out = whole
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    samples = [(r["id"], s) for r in found if r["series"] == "samples" for s in r["samples"]]
    (reported,) = json.loads((out / "report.json").read_text())["rankings"]
    assert (reported["model"], reported["samples"]) == ("m", len(samples))
    assert set(reported["rows"]) == {"logprob", "shortness"}  # who knows the answer is not ranked
    # An item's samples under all seeds are one problem's.
    problem, scores, right = zip(*((p, s["scores"]["logprob"], s["correct"] == 1) for p, s in samples), strict=True)
    within = reported["rows"]["logprob"]["within"]
    assert within == pytest.approx(ranking.auroc_within(scores, right, problem))
    assert f"{within:.3f}" in (out / "report.md").read_text()
    assert job.setting.n_samples * 30 == len(samples)


@pytest.mark.usefixtures("no_plots")
def test_votes_cannot_be_weighted_by_what_is_below_zero(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("def low(prompt, text): return -1.0\ndef inf(prompt, text): return float('inf')\n")
    job, task = job_of(tmp_path, scorers=(f"{tmp_path}/c.py:low",), methods=("self-consistency",), seeds=(1,))
    report = evaluated(job, task, tmp_path / "out", latency_items=1)
    assert {r.series for r in report.rows} == {"pass", "self-consistency"}
    assert {m.series for m in report.latencies} == {"pass", "self-consistency"}
    assert "scores below 0" in report.notes[0]
    job, task = job_of(tmp_path, scorers=(f"{tmp_path}/c.py:inf",))
    with pytest.raises(TilebeamError, match="not finite"):
        evaluated(job, task, tmp_path / "inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scorers": ()}, "best-of-n needs a scorer"),
        ({"scorers": ("nonsense",)}, "nonsense"),
        ({"scorers": ("consensus",)}, "which texts are compared"),
        ({"scorers": ("prm",)}, "--prm"),
        ({"methods": ("beam",)}, "scorer of steps"),
        ({"methods": ("beams",)}, "beams"),
        ({"methods": ("beam:width=3",), "scorers": ("c.py:f",)}, "width"),
        ({"methods": ("beam:beam_width=4",), "scorers": ("c.py:f",)}, "multiple of the width"),
        ({"methods": ("best-of-n", "best-of-n")}, "must differ"),
        ({"methods": ("best-of-n:x=1",)}, "takes no options"),
        ({"methods": ("vote:extract=boxed",)}, "takes no options"),
        ({"methods": ("vote:weighting=softmax,sharpness=-1",)}, "sharpness"),
        ({"methods": ("vote:weighting=softmax",), "scorers": ("verifier",)}, "needs a scorer"),
        ({"methods": ("greedy:temperature=1",)}, "takes no options"),
        ({"methods": ("greedy:weighting=softmax",)}, "takes no options"),
        ({"methods": ("gready",)}, "choose from greedy, best-of-n"),
        ({"devices": ("cpu",)}, "cannot be loaded"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TilebeamError, match=message):
        evaluated(*job_of(tmp_path, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    for changes in ({"budgets": (4, 2)}, {"budgets": (0, 1)}, {"seeds": ()}, {"unit_items": 0}):
        with pytest.raises(TilebeamError):
            job_of(tmp_path, **changes)
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2, "d": 4}) == [
        "a.b was 1, is 3",
        "d was null, is 4",
    ]


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 3000)
    first = fingerprint(path)
    path.write_bytes(b"a" * 2999 + b"b")
    assert fingerprint(path) != first
    path.write_bytes(b"a" * 3001)
    assert fingerprint(path) != first
    path.write_bytes(b"a" * 3000)
    assert fingerprint(path) == first
