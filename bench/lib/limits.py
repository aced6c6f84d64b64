"""The machine: its name, its limits as `tilebeam.measure.peaks` measures them, and C++ compiled for this very CPU."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tilebeam._ext import cpus
from tilebeam.measure.machine import cpu_info
from tilebeam.measure.peaks import fma_gflops, int8_gops, read_gbs

from bench.lib import ROOT

__all__ = ["compile", "fma_gflops", "int8_gops", "machine", "read_gbs"]


@cache
def compile(name: str, *flags: str) -> ctypes.CDLL:
    """Build a source file of bench/ for this very CPU, with further flags, and load it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install the package g++")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-ffast-math", "-shared", "-fPIC", "-w", *flags]
        command += ["-I", str(ROOT / "ggml_ext" / "include")]
        subprocess.run([*command, str(ROOT / "bench" / name), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def machine() -> dict[str, str | int]:
    return {"cpu": cpu_info(), "cpus": cpus.usable_cpus().cpus, "system": platform.release()}
