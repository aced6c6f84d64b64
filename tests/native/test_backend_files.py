"""A llama-cpp-python whose backends are files of their own (GGML_BACKEND_DL): made of the installed one.

libggml is compiled anew, which is its list of backends alone; the CPU backend stays as it is, behind a library that has
what ggml looks for in a backend's file.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import llama_cpp
import process_kit
import pytest
import upstream
from engine_kit import EXACT

from bench.lib.synth import preset, write_model

CPU = """
#include "ggml-backend-impl.h"
extern "C" ggml_backend_reg_t ggml_backend_cpu_reg(void);
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    return ggml_backend_cpu_reg();
}
extern "C" __attribute__((visibility("default"))) int ggml_backend_score(void) { return 1; }
"""
READ = """
import sys, tilebeam
with tilebeam.load(sys.argv[1], sys.argv[2], n_ctx=256, threads=1, lookup=False, **eval(sys.argv[3])) as lm:
    print(lm.generate("the question", max_tokens=16, temperature=0)[0].outputs[0].text)
"""
STOCK = """
import sys, tilebeam
registry = tilebeam.register()
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_gpu_layers=-1, n_ctx=256, n_threads=1, flash_attn=True, verbose=False)
print(registry.device_names(), len(llm("the question", max_tokens=4)["choices"][0]["text"]) >= 0)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", preset("tiny", type="q8_0"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with that llama_cpp."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (package g++)")
    ggml = upstream.llama_cpp_source() / "ggml"
    names = ("ggml-backend-reg.cpp", "ggml-backend-dl.cpp")
    if not all((ggml / "src" / name).is_file() for name in names):
        pytest.skip("this release's libggml is made of other files")
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(llama_cpp.__file__).parent, site / "llama_cpp")
    lib = site / "llama_cpp" / "lib"
    defines = ["-DNDEBUG"] + [
        f"-DGGML_{name}" for name in ("BACKEND_DL", "SHARED", "BACKEND_SHARED", "BUILD", "BACKEND_BUILD")
    ]
    common = [compiler, "-std=c++17", "-fPIC", "-shared", f"-I{ggml}/include", f"-I{ggml}/src", *defines]
    link = [f"-L{lib}", "-l:libggml-base.so.0", "-Wl,-rpath,$ORIGIN"]

    def compiled(output: str, *words: object) -> None:
        command = [str(word) for word in (*common, *words, "-o", site / output, *link)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    compiled("libggml.so.0", *(ggml / "src" / name for name in names), "-Wl,-soname,libggml.so.0")
    (site / "cpu.cpp").write_text(CPU)
    (lib / "libggml-cpu.so").unlink()
    compiled("libggml-cpu-x.so", site / "cpu.cpp", lib / "libggml-cpu.so.0")
    for there in lib.glob("libggml.so*"):
        there.unlink()
    shutil.copy(site / "libggml.so.0", lib / "libggml.so.0")
    shutil.move(site / "libggml-cpu-x.so", lib / "libggml-cpu-x.so")
    return site


def run(site: Path | None, code: str, *args: object) -> subprocess.CompletedProcess[str]:
    found = process_kit.environment()["PYTHONPATH"]
    changes = {} if site is None else {"PYTHONPATH": f"{site}:{found}"}
    return process_kit.python(code, *map(str, args), **changes)


@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_the_cpu_backend_is_found_and_texts_are_the_same(site: Path, path: Path, device: str) -> None:
    own, ordinary = (run(where, READ, path, device, repr(EXACT)) for where in (site, None))
    assert (own.returncode, ordinary.returncode) == (0, 0), own.stderr + ordinary.stderr
    assert own.stdout == ordinary.stdout
    assert own.stdout.strip()


def test_stock_programs_run(site: Path, path: Path) -> None:
    done = run(site, STOCK, path)
    assert done.returncode == 0, done.stderr
    assert "HMX0" in done.stdout


def test_what_is_missing_is_said(site: Path, path: Path) -> None:
    file = site / "llama_cpp" / "lib" / "libggml-cpu-x.so"
    away = site / "libggml-cpu-x.so"
    shutil.move(file, away)
    try:
        done = run(site, READ, path, "cpu", repr(EXACT))
        assert done.returncode == 1
        assert "GGML_BACKEND_DL, and its CPU backend (libggml-cpu-*.so) is neither in" in done.stderr
    finally:
        shutil.move(away, file)
