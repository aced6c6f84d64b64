"""tilebeam eval: the log under kills and torn lines, units that depend on nothing before them, figures that are
those of the algorithms themselves, the timed pass, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from eval_kit import CHECKS, Scripted, ScriptedBench, lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam import (
    BestOfN,
    CompletionOutput,
    LogProb,
    SamplingParams,
    SelfConsistency,
    TilebeamError,
)
from tilebeam.evaluation import plots, runner, statistics
from tilebeam.evaluation.log import Log, timeless
from tilebeam.evaluation.report import Report
from tilebeam.evaluation.setting import ModelFile, Setting, differences, fingerprint, item_seed, units
from tilebeam.evaluation.tasks import Task, TaskOptions, open_task
from tilebeam.evaluation.workbench import Job, Workbench
from tilebeam.reward_cli import RewardOptions, open_scorer
from tiny_kit import references
from typer.testing import CliRunner

from gguf_tools import synth

# --- a model that needs no file ---------------------------------------------------------------------------------------


def job_of(folder: Path, n_items: int = 10, **changes: Any) -> tuple[Job, Task]:
    path = lines(folder / "t.jsonl", *({"prompt": f"{i}: {i % 4}", "answer": str(i % 4)} for i in range(n_items)))
    options = TaskOptions(f"jsonl:{path}")
    task = open_task(options)
    values: dict[str, Any] = {
        "models": (ModelFile("m", str(path), "print"),),
        "devices": ("npu",),
        "task": options,
        "task_digest": task.digest,
        "methods": ("best-of-n", "self-consistency", "adaptive:wave=2"),
        "budgets": (1, 2, 4, 6),
        "scorers": ("logprob", "verifier"),
        "unit_items": 4,
    }
    return Job(Setting(**(values | changes)), RewardOptions()), task


def evaluated(job: Job, task: Task, out: Path, **options: Any) -> Report:
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Task, Path]:
    """An evaluation that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    job, task = job_of(folder)
    evaluated(job, task, folder / "out")
    return job, task, folder / "out"


def test_figures_are_those_of_the_algorithms(whole: tuple[Job, Task, Path]) -> None:
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
            best.append(
                task.verdict(item, BestOfN(LogProb()).infer(model, item.prompt, 6, sampling=params).the_one.text)
            )
            vote = SelfConsistency(task.extract, weighting="logprob").infer(model, item.prompt, 6, sampling=params)
            voted.append(float(vote.answer == item.answer))
            first.append(task.verdict(item, vote.candidates[0].text))
    assert rows["best-of-n[logprob]", "best@k", 6]["value"] == pytest.approx(np.mean(best))
    assert rows["best-of-n[logprob]", "naive@k", 6]["value"] == pytest.approx(np.mean(best))
    assert rows["best-of-n[logprob]", "naive@k", 1]["value"] == pytest.approx(np.mean(first))
    assert rows["self-consistency[logprob]", "weighted@k", 6]["value"] == pytest.approx(np.mean(voted))
    assert 0.2 < np.mean(first) < 0.9
    for k in (1, 2, 4, 6):
        verified, passed = rows["best-of-n[verifier]", "best@k", k], rows["pass", "pass@k", k]
        assert verified["value"] == pytest.approx(passed["value"])
        assert (verified["items"], verified["seeds"]) == (10, 3)
        assert rows["adaptive", "run", k]["tokens"] <= passed["tokens"] * 1.5
    assert rows["pass", "pass@k", 1]["value"] == rows["self-consistency", "maj@k", 1]["value"]


def test_figures_follow_from_results_jsonl(whole: tuple[Job, Task, Path]) -> None:
    job, _, out = whole
    report = json.loads((out / "report.json").read_text())
    rows = {(r["series"], r["figure"], r["budget"]): r for r in report["accuracy"]}
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    samples = [r["samples"] for r in found if r["series"] == "samples"]
    assert len(samples) == 30
    every = [s["correct"] for group in samples for s in group]
    assert rows["pass", "pass@k", 1]["value"] == pytest.approx(np.mean(every))
    passed = np.array([statistics.pass_at_k(6, sum(s["correct"] for s in group), 4) for group in samples]).reshape(
        3, 10
    )
    assert {k: rows["pass", "pass@k", 4][k] for k in ("value", "low", "high")} == pytest.approx(
        {k: v for k, v in statistics.share(passed).as_dict().items() if k in ("value", "low", "high")}
    )
    adaptive = [r for r in found if r["series"] == "adaptive" and r["budget"] == 4]
    assert rows["adaptive", "run", 4]["value"] == pytest.approx(np.mean([r["correct"] for r in adaptive]))
    singles = [c for c in report["comparisons"] if c["second"]["budget"] == 1 and c["first"]["series"] == "adaptive"]
    assert [(c["first"]["budget"], c["second"]["series"]) for c in singles] == [(6, "pass")]
    assert singles[0]["value"] == pytest.approx(
        rows["adaptive", "run", 6]["value"] - rows["pass", "pass@k", 1]["value"]
    )
    assert report["setting"] == job.setting.as_dict()


@pytest.mark.usefixtures("no_plots")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_killed_anywhere_it_goes_on_to_the_same_files(
    whole: tuple[Job, Task, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
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


def test_interrupted_between_units_it_keeps_what_is_done(whole: tuple[Job, Task, Path], tmp_path: Path) -> None:
    job, task, out = whole

    class Interrupted(ScriptedBench):
        left = 3

        def run(self, unit: Any, progress: Any = None) -> Any:
            Interrupted.left -= 1
            if Interrupted.left == 0:
                raise KeyboardInterrupt
            return super().run(unit, progress)

    for attempt in range(2, 5):
        Interrupted.left = 3
        with pytest.raises(KeyboardInterrupt):
            runner.evaluate(job, tmp_path, task=task, workbench=Interrupted)
        assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 1 + 2 * (attempt - 1)
        assert not (tmp_path / "report.json").exists()
    evaluated(job, task, tmp_path)
    assert files(tmp_path) == files(out)


def test_another_setting_is_refused_with_what_differs(whole: tuple[Job, Task, Path]) -> None:
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


def test_a_damaged_log_is_named_by_line(whole: tuple[Job, Task, Path], tmp_path: Path) -> None:
    job, _, out = whole
    rows = (out / "log.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_bytes(b"".join([*rows[:2], b"{]\n", *rows[2:]]))
    with pytest.raises(TilebeamError, match="line 3 is damaged"):
        Log(tmp_path / "log.jsonl", job.setting)
    (tmp_path / "log.jsonl").write_bytes(b"{}\n")
    with pytest.raises(TilebeamError, match="not a log"):
        Log(tmp_path / "log.jsonl", job.setting)


def test_two_processes_do_not_write_one_log(whole: tuple[Job, Task, Path]) -> None:
    job, _, out = whole
    with Log(out / "log.jsonl", job.setting), pytest.raises(TilebeamError, match="Another process"):
        Log(out / "log.jsonl", job.setting)


@pytest.mark.usefixtures("no_plots")
def test_the_timed_pass_takes_turns_and_can_be_had_later(tmp_path: Path) -> None:
    job, task = job_of(tmp_path, models=(ModelFile("a", str(tmp_path / "t.jsonl"), "x"), ModelFile("b", __file__, "y")))
    benches: list[ScriptedBench] = []

    def bench(job: Job, task: Task, keep: int) -> ScriptedBench:
        benches.append(ScriptedBench(job, task, keep))
        return benches[-1]

    report = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench)
    assert report.latencies == []
    report = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench, latency_items=2)
    later = runner.evaluate(job, tmp_path / "out", task=task, workbench=bench, latency_items=3)
    configurations = [(c.series, c.budget) for c in runner.timed_configurations(job.setting)]
    assert configurations[0] == ("pass", 1)
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
    orders = [[turn[:3] for turn in part] for part in per_item]
    assert orders[0] != orders[1]  # drawn anew
    assert len(benches[2].timed) - untimed == 2 * len(configurations)  # the third prompt alone
    assert {m.prompts for m in later.latencies} == {3}
    assert {(m.series, m.budget): m.median for m in later.latencies} == {(s, k): float(k) for s, k in configurations}
    front = {(p.row.series, p.row.budget) for p in later.front}
    assert front
    assert not any(p.row.oracle for p in later.front)
    best = max(p.row.share.value for p in later.points if not p.row.oracle)
    assert max(p.row.share.value for p in later.front) == best
    whole_report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {(p["series"], p["budget"]) for p in whole_report["points"] if p["front"]} == front


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
        assert ("Pareto front" in text) == (name == "latency")
        written[name] = (out / f"{name}.svg").read_bytes()
    report = (out / "report.md").read_text()
    for part in ("| self-consistency | maj@k |", "## Pareto front", "![latency](latency.png)", "one sample"):
        assert part in report
    evaluated(job, task, out)
    assert written == {name: (out / f"{name}.svg").read_bytes() for name in written}  # the same figures, the same file


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
        ({"scorers": ("majority",)}, "self-consistency"),
        ({"scorers": ("prm",)}, "--prm"),
        ({"methods": ("beam",)}, "scorer of steps"),
        ({"methods": ("beams",)}, "beams"),
        ({"methods": ("beam:width=3",), "scorers": ("c.py:f",)}, "width"),
        ({"methods": ("beam:beam_width=4",), "scorers": ("c.py:f",)}, "multiple of the width"),
        ({"methods": ("best-of-n", "best-of-n")}, "must differ"),
        ({"methods": ("best-of-n:x=1",)}, "without options"),
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


def test_items_and_seeds_draw_apart() -> None:
    seeds = {item_seed(s, str(i)) for s in (1, 2, 3) for i in range(2000)}
    assert len(seeds) == 6000
    assert all(0 <= s < 2**32 - 1 for s in seeds)


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


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, items and judges."""
    folder = tmp_path_factory.mktemp("world")
    synth.write_model(folder / "m.gguf", synth.preset("tiny"))
    (folder / "checks.py").write_text(CHECKS)
    lines(folder / "t.jsonl", *({"prompt": f"Item {i}: ", "answer": str(i % 3), "id": f"i{i}"} for i in range(9)))
    return folder


def arguments(world: Path, out: Path, *more: str) -> list[str]:
    return [
        "eval",
        f"--model=m={world / 'm.gguf'}",
        f"--task=jsonl:{world / 't.jsonl'}",
        f"--checker={world / 'checks.py'}:right",
        f"--extract={world / 'checks.py'}:answer",
        "--method=best-of-n,self-consistency,beam:max_steps=3,max_step_tokens=4,dvts:max_steps=2",
        "--budget=1,2,4",
        f"--scorer=logprob,{world / 'checks.py'}:step",
        "--seeds=1,2",
        "--n-predict=8",
        "--unit-items=2",
        "--threads=1",
        "--ctx-size=1024",
        f"--out={out}",
        *more,
    ]


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parent.parent
    paths = [str(root / "python"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for joined in paths for p in joined.split(":"))
    }


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tilebeam.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


@pytest.fixture(scope="module")
def undisturbed(world: Path) -> Path:
    out = world / "whole"
    process = start(*arguments(world, out, "--json"))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert {r["series"] for r in report["accuracy"]} == {
        "pass",
        "best-of-n[logprob]",
        "best-of-n[step]",
        "self-consistency",
        "self-consistency[logprob]",
        "self-consistency[step]",
        "beam[step]",
        "dvts[step]",
    }
    return out


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_the_command_killed_and_restarted(
    world: Path, undisturbed: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    out = tmp_path / "out"
    for least in (3, 9):
        process = start(*arguments(world, out))
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= least:
                process.send_signal(signum)
                break
            time.sleep(0.002)
        _, stderr = process.communicate(timeout=120)
        if process.returncode == 0:  # it was quicker than the signal
            break
        assert process.returncode == (-signal.SIGKILL if signum == signal.SIGKILL else 130), stderr
        assert signum == signal.SIGKILL or "same command goes on" in " ".join(stderr.split())
        assert not (out / "report.json").exists()
    process = start(*arguments(world, out))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert (out / "results.jsonl").read_bytes() == (undisturbed / "results.jsonl").read_bytes()
    assert (out / "report.json").read_bytes() == (undisturbed / "report.json").read_bytes()
    assert "| beam[step] | run |" in stdout


def opened(world: Path) -> tuple[Job, Task]:
    options = TaskOptions(
        f"jsonl:{world / 't.jsonl'}", checker=f"{world / 'checks.py'}:right", extract=f"{world / 'checks.py'}:answer"
    )
    task = open_task(options)
    setting = Setting(
        models=(ModelFile("m", str(world / "m.gguf"), fingerprint(world / "m.gguf")),),
        devices=("npu",),
        task=options,
        task_digest=task.digest,
        methods=("best-of-n", "beam:max_steps=3,max_step_tokens=4"),
        budgets=(2, 8),
        scorers=("logprob", f"{world / 'checks.py'}:step"),
        sampling={"max_tokens": 8},
        n_ctx=1024,
        unit_items=3,
        threads=1,
    )
    return Job(setting, RewardOptions()), task


def test_a_unit_depends_on_nothing_before_it(world: Path) -> None:
    job, task = opened(world)
    todo = list(units(job.setting, len(task.items)))
    rng = np.random.default_rng(0)
    with Workbench(job, task) as bench:
        forwards = {u.key: timeless(bench.run(u)) for u in todo}
        shuffled = {todo[i].key: timeless(bench.run(todo[i])) for i in rng.permutation(len(todo))}
    assert shuffled == forwards
    with Workbench(job) as bench:
        alone = timeless(bench.run(todo[-1]))
    assert alone == forwards[todo[-1].key]
    texts = [s["text"] for r in forwards.values() for i in r["items"] for s in i.get("samples", [])]
    assert len(set(texts)) > 0.9 * len(texts) > 100  # seeds, items and samples draw apart


def log_odds(scores: Sequence[float]) -> NDArray[np.float64]:
    """What the reward model's logits say: scores near 0 and 1 differ as much as others there."""
    p = np.clip(np.asarray(scores, np.float64), 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))


def test_reward_models_rate_the_question_without_examples(tmp_path: Path) -> None:
    """The tiny world's reward model: its scores in the records are those of the question alone."""
    path = lines(tmp_path / "t.jsonl", *({"prompt": f"{a}+7-{a % 5}", "answer": a + 7 - a % 5} for a in (12, 33, 41)))
    shots = lines(tmp_path / "s.jsonl", {"prompt": "1+2", "answer": "3"})
    options = TaskOptions(f"jsonl:{path}", shots_file=str(shots), template="{prompt}\n", shot_answer="{answer}\n")
    task = open_task(options)
    reasoner, prm = references.file_of(references.REASONERS[0], "q8_0"), references.file_of(references.PRM, "q8_0")
    reward = RewardOptions(prm=prm, kind="token", tag=references.TAG, labels=f"{references.GOOD},{references.BAD}")
    setting = Setting(
        models=(ModelFile("m", str(reasoner), fingerprint(reasoner)),),
        devices=("npu",),
        task=options,
        task_digest=task.digest,
        methods=("best-of-n", "beam:max_steps=4"),
        budgets=(4,),
        scorers=("prm",),
        sampling={"max_tokens": 24},
        n_ctx=1024,
        threads=1,
    )
    job = Job(setting, reward)
    runner.check(job)
    sampled, searched = (u for u in units(setting, 3) if u.seed == 1)
    with Workbench(job, task) as bench:
        record, beam = bench.run(sampled), bench.run(searched)
        assert timeless(bench.run(sampled)) == timeless(record)  # the reward model's cache is clean, too
    assert [i["id"] for i in beam["items"]] == ["0", "1", "2"]
    assert all(i["usage"]["scored_tokens"] > 0 for i in beam["items"] + record["items"])
    assert task.items[0].prompt == "1+2\n3\n12+7-2\n"
    with open_scorer(reward, n_ctx=1024, device="npu", threads=1) as scorer:
        apart = 0.0
        for item, got in zip(task.items, record["items"], strict=True):
            texts = [CompletionOutput(0, s["text"], [1], "stop", 0) for s in got["samples"]]
            scores = [s["scores"]["prm"] for s in got["samples"]]
            # Other batches differ in the last bits, another question in the first.
            assert log_odds(scores) == pytest.approx(log_odds(scorer.score(item.body, texts)), abs=0.3)
            assert scores == [s["weights"]["prm"] for s in got["samples"]]
            asked = log_odds(scorer.score(item.prompt, texts))
            apart = max(apart, float(np.abs(log_odds(scores) - asked).max()))
        assert apart > 0.6


def test_a_model_that_changed_and_a_task_that_changed_are_refused(world: Path) -> None:
    job, task = opened(world)
    model = replace(job.setting.models[0], fingerprint="another")
    with Workbench(replace(job, setting=replace(job.setting, models=(model,))), task) as bench:
        unit = next(units(job.setting, 1))
        with pytest.raises(TilebeamError, match="not the file m"):
            bench.run(unit)
    with pytest.raises(TilebeamError, match="differ here"):
        Workbench(replace(job, setting=replace(job.setting, task_digest="another")), task)


def test_models_are_closed_when_there_are_too_many(world: Path) -> None:
    job, task = opened(world)
    other = replace(job.setting.models[0], name="n")
    job = replace(job, setting=replace(job.setting, models=(job.setting.models[0], other)))
    with Workbench(job, task, keep=1) as bench:
        first = bench._lm("m", "npu")
        assert bench._lm("m", "npu") is first
        bench._lm("n", "npu")
        with pytest.raises(TilebeamError, match="closed"):
            first.generate("a")
    with Workbench(job, task, keep=2) as bench:
        first = bench._lm("m", "npu")
        bench._lm("n", "npu")
        assert bench._lm("m", "npu") is first


@pytest.fixture
def command() -> Any:
    from tilebeam.cli import app

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, list(args))

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model=nowhere.gguf", "no such file"),
        ("--method=max_steps=3", "option of no method"),
        ("--budget=1,two", "whole numbers"),
        ("--device=gpu", "npu, cpu"),
        ("--seeds=", "at least one of its seeds"),
        ("--scorer=prm", "--prm FILE"),
        ("--reward-tag=x", "--prm or --orm"),
        ("--task=jsonl:nowhere.jsonl", "nowhere.jsonl: No such file"),
    ],
)
def test_the_command_says_what_is_wrong(world: Path, tmp_path: Path, command: Any, change: str, message: str) -> None:
    name = change.split("=")[0]
    args = [a for a in arguments(world, tmp_path / "out") if not a.startswith(f"{name}=")] + [change]
    result = command(*args)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_help_names_the_parts(command: Any) -> None:
    text = command("eval", "--help").stdout
    for part in ("--latency-items", "--prm", "reasoning-gym:NAME", "--executor", "--json"):
        assert part in text


def test_packages_of_a_version_go_into_the_setting(undisturbed: Path) -> None:
    header = json.loads((undisturbed / "log.jsonl").read_text().splitlines()[0])
    assert header["setting"]["versions"]["tilebeam"] == tilebeam.__version__
    assert str(undisturbed.parent) not in json.dumps(header["setting"]["task"])  # files may lie elsewhere
