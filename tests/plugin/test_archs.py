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
