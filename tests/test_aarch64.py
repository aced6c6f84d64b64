"""The NEON kernels against the portable ones, cross-compiled and run under emulation.

Skipped where Debian's g++-aarch64-linux-gnu or qemu-user is not installed. On an aarch64 machine test_gemm.py,
test_attention.py and test_vector_ops.py cover the same kernels, and more, natively.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "backend" / "npu" / "kernels"
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_neon_kernels_agree_with_portable(tmp_path: Path) -> None:
    assert COMPILER is not None
    assert EMULATOR is not None
    neon = sorted((KERNELS / "neon").glob("*.cpp"))
    programs = sorted((ROOT / "tests" / "native").glob("*_sets.cpp"))
    sources = [
        *programs,
        *neon,
        *sorted((KERNELS / "portable").glob("*.cpp")),
        *sorted(KERNELS.glob("*.cpp")),
        *sorted((ROOT / "ggml_ext" / "src").glob("*.c")),
    ]
    includes = [f"-I{ROOT / p}" for p in ("backend/npu", "ggml_ext/include", "ggml_ext/src")]

    def compile_one(numbered: tuple[int, Path]) -> str:
        number, source = numbered
        target = str(tmp_path / f"{number}.o")
        language = ["-x", "c", "-std=c11"] if source.suffix == ".c" else ["-std=c++17"]
        isa = ["-march=armv8.2-a+dotprod+fp16"] if source in neon else []
        command = [COMPILER, "-O2", "-ffp-contract=off", *language, *isa, *includes, "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate(sources)))
    for main, source in zip(objects, programs, strict=False):
        program = str(tmp_path / source.stem)
        command = [COMPILER, "-static", main, *objects[len(programs) :], "-o", program, "-pthread"]
        subprocess.run(command, check=True)
        run = [EMULATOR, "-cpu", "max", program]
        result = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stdout
        assert "neon: checked" in result.stdout
