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


def test_reading_results() -> None:
    create = "CREATE TABLE IF NOT EXISTS test_backend_ops (op_name TEXT, op_params TEXT, supported INTEGER, "
    create += "passed INTEGER, error_message TEXT);\n\n"
    row = "INSERT INTO test_backend_ops (op_name, op_params, supported, passed, error_message) VALUES "
    sql = "noise " + create
    sql += row + "('ADD', 'type=f32,ne=[1]', '1', '1', '');\n"
    sql += "[ADD] ERR = 0.2 > 0.1 " + row + "('ADD', 'type=f16,ne=[2]', '1', '0', 'test failed');\n"
    sql += row + "('ADD', 'type=q4_1,ne=[3]', '0', '0', 'not supported');\n"
    sql += row + "('ADD', 'type=f32,ne=[4"
    tally = run.read_results(sql)["ADD"]
    assert (tally.passed, tally.failed, tally.unsupported, tally.claimed) == (1, 1, 1, 2)
    assert tally.kinds == {"f32": 1, "f16": 1}
    assert tally.failures == ["ADD(type=f16,ne=[2]): [ADD] ERR = 0.2 > 0.1"]
    result = run.Run({"ADD": tally}, 1, "")
    assert run.problems("ADD", result, quick=True) == ["failed: " + tally.failures[0]]
    died = run.problems("ADD", run.Run({"ADD": run.Tally(passed=200)}, -6, "aborted"), quick=False)
    assert died == ["test-backend-ops ended with status -6: aborted"]
    assert run.problems("MUL_MAT", run.Run({}, 0, ""), quick=False)
