"""Every bench of `make bench` starts with --quick, and prints one object in the shared form whose figures agree with
each other. Each runs once as a user runs it; what it measures is not judged here."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import head_kit
import hvx_kit
import pytest

from bench import hvx_packets, run_all
from bench.lib import synth
from bench.real import __main__ as real
from bench.real.rows import TEXT

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit"}
ONCE = ["-t", "1", "-r", "1"]
TINY = ["-m", "MODEL", *ONCE]
TINY_MODEL = synth.preset("tiny", arch="qwen2")
# What makes --quick last seconds; a bench that is not here runs with --quick alone.
SHORTER: dict[str, list[str]] = {
    "gemm": [*ONCE, "--types", "q4_0,q8_0", "--rows", "33", "-k", "256", "-n", "256"],
    "attention": [*ONCE, "--type", "f16", "--only", "1 row, 1024"],
    "softmax_exp": ["-r", "1"],
    "dequant_layouts": ["-r", "1"],
    "decode_scaling": [*TINY, "-npl", "1,2", "-d", "64", "-dnpl", "2", "-n", "2", "--prefill", "16", "--kv", "q8_0"],
    "latency": [*TINY, "-p", "16,32", "-npl", "1,2", "-n", "3"],
    "whole_model": ["--preset", "tiny", *ONCE, "-p", "16", "-npl", "1,2", "-n", "2"],
    "families": [*ONCE, "--only", "^type-q4_K$", "-p", "8", "--rows", "1,2"],
    "peers": [*TINY, "-npl", "1,2", "-p", "6", "--shared", "9", "-n", "3"],
    "best_of_n": [*TINY, "-N", "3", "-p", "16", "-n", "4", "--calls", "2"],
    "speculation": [
        *TINY,
        "-md",
        "MODEL",
        "--head",
        "HEAD",
        "--only",
        "extract,noise",
        "-npl",
        "1,2",
        "-n",
        "6",
        "--llama",
        "0,3",
    ],
    "scoring": [*TINY, "-N", "4", "-M", "2", "--n-prompt", "20", "--n-step", "4", "-npl", "1,3", "-n", "4"],
    "serve_load": [*TINY, "--clients", "4", "--requests", "2", "--max-tokens", "8", "-np", "4"],
    "workers": ["-m", "MODEL", "-t", "2", "-npl", "1,2", "--workers", "1,2,64", "-n", "5"],
    "load": TINY,
    "repack": ["-m", "MODEL", "-r", "1"],
    "devices": [*TINY, "-npl", "2", "-n", "2"],
    "accuracy": ["-m", "MODEL", "-t", "1", "-c", "64", "--chunks", "1", "--out", "FOLDER"],
    "tiny_world": ["-t", "1", "--out", "FOLDER"],
    "step_searches": ["-t", "1", "--model", "0.1m"],
}
_COMPILER = None if os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") else "no C++ compiler: g++"
NEEDS = {  # why a bench cannot run here
    "softmax_exp": _COMPILER,
    "dequant_layouts": _COMPILER,
    "hvx_packets": hvx_kit.missing() or (None if hvx_packets.objdump() else "install llvm-19"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("bench") / "tiny.gguf", TINY_MODEL)


def printed(module: str, arguments: list[str]) -> dict[str, Any]:
    """The one JSON object that a bench prints, and nothing beside it."""
    command = [sys.executable, "-m", module, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("bench", run_all.BENCHES, ids=lambda b: b.name)
def test_it_starts_and_prints_one_object_in_the_shared_form(bench: run_all.Bench, model: Path, tmp_path: Path) -> None:
    name = bench.name
    if NEEDS.get(name):
        pytest.skip(str(NEEDS[name]))
    real = {"MODEL": str(model), "FOLDER": str(tmp_path)}
    if name == "speculation":
        real["HEAD"] = str(head_kit.write_head(tmp_path / "head.gguf", TINY_MODEL, range(64)))
    report = printed(bench.module, ["--quick", *bench.arguments, *(real.get(a, a) for a in SHORTER.get(name, []))])
    assert set(report) == {"bench", "machine", "limits", "rows"}
    assert report["bench"] == name
    assert set(report["machine"]) == {"cpu", "cpus", "system"}
    assert all(isinstance(v, int | float) for v in report["limits"].values())
    assert report["rows"]
    assert len({row["name"] for row in report["rows"]}) == len(report["rows"])
    for row in report["rows"]:
        assert set(row) >= KEYS
        assert row["value"] >= 0
        assert row["unit"]
        assert 0 <= row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["share_of_limit"] is None or row["share_of_limit"] > 0
        if name == "limits":
            assert row["baseline"] is None
        elif row.get("rounds") == 1:
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"], rel=0.02)


def test_the_list_has_every_bench_with_the_shared_form() -> None:
    folder = ROOT / "bench"
    scripts = {f"bench.{path.stem}": path for path in folder.glob("*.py")}
    scripts |= {f"bench.papers.{path.stem}": path for path in (folder / "papers").glob("*.py")}
    sources = {module: path.read_text(encoding="utf-8") for module, path in scripts.items()}
    assert {b.module for b in run_all.BENCHES} == {m for m, text in sources.items() if re.search(r"\bRows\(", text)}
    assert all(("rounds.add_options(" in sources[bench.module]) == bench.sliced for bench in run_all.BENCHES)


def test_one_report_of_what_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench that fails is named in it, and what the folder has of earlier runs stays."""
    pytest.importorskip("matplotlib")
    (limits,) = run_all.chosen("limits", "")
    wrong = run_all.Bench("limits_of_nothing", "No such bench")
    monkeypatch.setattr(run_all, "BENCHES", (limits, wrong))
    failed = run_all.run_all([limits, wrong], tmp_path, run_all.How(quick=True))
    assert set(failed) == {"limits_of_nothing"}
    assert "No module named" in failed["limits_of_nothing"]
    run_all.run_all([wrong], tmp_path, run_all.How())
    text = (tmp_path / "report.md").read_text()
    assert "| int8, 1 thread | - |" in text
    assert "**Failed**: exit status 1" in text
    assert json.loads((tmp_path / "limits.json").read_text())["quick"]


def test_accuracy_compares_a_file_as_it_is(tmp_path: Path) -> None:
    model = synth.write_model(tmp_path / "source.gguf", synth.preset("tiny", n_layer=1, type="f32", arch="qwen2"))
    text = tmp_path / "text.txt"
    text.write_text("The sum of two and three is five. Nobody knows how many of them there were, or why.\n" * 100)
    options = ["--quick", "-m", str(model), "-f", str(text), "-c", "64", "--chunks", "1", "-t", "1"]
    options += ["--out", str(tmp_path), "--as-is"]
    rows = printed("bench.accuracy", options)["rows"]
    assert len(rows) >= 3
    assert all(row["ratio"] > 0 for row in rows)


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.devices", "-m", str(tmp_path / "none.gguf"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("devices: ")
    assert len(done.stderr.splitlines()) == 1
    assert "none.gguf" in done.stderr


def test_make_real_reads_a_text_on_both_backends(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "wiki.test.raw"
    text.write_text("the people of the city said that all of this was one more day of the year. " * 200)
    options = argparse.Namespace(threads=1, quick=True)
    said = real.read(TEXT, model, text, options)
    assert re.fullmatch(
        r"WikiText-2, 0.5B, 1 windows of 512 tokens: perplexity [\d.]+ on the NPU, [\d.]+ on the stock backend; KL "
        r"divergence [\d.]+ \+- [\d.]+, same token likeliest [\d.]+ %\.",
        said,
    ), said
