"""The kernels for AMX over emulated tiles, as no machine of the tests need have AMX.

The emulation is as strict as the instructions are. It stands in for the tiles only: vectors are AVX2's here and
AVX-512's in the set, through the same templates. On a CPU with AMX, test_gemm.py and its siblings run the set itself.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_sets import KERNELS, flags
from tilebeam.native import executor

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tests" / "native"
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(
    COMPILER is None or "avx2" not in executor.isas(), reason="needs a C++ compiler and a CPU with AVX2"
)
def test_kernels_agree_with_portable(tmp_path: Path) -> None:
    sources = [
        *(NATIVE / name for name in ("gemm_sets.cpp", "amx_kernels.cpp")),
        *sorted((KERNELS / "portable").glob("*.cpp")),
        *sorted((KERNELS / "avx2").glob("*.cpp")),
        *sorted((ROOT / "ggml_ext" / "src").glob("*.c")),
    ]
    includes = [f"-I{ROOT / p}" for p in ("backend/npu", "ggml_ext/include", "ggml_ext/src")]

    def compile_one(source: Path) -> str:
        target = str(tmp_path / f"{source.parent.name}-{source.stem}.o")
        language = ["-x", "c", "-std=c11"] if source.suffix == ".c" else ["-std=c++17", *flags("avx2")]
        command = [str(COMPILER), "-O1", "-ffp-contract=off", *language, *includes, "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = tmp_path / "gemm_sets"
    subprocess.run([str(COMPILER), *objects, "-o", str(program), "-pthread"], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split("\n")[:2] == ["amx: checked", "portable: checked"]
