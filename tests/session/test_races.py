"""ThreadSanitizer over the session, the channel, the service, the thread pool and traces.

The program (tests/native/stress.cpp) is built here, once, into build/tsan, with the session and executor it needs.
`TILEBEAM_STRESS_SECONDS=600` runs it for longer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tsan"
SECONDS = os.environ.get("TILEBEAM_STRESS_SECONDS", "5")
# A preloaded sanitizer of another kind cannot share a process with this one.
# cmake and ninja may lie beside the Python that runs this.
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
ENV = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {
    "PATH": PATH,
    "TSAN_OPTIONS": "exitcode=66:second_deadlock_stack=1",
}


def run(*command: str | Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=ENV)


@cache
def program() -> list[str | Path]:
    """How to start the stress program; skips where ThreadSanitizer cannot be had."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which("cmake", path=PATH) is None:
        pytest.skip("needs a C++ compiler and cmake")
    # Without randomized addresses: ThreadSanitizer's fixed memory map does not fit all of them.
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    BUILD.mkdir(parents=True, exist_ok=True)
    probe = BUILD / "probe"
    (BUILD / "probe.cpp").write_text("int main() { return 0; }\n", encoding="ascii")
    built = run(compiler, "-fsanitize=thread", BUILD / "probe.cpp", "-o", probe)
    if built.returncode != 0 or run(*plain, probe).returncode != 0:
        pytest.skip("this compiler or system has no ThreadSanitizer")
    options = ["-DTILEBEAM_TSAN=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_C_FLAGS_DEBUG=-O0 -g1"]
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=PATH) else []
    steps: list[list[str | Path]] = [
        ["cmake", "-S", ROOT, "-B", BUILD, *generator, *options, "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g1 -Wno-tsan"],
        ["cmake", "--build", BUILD, "--target", "tilebeam-stress", "--parallel", "2"],
    ]
    for step in steps:
        done = run(*step)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [*plain, BUILD / "lib" / "tilebeam-stress"]


def test_a_race_through_two_mappings_would_be_noticed() -> None:
    done = run(*program(), "race")
    assert done.returncode == 66
    assert "data race" in done.stderr


def test_no_races() -> None:
    done = run(*program(), SECONDS, timeout=float(SECONDS) * 4 + 300)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert "done" in done.stdout
    assert "WARNING: ThreadSanitizer" not in done.stderr
