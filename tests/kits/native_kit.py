"""Small C++ programs of tests/native, compiled where they are needed with the backend's files that they test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tilebeam._ext import native_file

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "backend"


def build(source: str, beside: Sequence[str], folder: Path, *, contract: bool = False) -> Path:
    """Compile a file of tests/native with files of backend/, without a sanitizer; skips where no compiler is.

    With `contract`, it may call what libtilebeam_ext.so has.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target = folder / Path(source).stem
    files = [ROOT / "tests" / "native" / source, *(BACKEND / name for name in beside)]
    includes = [f"-I{BACKEND / room}" for room in ("base", "npu")] + [f"-I{ROOT / 'ggml_ext' / 'include'}"]
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-pthread", *includes, *map(str, files)]
    if contract:
        library = native_file("libtilebeam_ext.so").resolve()
        command += [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def run(program: Path, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run such a program to its end; its output as text."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # a preloaded sanitizer is not for it
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=timeout, check=False, env=env)
