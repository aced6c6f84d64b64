"""tilebeam eval --ray on a local Ray of two workers: the results are the local run's, byte for byte.

Skipped where Ray is not installed (pip install tilebeam[ray]).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_kit
from tilebeam.evaluation.log import timeless

from bench.lib import synth

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install tilebeam[ray])"
)

ROOT = Path(__file__).resolve().parents[2]
# Leaves a file for every process that judged, and dies once where a file asks for it.
CHECKS = """
import os, pathlib
HERE = pathlib.Path(__file__).parent

def right(item, text):
    (HERE / "pids" / str(os.getpid())).touch()
    if item["id"] == "i5" and (HERE / "die").exists():
        if "again" not in (HERE / "die").read_text():
            (HERE / "die").unlink()
        os._exit(9)
    if (HERE / "fail").exists():
        raise ValueError("no verdict today")
    return sum(map(ord, text)) % 3 == int(item["answer"])

def step(prompt, text):
    return sum(map(ord, text)) % 11 / 10
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Its address."""
    with ray_kit.cluster() as address:
        yield address


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    synth.write_model(folder / "m.gguf", synth.preset("tiny"))
    (folder / "checks.py").write_text(CHECKS)
    (folder / "pids").mkdir()
    items = ({"prompt": f"Item {i}: ", "answer": str(i % 3), "id": f"i{i}"} for i in range(8))
    (folder / "t.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    return folder


def evaluate(world: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Relative paths, as a user may give them: workers start elsewhere."""
    args = [
        "--model=m=m.gguf",
        "--task=jsonl:t.jsonl",
        "--checker=checks.py:right",
        "--method=best-of-n,beam:max_steps=2",
        "--budget=1,4",
        "--scorer=logprob,checks.py:step",
        "--seeds=1,2",
        "--n-predict=8",
        "--unit-items=2",
        "--threads=1",
        "--ctx-size=1024",
        f"--out={name}",
    ]
    return subprocess.run(
        [sys.executable, "-m", "tilebeam", "eval", *args, *more],
        capture_output=True,
        text=True,
        cwd=world,
        env=ray_kit.environment(),
        timeout=150,
    )


@pytest.fixture(scope="module")
def local(world: Path) -> Path:
    done = evaluate(world, "local")
    assert done.returncode == 0, done.stderr
    return world / "local"


def records(out: Path) -> list[Any]:
    """The log without times; units may finish in any order."""
    header, *units = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    return [header, *sorted((timeless(u) for u in units), key=lambda u: str(u["unit"]))]


def same(out: Path, local: Path) -> None:
    assert records(out) == records(local)
    for name in ("results.jsonl", "report.json", "report.md"):
        assert (out / name).read_bytes() == (local / name).read_bytes()


def failing(world: Path, flag: str, out: str, cluster: str, text: str = "") -> str:
    """What a run says that fails because of a file that the checker looks for."""
    (world / flag).write_text(text)
    try:
        done = evaluate(world, out, f"--ray={cluster}", "--workers=1")
    finally:
        (world / flag).unlink()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_two_workers_give_the_local_results(world: Path, local: Path, cluster: str) -> None:
    before = {p.name for p in (world / "pids").iterdir()}
    done = evaluate(world, "ray", f"--ray={cluster}")
    assert done.returncode == 0, done.stderr
    same(world / "ray", local)
    assert len({p.name for p in (world / "pids").iterdir()} - before) == 2


def test_a_worker_that_dies_is_replaced(world: Path, local: Path, cluster: str) -> None:
    (world / "die").touch()
    done = evaluate(world, "died", f"--ray={cluster}", "--workers=1")
    assert done.returncode == 0, done.stderr
    assert not (world / "die").exists()
    same(world / "died", local)


def test_a_unit_that_ends_every_worker_is_given_up(world: Path, cluster: str) -> None:
    said = failing(world, "die", "deadly", cluster, "again")
    assert "A worker died 3 times in one unit" in said


def test_what_fails_on_a_worker_is_said_and_the_rest_is_kept(world: Path, local: Path, cluster: str) -> None:
    assert "no verdict today" in failing(world, "fail", "failed", cluster)
    done = evaluate(world, "failed")  # the rest here
    assert done.returncode == 0, done.stderr
    same(world / "failed", local)


def test_without_a_cluster_it_says_so(world: Path) -> None:
    done = evaluate(world, "none", "--ray=127.0.0.1:1")
    assert done.returncode == 1
    assert "ray start --head" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
