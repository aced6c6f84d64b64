"""The third engine of bench/whole_model.py: a program in the place of llama-batched-bench, and what its rounds say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tilebeam.measure.throughput import Case

from bench.lib import synth
from bench.lib.batched_bench import BatchedBench

TABLE = """
main: n_kv_max = 64

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     16 |    8 |   1152 |    2.500 |   409.60 |    0.250 |   512.00 |    2.750 |   418.91 |
"""


def program(folder: Path, output: str, status: int = 0, stream: int = 1) -> Path:
    """It writes its arguments beside itself, prints the output on a stream, and ends with the status."""
    path = folder / "llama-batched-bench"
    (folder / "output").write_text(output)
    path.write_text(f'#!/bin/sh\necho "$@" > "{folder}/arguments"\ncat "{folder}/output" >&{stream}\nexit {status}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("stream", [1, 2])
def test_a_prompt_has_its_own_time(tmp_path: Path, stream: int) -> None:
    engine = BatchedBench(program(tmp_path, TABLE, stream=stream), ("-rtr",))
    assert engine.seconds(Path("m.gguf"), Case(128), 2) == 2.5
    assert engine.seconds(Path("m.gguf"), Case(0, 16, 8, n_depth=128), 2) == 0.25
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-npp") + 1 :][:5] == ["128", "-ntg", "16", "-npl", "8"]
    assert arguments[-1] == "-rtr"


@pytest.mark.parametrize(("output", "status"), [("", 0), (TABLE, 1), (TABLE + TABLE, 0)])
def test_a_run_without_one_line_of_figures_fails(tmp_path: Path, output: str, status: int) -> None:
    engine = BatchedBench(program(tmp_path, output, status))
    with pytest.raises(RuntimeError, match=f"llama-batched-bench ended with status {status} and no line of figures"):
        engine.seconds(Path("m.gguf"), Case(128), 2)


def test_whole_model_names_both_baselines(tmp_path: Path) -> None:
    model = synth.write_model(tmp_path / "tiny.gguf", synth.preset("tiny", arch="qwen2"))
    options = ["--quick", "-m", model, "--ik-llama", program(tmp_path, TABLE), "-t", "1", "-r", "1", "-p", "0"]
    command = [sys.executable, "-m", "bench.whole_model", *options, "-npl", "2", "-n", "2", "-d", "3", "--json"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["name"] == "tiny, decode 2 at 3, 1 thread"
    assert row["ik_llama"] == 4 / 0.25
    assert row["ik_llama_ratio"] == pytest.approx(row["value"] / row["ik_llama"], rel=0.01)
