"""tilebeam eval with real models: the command under kills and interrupts, units that depend on nothing before them,
reward models, and what the command refuses."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import process_kit
import pytest
from eval_kit import CHECKS, lines
from numpy.typing import NDArray
from tilebeam import CompletionOutput, TilebeamError
from tilebeam.cli.eval_options import RunningOptions
from tilebeam.evaluation import runner
from tilebeam.evaluation.config import ModelFile, Setting, units
from tilebeam.evaluation.log import timeless
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.task import Task
from tilebeam.evaluation.worker import EvalJob, Workbench
from tilebeam.gguf.fingerprint import fingerprint
from tilebeam.scoring.load_reward import RewardSpec
from tiny_kit import references
from typer.testing import CliRunner

from bench.lib import synth


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
        "--seeds=1",
        "--n-predict=8",
        "--unit-items=2",
        "--threads=1",
        "--ctx-size=1024",
        f"--out={out}",
        *more,
    ]


@pytest.fixture(scope="module")
def undisturbed(world: Path) -> Path:
    out = world / "whole"
    done = process_kit.run("tilebeam", *arguments(world, out, "--json"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
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


def test_the_command_killed_and_restarted(world: Path, undisturbed: Path, tmp_path: Path) -> None:
    """What a process was ended in shows in its own lines of the log: a signal that came while it still began would end
    it in another way."""
    out = tmp_path / "out"
    log = out / "log.jsonl"
    for more, signum in ((3, signal.SIGKILL), (6, signal.SIGINT)):
        process = process_kit.start("tilebeam", *arguments(world, out))
        wanted = more + (log.read_bytes().count(b"\n") if log.exists() else 0)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.read_bytes().count(b"\n") >= wanted:
                process.send_signal(signum)
                break
            time.sleep(0.002)
        _, stderr = process.communicate(timeout=120)
        if (out / "report.json").exists():  # it was quicker than the signal
            break
        assert process.returncode == (-signal.SIGKILL if signum == signal.SIGKILL else 130), stderr
        assert signum == signal.SIGKILL or "run the same command again to resume" in " ".join(stderr.split())
    (out / ".report.json.0123abcd.part").touch()  # as a kill in the midst of its being written leaves it
    done = process_kit.run("tilebeam", *arguments(world, out))
    assert done.returncode == 0, done.stderr
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert (out / "results.jsonl").read_bytes() == (undisturbed / "results.jsonl").read_bytes()
    assert (out / "report.json").read_bytes() == (undisturbed / "report.json").read_bytes()
    assert "| beam[step] | run |" in done.stdout


def opened(world: Path) -> tuple[EvalJob, Task]:
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
    return EvalJob(setting), task


def test_a_unit_depends_on_nothing_before_it(world: Path) -> None:
    job, task = opened(world)
    todo = list(units(job.setting, len(task.items)))
    rng = np.random.default_rng(0)
    with Workbench(job, task) as bench:
        forwards = {u.key: timeless(bench.run(u)) for u in todo}
        shuffled = {todo[i].key: timeless(bench.run(todo[i])) for i in rng.permutation(len(todo))}
    assert shuffled == forwards
    with Workbench(job, open_task(job.setting.task)) as bench:
        alone = timeless(bench.run(todo[-1]))
    assert alone == forwards[todo[-1].key]
    texts = [s["text"] for r in forwards.values() for i in r["items"] for s in i.get("samples", [])]
    assert len(set(texts)) > 0.9 * len(texts) > 100  # seeds, items and samples draw apart


def test_what_decoding_leaves_behind_is_kept_and_rates(world: Path, tmp_path: Path) -> None:
    """Each token's statistics, scorers of them, and votes with relative weights."""
    job, task = opened(world)
    names = ("logprob", "tail-entropy")
    votes = ("self-consistency", "vote:weighting=softmax", "vote:weighting=softmax,sharpness=2")
    own = replace(job.setting, methods=votes, scorers=names, seeds=(1,), budgets=(1, 4))
    report = runner.evaluate(replace(job, setting=own), tmp_path, task=task, latency_items=1)
    for item in lines_of(tmp_path / "results.jsonl"):
        for s in item.get("samples", []):
            assert len(s["certainties"]) == len(s["entropies"]) == s["tokens"]
            assert s["scores"]["tail-entropy"] == pytest.approx(-np.mean(s["entropies"][-64:]), abs=1e-3)
    rows = {(r.series, r.budget): r.share.value for r in report.rows}
    series = {"pass", "self-consistency"} | {f"{vote}[{name}]" for vote in votes for name in names}
    series.remove("self-consistency[tail-entropy]")  # negative scores weigh only relatively
    assert {name for name, _ in rows} == series
    assert all(rows[name, 1] == rows["pass", 1] for name in series if name.startswith("self-consistency["))
    assert set(report.rankings[0].rows) == {*names, "shortness"}
    assert {m.series for m in report.latencies} == series - {"pass"} | {"pass"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    reward = RewardSpec(prm, kind="token", tag=references.TAG, labels=(references.GOOD, references.BAD))
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
    job = EvalJob(setting, reward)
    runner.check(job)
    sampled, searched = (u for u in units(setting, 3) if u.seed == 1)
    with Workbench(job, task) as bench:
        record, beam = bench.run(sampled), bench.run(searched)
        assert timeless(bench.run(sampled)) == timeless(record)  # the reward model's cache is clean, too
    assert [i["id"] for i in beam["items"]] == ["0", "1", "2"]
    assert all(i["usage"]["scored_tokens"] > 0 for i in beam["items"] + record["items"])
    assert task.items[0].prompt == "1+2\n3\n12+7-2\n"
    with reward.load(n_ctx=1024, device="npu", threads=1) as scorer:
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
    from tilebeam.cli.main import app

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, list(args))

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model=nowhere.gguf", "does not exist"),
        ("--method=max_steps=3", "option of no method"),
        ("--budget=1,two", "whole numbers"),
        ("--device=gpu", "tilebeam and cpu, not 'gpu'"),
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


def test_the_cpu_has_no_executor() -> None:
    options = RunningOptions(device="cpu", executor="process")
    with pytest.raises(TilebeamError, match="--executor: for Tilebeam only"):
        options.fields()
    assert replace(options, latency_device="tilebeam").fields()["executor"] == "process"
