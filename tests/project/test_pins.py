"""The pinned llama.cpp stands in pyproject.toml alone: whatever else needs it reads it there."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from tilebeam.errors import TilebeamError
from tilebeam.native import paths
from tilebeam.native.plugin import ggml, pinned

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
(PIN,) = (d.partition("==")[2] for d in PROJECT["project"]["dependencies"] if d.startswith("llama-cpp-python=="))
HISTORY = ("CHANGELOG.md", "bench/RESULTS.md")  # what was so at the time


def test_everybody_reads_the_pin() -> None:
    assert pinned() == PIN
    sys.path.insert(0, str(ROOT / "backend" / "cmake"))
    try:
        import ggml_source
    finally:
        sys.path.pop(0)
    assert ggml_source.pinned() == PIN
    rules = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"\nLLAMA_CPP_PYTHON := {PIN}\n" in rules


def test_the_pin_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert pinned.__wrapped__() == PIN
    monkeypatch.setattr(paths, "SOURCE", tmp_path)
    with pytest.raises(TilebeamError, match="reinstall tilebeam"):
        pinned.__wrapped__()


def test_no_other_file_states_it() -> None:
    library = ggml()
    library.ggml_version.restype = ctypes.c_char_p
    versions = (PIN, library.ggml_version().decode())
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if name in (*HISTORY, "pyproject.toml") or path.suffix in (".png", ".gguf", ".npz", ".zip") or path.is_dir():
            continue
        text = path.read_bytes()
        found += [f"{name}: {version}" for version in versions if version.encode() in text]
    assert not found
