"""Tiny models of every family that llama.cpp can run, on the device against the CPU backend. See tests/archs/run.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "archs" / "run.py"
_spec = importlib.util.spec_from_file_location("archs_run", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = run
_spec.loader.exec_module(run)

# Floors against models that are silently left out and ops that silently fall back to the CPU, not targets.
MODELS, QUANTIZED, TWO_SPLITS = 133, 128, 128


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, run.Family]:
    patterns = [f"^{part}" for part in run.PARTS]
    return run.run(patterns, tmp_path_factory.mktemp("archs") / "models", jobs=2)


def test_every_family_runs_as_on_the_cpu(families: dict[str, run.Family]) -> None:
    assert [text for family in families.values() for text in run.problems(family)] == []
    assert sum(f.float32 is not None for f in families.values()) >= MODELS
    assert sum(f.q8_0 is not None and f.repacked is not None for f in families.values()) >= QUANTIZED


def test_graphs_stay_on_the_device(families: dict[str, run.Family]) -> None:
    splits = {f.name: f.splits for f in families.values() if f.splits}
    assert sum(n == 2 for n in splits.values()) >= TWO_SPLITS, splits


def test_reading_the_table() -> None:
    lines = [
        "| Model arch.|  Device|Config|  NMSE vs. CPU|Roundtrip|",
        "|-----------|--------|------|--------------|---------|",
        "|      llama|     NPU| Dense|  \x1b[1;32mOK\x1b[0m (3.20e-12)|  \x1b[1;32mOK\x1b[0m|",
        "|         t5|     NPU| Dense|  \x1b[1;32mOK\x1b[0m (3.20e-09)|\x1b[1;33mSKIP\x1b[0m|",
        "|       clip|     NPU| Dense|\x1b[1;33mSKIP\x1b[0m           |\x1b[1;33mSKIP\x1b[0m|",
        "|       gpt2|     NPU| Dense|\x1b[1;31mFAIL\x1b[0m (2.00e-03)|  \x1b[1;32mOK\x1b[0m|",
        "|      qwen2|     NPU| Dense|\x1b[1;31mFAIL\x1b[0m (toggle) (1.00e-12)|  \x1b[1;32mOK\x1b[0m|",
        "|      qwen3|     NPU|   MoE|  \x1b[1;32mOK\x1b[0m (1.00e-04)|\x1b[1;31mFAIL\x1b[0m|",
        "|    granite|     NPU|   MoE|",
    ]
    table = run.read_table("\n".join(lines))
    assert list(table) == ["llama-dense", "t5-dense", "gpt2-dense", "qwen2-dense", "qwen3-moe", "granite-moe"]
    assert [f.float32 for f in table.values()] == [3.2e-12, 3.2e-9, 2e-3, 1e-12, 1e-4, None]
    assert [bool(f.problems) for f in table.values()] == [False, False, True, True, True, True]
    assert run.problems(table["llama-dense"]) == []
    for name in ("gpt2-dense", "qwen2-dense", "qwen3-moe", "granite-moe"):
        assert run.problems(table[name])[0].startswith(name)
    assert run.problems(run.Family("x", float32=1e-9, q8_0=float("nan")))
    assert run.problems(run.Family("x", float32=1e-9, q8_0=1e-5, repacked=False))
