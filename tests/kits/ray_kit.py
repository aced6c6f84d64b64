"""A Ray of two CPUs in a process of its own."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import process_kit
import pytest

_TOKEN = secrets.token_hex(32)  # of the tests' own clusters
_CLUSTER = """
import ray, sys
ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=sys.argv[1],
    log_to_driver=False, logging_level="error",
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def environment() -> dict[str, str]:
    """For programs that use the cluster."""
    return process_kit.environment(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)


@contextmanager
def cluster() -> Iterator[str]:
    """Its address; the test is skipped where Ray does not start."""
    folder = tempfile.mkdtemp(prefix="tb", dir="/tmp")  # Ray's sockets need a short path
    process = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            pytest.skip(f"Ray does not start here: {process.communicate()[1][-300:]}")
        yield address
    finally:
        process.communicate("", timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def processes(title: str) -> list[int]:
    """Ids of the clusters' processes that call themselves so."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            ours = _TOKEN.encode() in (folder / "environ").read_bytes()
            if ours and (folder / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found
