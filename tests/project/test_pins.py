"""The releases of llama-cpp-python that Tilebeam is made for stand in pyproject.toml alone: whatever else needs them
reads them there."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tilebeam.native import releases
from tilebeam.native.plugin import ggml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RELEASES: list[str] = PROJECT["tool"]["tilebeam"]["llama-cpp-python"]
HISTORY = ("CHANGELOG.md", "bench/RESULTS.md", "docs/releases.md")  # what was so at the time


def test_everybody_reads_the_releases() -> None:
    assert f"llama-cpp-python>={RELEASES[0]},<={RELEASES[-1]}" in PROJECT["project"]["dependencies"]
    assert len(RELEASES) >= 5
    sys.path.insert(0, str(ROOT / "backend" / "cmake"))
    try:
        import ggml_source
    finally:
        sys.path.pop(0)
    assert ggml_source.releases() == RELEASES
    rules = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"\nLLAMA_CPP_PYTHON := {RELEASES[-1]}\n" in rules
    assert set(releases.built()) <= set(RELEASES)


def test_every_target_of_make_has_a_rule() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = (line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:"))
    assert [name for name in phony if not re.search(rf"^{name}:.*\n\t", makefile, re.M) and name != "setup"] == []
    assert set(re.findall(r"^#   make ([a-z-]+)", makefile, re.M)) <= set(phony)


def test_no_other_file_states_it() -> None:
    library = ggml()
    library.ggml_version.restype = ctypes.c_char_p
    versions = (RELEASES[-1], library.ggml_version().decode())
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
