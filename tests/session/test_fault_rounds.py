"""Faults done to a running generation, many times each: fault_rounds.py does them, in a process of its own.

TILEBEAM_FAULT_ROUNDS sets how often (default 8); 500 of each take half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import process_kit
import pytest

from bench.lib import synth

ROUNDS = int(os.environ.get("TILEBEAM_FAULT_ROUNDS", "8"))
SANITIZED = "libasan" in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("faults") / "model.gguf", synth.preset("tiny", n_layer=2))


KINDS = [
    ("kill", "process"),
    ("stop", "process"),
    ("page", "process"),
    ("word", "process"),
    pytest.param("memory", "process", marks=pytest.mark.skipif(SANITIZED, reason="a sanitizer ends where memory does")),
    ("truncate", "process"),
    ("truncate", "thread"),
    ("rewrite", "process"),
    ("unlink", "process"),
]


@pytest.mark.parametrize(("kind", "executor"), KINDS)
def test_generation_survives(model: Path, kind: str, executor: str) -> None:
    script = Path(__file__).with_name("fault_rounds.py")
    run = subprocess.run(
        [sys.executable, str(script), kind, "--rounds", str(ROUNDS), "--model", str(model), "--executor", executor],
        capture_output=True,
        text=True,
        env=process_kit.environment(),
        timeout=60 + 20 * ROUNDS,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout)
    assert result["errors"] + result["harmless"] == result["rounds"] == ROUNDS
    if kind == "unlink":
        assert result["harmless"] == ROUNDS
    elif kind != "word":
        assert result["errors"] == ROUNDS
    assert result["right_rows"] > ROUNDS
    assert result["others"] > 0
