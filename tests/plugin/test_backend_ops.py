"""Upstream's test-backend-ops on the device: every case that it claims passes. See tests/backend_ops/run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import upstream

run: Any = upstream.script("backend_ops")


@pytest.fixture(scope="session")
def program() -> Path:
    built: Path = run.build()
    return built


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("op", list(run.OPS))
def test_claimed_cases_pass(op: str) -> None:
    result = run.run(op, run.OPS[op].quick, jobs=2)
    assert not run.problems(op, result, run.OPS[op].least)
