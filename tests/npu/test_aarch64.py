"""The NEON and i8mm kernels against the portable ones, cross-compiled and run under emulation.

Skipped where Debian's g++-aarch64-linux-gnu or qemu-user is not installed. Where zig is (`make wheel` installs it),
what it compiles for the wheel is run as well. On an aarch64 machine test_gemm.py, test_attention.py and
test_vector_ops.py cover the same kernels, and more, natively.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernel_sets import KERNELS, flags, sets

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

FLAGS = {isa: flags(isa) for isa in sets("aarch64")}
PROGRAMS = sorted((ROOT / "tests" / "native").glob("*_sets.cpp"))
# Emulated CPUs and the sets they run beside the portable one: a Cortex-A76 has no smmla, a Cortex-A53 no sdot either.
CPUS = {"max": {"i8mm", "neon"}, "cortex-a76": {"neon"}, "cortex-a53": set()}

pytestmark = pytest.mark.skipif(
    COMPILER is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user"
)


@pytest.fixture(scope="module", params=["gcc", "zig"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each program of tests/native that compares kernel sets, by name, with all sets linked in."""
    folder = tmp_path_factory.mktemp("aarch64")
    compiler, static = str(COMPILER), ["-static"]
    if request.param == "zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("zig is not installed (extra wheel)")
        wheel = runpy.run_path(str(ROOT / "backend" / "cmake" / "wheel.py"))
        compiler, static = wheel["compilers"]("aarch64", folder)["CXX"], []  # zig has no static glibc
    fast = [source for isa in FLAGS for source in sorted((KERNELS / isa).glob("*.cpp"))]
    sources = [
        *PROGRAMS,
        *fast,
        *sorted((KERNELS / "portable").glob("*.cpp")),
        *sorted(KERNELS.glob("*.cpp")),
        *sorted((ROOT / "ggml_ext" / "src").glob("*.c")),
    ]
    includes = [f"-I{ROOT / p}" for p in ("backend/npu", "ggml_ext/include", "ggml_ext/src")]

    def compile_one(numbered: tuple[int, Path]) -> str:
        number, source = numbered
        target = str(folder / f"{number}.o")
        language = ["-x", "c", "-std=c11"] if source.suffix == ".c" else ["-std=c++17"]
        isa = FLAGS[source.parent.name] if source in fast else []
        options = ["-O2", "-ffp-contract=off", *language, *isa, *includes]
        command = [compiler, *options, "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, enumerate(sources)))
    linked = {}
    for main, source in zip(objects, PROGRAMS, strict=False):
        linked[source.stem] = folder / source.stem
        libraries = objects[len(PROGRAMS) :]
        command = [compiler, *static, main, *libraries, "-o", str(linked[source.stem]), "-pthread"]
        subprocess.run(command, check=True)
    return linked


# Without smmla the products are those of the set neon all the same, and take twice as long to emulate.
RUNS = [(source.stem, cpu) for source in PROGRAMS for cpu in CPUS if (source.stem, cpu) != ("gemm_sets", "cortex-a76")]


@pytest.mark.parametrize(("name", "cpu"), RUNS)
def test_kernels_agree_with_portable(programs: dict[str, Path], name: str, cpu: str) -> None:
    command = [str(EMULATOR), "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, str(programs[name])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    checked = {line.split(":")[0] for line in result.stdout.splitlines() if line.endswith(": checked")}
    assert checked - {"portable"} == CPUS[cpu]
