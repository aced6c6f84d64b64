"""Training a reward head: a planted direction is found, on problems that were held out; a collection goes on where it
was killed; what comes out rates as it learnt."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import tilebeam
from tilebeam import OwnReward, SamplingParams, TilebeamError
from tilebeam.cli.main import app
from tilebeam.evaluation import ranking
from tilebeam.evaluation.config import item_seed
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Item, Task
from tilebeam.scoring.reward_heads import Head, load_head
from tilebeam.text_state import Feature, width
from tilebeam.training import fitting, head_report
from tilebeam.training.collection import FEATURES, Collection, CollectionSetting
from tilebeam.training.fit_options import features_of
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

N_EMBD = 24


def planted(
    problems: int, samples: int = 6, feature: str = "mean", seed: int = 1
) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]]]:
    """States in which one direction of one feature says whether a sample is right, less clearly in its beginnings; and
    in another direction each problem has its own place. Feature scales differ by far."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-1, 2, 3 * N_EMBD)
    direction, own = rng.normal(0, 1, (2, N_EMBD))
    first = {"mean": 0, "recent": N_EMBD, "last": 2 * N_EMBD}[feature]
    states, records = [], []
    for problem in range(problems):
        drawn, row, place = [], len(states), rng.normal()
        for _ in range(samples):
            right = bool(rng.random() < 0.5)
            for strength in (0.3, 1.0):
                x = rng.normal(0, 0.5, 3 * N_EMBD)
                x[first : first + N_EMBD] += strength * (2 * right - 1) * direction + place * own
                confidence = [*rng.normal(0, 1, 4), 1.0]
                states.append([*(x * scale), math.log1p(rng.integers(20, 200)), *confidence])
            answer = "1" if right else str(rng.integers(2, 4))
            drawn.append(
                {"states": 2, "correct": float(right), "tokens": int(rng.integers(20, 200)), "answer": answer}
                | {"logprob": float(rng.normal()), "finish": "stop" if rng.random() < 0.9 else "length"}
            )
        records.append({"unit": str(problem), "row": row, "samples": drawn})
    return np.array(states, np.float16), records


@pytest.mark.parametrize("feature", ["mean", "last"])
def test_a_planted_direction_is_found(feature: str, tmp_path: Path) -> None:
    """In whichever feature it is, scores are probabilities, and length and log-probability know nothing."""
    states, records = planted(120, feature=feature)
    samples = fitting.samples_of(records, 1)
    features = () if feature == "mean" else ("mean", feature)  # (): those that do best
    fitted = fitting.fit(states, samples, features, {"name": "m"})
    assert feature in fitted.head.features
    own = fitted.head(fitting.inputs(states, samples.ends, fitted.head.features))
    assert ranking.auroc(own, samples.correct >= 0.5) > 0.98
    found = head_report.report(fitted, samples, 1, {"model": "m"})
    rows = found["auroc"]
    assert rows["the head"]["all"] > 0.98
    assert rows["the head"]["within"] > 0.97
    assert found["beginnings"]["all"] > 0.8
    for name in ("log-probability", "shortness"):
        assert 0.3 < rows[name]["all"] < 0.7
    assert found["calibration_error"] < 0.1
    files = head_report.write(found, tmp_path / "m1.5b")
    assert {f.name for f in files} >= {"m1.5b.report.md", "m1.5b.report.json"}
    assert "| the head | 0.9" in (tmp_path / "m1.5b.report.md").read_text() or rows["the head"]["all"] > 0.9995
    json.loads((tmp_path / "m1.5b.report.json").read_text())


def test_the_same_seed_gives_the_same_head() -> None:
    states, records = planted(60)
    heads = [fitting.fit(states, fitting.samples_of(records, s), ("mean",), {}).head for s in (1, 1, 2)]
    assert np.array_equal(heads[0].layers[0][0], heads[1].layers[0][0])
    assert not np.array_equal(heads[0].layers[0][0], heads[2].layers[0][0])


def test_where_there_is_nothing_to_learn_nothing_is_found() -> None:
    """Labels by lot: heads of so many weights fit them, and what is reported must not."""
    states, records = planted(100)
    rng = np.random.default_rng(7)
    for record in records:
        for sample in record["samples"]:
            sample["correct"] = float(rng.random() < 0.5)
    samples = fitting.samples_of(records, 1)
    fitted = fitting.fit(states, samples, (), {})
    rows = head_report.report(fitted, samples, 1, {"model": "m"})["auroc"]["the head"]
    assert 0.42 < rows["all"] < 0.58
    assert 0.4 < rows["within"] < 0.6
    assert 0.4 < fitted.scores.mean() < 0.6


def test_the_mean_of_heads_has_the_mean_of_their_logits() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (9, 5)).astype(np.float32)
    drawn = [rng.normal(0, 1, 6).astype(np.float32) for _ in range(4)]
    heads = [Head(((w[None, :5], w[5:]),), "sigmoid") for w in drawn]
    wanted = np.mean([x @ w[:5] + w[5] for w in drawn], axis=0)
    moved = fitting.calibrated(fitting.mean_of(heads), 2.0, -0.5)
    assert fitting.logits_of(moved(x)) == pytest.approx(2 * wanted - 0.5, abs=1e-4)


def test_problems_are_in_one_fold_each() -> None:
    """Folds are alike in size and in how often problems were solved; the order of the records does not matter."""
    _, records = planted(43)
    for record in records[:10]:
        for sample in record["samples"]:
            sample["correct"] = 0.0
    samples, other = fitting.samples_of(records, 3), fitting.samples_of(records[::-1], 3)
    folds = {p: set(samples.fold[samples.problem == p]) for p in range(43)}
    assert folds == {42 - p: set(other.fold[other.problem == p]) for p in range(43)}
    assert all(len(found) == 1 for found in folds.values())
    sizes = np.bincount([next(iter(found)) for found in folds.values()])
    assert sorted(sizes) == [8, 8, 9, 9, 9]
    assert sorted(np.bincount([next(iter(folds[p])) for p in range(10)], minlength=5)) == [2] * 5
    assert len(samples.rows) == 2 * len(samples.ends) == 2 * len(samples.records)
    assert set(samples.rows[1::2]) == set(samples.ends)
    assert fitting.folds_of(records, 4) != fitting.folds_of(records, 3)


def test_too_little_is_refused() -> None:
    _, records = planted(60)
    for record in records:
        for sample in record["samples"]:
            sample["correct"] = 1.0
    with pytest.raises(TilebeamError, match="too little to learn from"):
        fitting.samples_of(records, 1)
    with pytest.raises(TilebeamError, match="too little to learn from"):
        fitting.samples_of(planted(3)[1], 1)


def test_the_minimum_is_found() -> None:
    """A quadratic of two hundred badly scaled directions."""
    rng = np.random.default_rng(0)
    scale, goal = 10.0 ** rng.uniform(-1, 1, 200), rng.normal(0, 1, 200)

    def loss(w: Any) -> tuple[float, Any]:
        d = w.astype(np.float64) - goal
        return float((scale * d * d).sum() / 2), (scale * d).astype(np.float32)

    last = fitting.minimize(loss, np.zeros(200, np.float32))
    assert loss(last)[0] < 1e-4 * loss(np.zeros(200, np.float32))[0]


def test_gradients_are_those_of_the_loss() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(0, 1, (30, 5)).astype(np.float32), (rng.random(30) < 0.5).astype(np.float32)
    weights = rng.normal(0, 0.3, 6).astype(np.float32)
    loss = fitting.cross_entropy(x, y, np.full(30, 1 / 30, np.float32), 0.1)
    _, grad = loss(weights)
    for i in range(len(weights)):
        step = np.zeros_like(weights)
        step[i] = 2e-3
        assert math.isclose((loss(weights + step)[0] - loss(weights - step)[0]) / 4e-3, grad[i], abs_tol=2e-3)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_auroc_counts_pairs() -> None:
    rng = np.random.default_rng(2)
    scores, right = rng.integers(0, 6, 80).astype(float), rng.random(80) < 0.4
    problem = rng.integers(0, 9, 80)

    def pairs(s: Any, r: Any) -> float | None:
        found = [(a > b) + 0.5 * (a == b) for a in s[r] for b in s[~r]]
        return float(np.mean(found)) if found else None

    assert math.isclose(ranking.auroc(scores, right), pairs(scores, right) or 0)
    each = [pairs(scores[problem == p], right[problem == p]) for p in range(9)]
    assert math.isclose(ranking.auroc_within(scores, right, problem), np.mean([e for e in each if e is not None]))
    assert math.isnan(ranking.auroc([1.0], [True]))
    (low, high), _ = ranking.intervals(scores, right, problem)
    assert low <= ranking.auroc(scores, right) <= high


def test_calibration() -> None:
    scores = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    table = head_report.reliability(scores, np.array([0, 0, 1, 0, 1.0]))
    assert [row["count"] for row in table] == [2, 3]
    assert math.isclose(head_report.calibration_error(table), (2 * 0.05 + 3 * abs(2.9 / 3 - 2 / 3)) / 5)


def test_names_of_features() -> None:
    assert features_of("auto") == ()
    assert features_of("mean, last") == ("mean", "last")
    every = get_args(Feature)
    assert features_of(",".join(every)) == every
    for wrong in ("length", "mean,mean", "first", ""):
        with pytest.raises(TilebeamError, match="--features"):
            features_of(wrong)


# --- files ------------------------------------------------------------------------------------------------------------


def setting(**changes: Any) -> CollectionSetting:
    return CollectionSetting(**{"model": "m", "task": TaskOptions("jsonl:a/f.jsonl"), "sampling": {}, **changes})


def test_rows_without_a_line_are_dropped(tmp_path: Path) -> None:
    """A process died between the two files; more problems are no other setting, another temperature is one."""
    item = Item("a", "q", "1", "q", "q")
    rows = np.ones((2, width(FEATURES, 4)), np.float16)
    task, other = (cast(Task, SimpleNamespace(judges=lambda _, digest=digest: [digest])) for digest in "ab")
    with Collection(tmp_path / "d", setting(), 4) as data:
        data.add(task, item, "q", [{"states": 2}], rows)
        data._file.write(b"torn")
    with Collection(tmp_path / "d", setting(task=TaskOptions("jsonl:b/f.jsonl", items=7)), 4) as data:
        assert data.has(task, item, "q")
        assert np.array_equal(data.states(), rows)
        with pytest.raises(TilebeamError, match="another problem a"):
            data.has(task, item, "q2")
        with pytest.raises(TilebeamError, match="another problem a"):
            data.has(other, item, "q")
        with pytest.raises(TilebeamError, match="Another process"):
            Collection(tmp_path / "d", setting(), 4)
    with pytest.raises(TilebeamError, match=r"sampling\.temperature was null, is 0\.5"):
        Collection(tmp_path / "d", setting(sampling={"temperature": 0.5}), 4)
    os.truncate(tmp_path / "d.states", 5)
    with pytest.raises(TilebeamError, match="shorter than"):
        Collection(tmp_path / "d", setting(), 4)


def test_a_full_disk_is_named_by_its_file(tmp_path: Path) -> None:
    """What was not written is tried again when the file is closed, which must leave the log free as well."""
    task = cast(Task, SimpleNamespace(judges=lambda _: []))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = Collection(tmp_path / "d", setting(), 4)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limit[1]))
        with pytest.raises(OSError, match=r"d\.states"), data:
            data.add(task, Item("a", "q", "1", "q", "q"), "q", [{"states": 1}], np.ones((1, 18), np.float16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with Collection(tmp_path / "d", setting(), 4) as data:
        assert data.records == []


def test_reports_are_utf_8_wherever_they_are_written() -> None:
    code = (
        "import pathlib, sys, tempfile\nfrom tilebeam.training import head_report\n"
        "head_report.markdown = lambda facts: [facts['model']]\nstem = pathlib.Path(tempfile.mkdtemp(), 'h')\n"
        "assert head_report.write({'model': chr(0x6a21)}, stem)[0].read_bytes().decode() == chr(0x6a21) + chr(10)"
    )
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random model, and problems whose answer is a letter that its texts may hold."""
    where = tmp_path_factory.mktemp("train")
    write_model(where / "m.gguf", preset("tiny", arch="qwen2", type="f32", n_layer=2))
    items = [json.dumps({"prompt": f"the {word} is", "answer": "x"}) for word in map(str, range(30))]
    (where / "items.jsonl").write_text("\n".join(items))
    (where / "even.py").write_text("def check(item, text):\n    return len(text) % 2 == 0\n")
    return where


def flags(folder: Path, out: Path, items: int = 30) -> list[str]:
    found = ["reward", "train", "-m", folder / "m.gguf", "--device", "cpu", "-t", 1, "-c", 512, "-np", 4]
    found += ["--samples", 3]
    found += ["--task", f"jsonl:{folder}/items.jsonl", "--items", items, "--checker", f"{folder}/even.py:check"]
    found += ["-n", 12, "--extract", "text", "--step-stop", "7", "--features", "mean,length", "-o", out, "--json"]
    return [str(part) for part in found]


def run(arguments: list[str]) -> dict[str, Any]:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kill_and_resume(folder: Path, tmp_path: Path) -> None:
    """Killed while it collects, the command ends with the same samples as one that was not."""
    whole = run(flags(folder, tmp_path / "whole.gguf"))
    log = tmp_path / "torn.jsonl"
    command = [sys.executable, "-m", "tilebeam", *flags(folder, tmp_path / "torn.gguf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 5):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 5 <= log.read_bytes().count(b"\n") <= 31
    resumed = run(flags(folder, tmp_path / "torn.gguf"))
    texts = []
    for name in ("whole", "torn"):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()[1:]]
        assert len(records) == 30
        texts.append({r["unit"]: [s["text"] for s in r["samples"]] for r in records})
    assert sum(texts[0][u] == texts[1][u] for u in texts[0]) >= 24  # batches of other shapes round differently
    assert resumed["samples"] == whole["samples"]
    assert resumed["collection"] == whole["collection"]


@pytest.mark.parametrize("layer", [None, 0])
def test_the_head_rates_as_it_learnt(folder: Path, tmp_path: Path, layer: int | None) -> None:
    """States in use are those that were learnt from, and the head is for this model and layer only."""
    behind = [] if layer is None else ["--layer", str(layer)]
    run([*flags(folder, tmp_path / "h.gguf"), *behind])
    head = load_head(tmp_path / "h.gguf")
    assert (head.features, head.layer) == (("mean", "length"), layer)
    records = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    with tilebeam.load(folder / "m.gguf", "cpu", n_ctx=512, n_seq_max=4, threads=1, hidden_layer=layer) as lm:
        states = np.fromfile(tmp_path / "h.states", np.float16).reshape(-1, width(FEATURES, lm.n_embd))
        record = records[1]
        params = SamplingParams(max_tokens=12, n=3, seed=item_seed(1, record["unit"]), hidden=True)
        [output] = lm.generate([f"the {record['unit']} is"], params)
        assert [c.text for c in output.outputs] == [s["text"] for s in record["samples"]]
        row, learnt = record["row"], []
        for sample in record["samples"]:
            row += sample["states"]
            learnt.append(float(head(fitting.inputs(states, np.array([row - 1]), head.features))[0]))
        assert OwnReward(lm, head).score(output.prompt, output.outputs) == pytest.approx(learnt, abs=5e-3)
    another = [] if behind else ["--layer", "0"]
    refused = CliRunner().invoke(app, [*flags(folder, tmp_path / "h.gguf"), *another])
    assert refused.exit_code == 1
    assert "layer" in refused.stderr
    write_model(tmp_path / "other.gguf", preset("tiny", arch="qwen2", type="f32", n_layer=3))
    with (
        tilebeam.load(tmp_path / "other.gguf", "cpu", n_ctx=512, threads=1) as other,
        pytest.raises(TilebeamError, match="another model"),
    ):
        OwnReward(other, head)


def test_more_items_take_what_is_there(folder: Path, tmp_path: Path) -> None:
    run(flags(folder, tmp_path / "h.gguf", 24))
    before = (tmp_path / "h.jsonl").read_bytes()
    run(flags(folder, tmp_path / "h.gguf", 30))
    assert (tmp_path / "h.jsonl").read_bytes().startswith(before)
    refused = CliRunner().invoke(app, [*flags(folder, tmp_path / "h.gguf"), "--temp", "0.3"])
    assert refused.exit_code == 1
    assert "sampling.temperature was 0.8, is 0.3" in " ".join(refused.stderr.split())
