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
PROGRAMS = [NATIVE / "amx_cases.cpp", NATIVE / "gemm_sets.cpp"]

pytestmark = pytest.mark.skipif(
    COMPILER is None or "avx2" not in executor.isas(), reason="needs a C++ compiler and a CPU with AVX2"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each program by name, with the kernel sets of amx_kernels.cpp."""
    folder = tmp_path_factory.mktemp("amx")
    sources = [
        *PROGRAMS,
        NATIVE / "amx_kernels.cpp",
        *sorted((KERNELS / "portable").glob("*.cpp")),
        *sorted((ROOT / "ggml_ext" / "src").glob("*.c")),
    ]
    includes = [f"-I{ROOT / p}" for p in ("backend/npu", "ggml_ext/include", "ggml_ext/src")]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        language = ["-x", "c", "-std=c11"] if source.suffix == ".c" else ["-std=c++17", *flags("avx2")]
        command = [str(COMPILER), "-O1", "-ffp-contract=off", *language, *includes, "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    linked = {}
    for main, source in zip(objects, PROGRAMS, strict=False):
        linked[source.stem] = folder / source.stem
        command = [str(COMPILER), main, *objects[len(PROGRAMS) :], "-o", str(linked[source.stem]), "-pthread"]
        subprocess.run(command, check=True)
    return linked


def run(program: Path) -> str:
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_kernels_have_the_bits_of_those_they_replace(programs: dict[str, Path]) -> None:
    """All numbers of rows, formats and whether results are added to; the tiles are configured where they are used."""
    assert run(programs["amx_cases"]).endswith(" cases, 0 of them wrong\n")


def test_kernels_agree_with_portable(programs: dict[str, Path]) -> None:
    checked = {line.split(":")[0] for line in run(programs["gemm_sets"]).splitlines() if line.endswith(": checked")}
    assert checked == {"amx", "vnni", "portable"}
