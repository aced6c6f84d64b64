"""What every bench prints with --json: one object in the shared form, with figures that agree with each other.

Each runs once as a user runs it, with arguments that make it short; what they measure is not judged here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib import synth

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit"}
BENCHES: dict[str, list[str]] = {
    "limits": ["--quick"],
    "gemm": ["--quick", "-r", "1", "-t", "1", "--types", "q4_0,q8_0", "--rows", "33", "-k", "256", "-n", "256"],
    "attention": ["--quick", "-r", "1", "-t", "1", "--type", "f16"],
    "softmax_exp": ["--quick"],
    "dequant_layouts": ["--quick"],
    "decode_scaling": ["-m", "MODEL", "-t", "1", "-npl", "1,2", "-d", "64", "-dnpl", "2", "-n", "2", "-r", "1"],
    "whole_model": ["--preset", "tiny", "-t", "1", "-p", "16", "-npl", "1,2", "-n", "2", "-r", "1"],
    "best_of_n": ["-m", "MODEL", "-t", "1", "-N", "3", "-p", "16", "-n", "4", "-r", "1", "--calls", "2"],
    "load": ["-m", "MODEL", "-t", "1", "-r", "1"],
}
COMPILED = {"softmax_exp", "dequant_layouts"}  # a C++ compiler builds what they compare with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("bench") / "tiny.gguf", synth.preset("tiny", arch="qwen2"))


def printed(name: str, arguments: list[str]) -> dict[str, Any]:
    """The one JSON object that a bench prints, and nothing beside it."""
    command = [sys.executable, "-m", f"bench.{name}", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", BENCHES)
def test_one_object_in_the_shared_form(name: str, model: Path) -> None:
    if name in COMPILED and not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler: install the package g++")
    report = printed(name, [str(model) if a == "MODEL" else a for a in BENCHES[name]])
    assert set(report) == {"bench", "machine", "limits", "rows"}
    assert report["bench"] == name
    assert set(report["machine"]) == {"cpu", "cpus", "system"}
    assert all(isinstance(v, int | float) for v in report["limits"].values())
    assert report["rows"]
    assert len({row["name"] for row in report["rows"]}) == len(report["rows"])
    for row in report["rows"]:
        assert set(row) >= KEYS
        assert row["value"] > 0
        assert row["unit"]
        assert 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["share_of_limit"] is None or row["share_of_limit"] > 0
        if name == "limits":
            assert row["baseline"] is None
        elif row.get("rounds") == 1:
            assert row["ratio"] == pytest.approx(row["value"] / row["baseline"], rel=0.02)


def test_slices_add_up(model: Path, tmp_path: Path) -> None:
    rounds = tmp_path / "x.rounds"
    common = ["-m", str(model), "-t", "1", "-d", "0", "-n", "2", "--resume", str(rounds)]
    first = printed("decode_scaling", [*common, "-npl", "1", "-r", "1"])
    assert [row["name"] for row in first["rows"]] == ["decode, 1 sequence"]
    both = printed("decode_scaling", [*common, "-npl", "1,2", "-r", "2"])
    assert [row["name"] for row in both["rows"]] == ["decode, 1 sequence", "decode, 2 sequences"]
    assert len(rounds.read_text(encoding="utf-8").splitlines()) >= 5
    nothing = printed("decode_scaling", [*common, "-npl", "1,2,3", "-r", "5", "--seconds", "0.01"])
    assert nothing["rows"] == both["rows"]
