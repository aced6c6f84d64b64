"""Upstream's test-backend-ops on the device: every case that it claims passes. See tests/backend_ops/run.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "backend_ops" / "run.py"
_spec = importlib.util.spec_from_file_location("backend_ops_run", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = run
_spec.loader.exec_module(run)


@pytest.fixture(scope="session")
def program() -> Path:
    built: Path = run.build()
    return built


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("op", list(run.OPS))
def test_claimed_cases_pass(op: str) -> None:
    result = run.run(op, run.OPS[op].quick, jobs=2)
    assert not run.problems(op, result, quick=bool(run.OPS[op].quick))
