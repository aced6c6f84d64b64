"""bench/server_mixed.py: a short storm in which every answer is right, and checks that tell an answer that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

ROOT = Path(__file__).resolve().parents[2]


def test_a_storm_with_every_answer_checked() -> None:
    """All kinds of requests and few cells; failures would end the program with status 1."""
    options = ["--storm", "--quick", "-t", "1", "--minutes", "0.1", "-c", "1024", "--json"]
    command = [sys.executable, "-m", "bench.server_mixed", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    storm, _ = json.loads(done.stdout)["rows"]
    assert storm["requests"] == storm["value"] == storm["baseline"] > 0
    assert storm["failed"] == 0
