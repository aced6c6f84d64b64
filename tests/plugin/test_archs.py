"""Tiny models of every family that llama.cpp can run, on the device against the CPU backend. See tests/archs/run.py."""

from __future__ import annotations

from typing import Any

import pytest
import upstream

run: Any = upstream.script("archs")

# Floors against models that are silently left out and ops that silently fall back to the CPU, not targets.
MODELS, QUANTIZED, TWO_SPLITS = 133, 128, 128


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    patterns = [f"^{part}" for part in run.PARTS]
    return run.run(patterns, tmp_path_factory.mktemp("archs") / "models", jobs=2)


def test_every_family_runs_as_on_the_cpu(families: dict[str, Any]) -> None:
    assert [text for family in families.values() for text in run.problems(family)] == []
    assert sum(f.float32 is not None for f in families.values()) >= MODELS
    assert sum(f.q8_0 is not None and f.repacked is not None for f in families.values()) >= QUANTIZED


def test_graphs_stay_on_the_device(families: dict[str, Any]) -> None:
    splits = {f.name: f.splits for f in families.values() if f.splits}
    assert sum(n == 2 for n in splits.values()) >= TWO_SPLITS, splits
