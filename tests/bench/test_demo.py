"""The demo: it runs, and on a real model as it comes, of which the device multiplies all."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path

import pytest
from rich.console import Console
from tilebeam import gguf as gguf_tools

from bench.demo import __main__ as demo
from bench.demo import model as demo_model
from bench.lib import gemma


def test_the_demo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install tilebeam[demo])")
    arguments = ("--random-model", "--quick", "--problems", "2", "-N", "2", "-t", "1", "--seed", "3")
    assert demo.main([*arguments, "--cache", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("random Llama", "| self-consistency | maj@k |", "| beam[prm] | run |", "| vs cpu |"):
        assert part in shown
    assert [p.suffix for p in tmp_path.iterdir()] == [".gguf"]


@pytest.mark.skipif(not importlib.util.find_spec(gemma.PACKAGE), reason="pip install 'tilebeam[demo]'")
def test_the_real_model_is_the_packages_file_and_runs_on_the_device(tmp_path: Path) -> None:
    quiet = Console(quiet=True)
    model = demo_model.obtain(tmp_path, quiet)
    with model.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == importlib.import_module(gemma.PACKAGE).EXPECTED_SHA256
    with gguf_tools.open_gguf(model.path) as f:
        groups = gguf_tools.grouped(gguf_tools.matrices_of(f))
    assert {g.type for g in groups} == {"q4_k", "q5_0", "q6_k", "q8_0"}
    assert {g.device for g in groups} == {"npu"}
    assert demo_model.obtain(tmp_path, quiet).path == model.path
