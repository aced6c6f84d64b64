"""Includes of the backend point one way: base <- npu <- session <- plugin, and no two files need each other."""

from __future__ import annotations

import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "backend"
# What the files of a room may include beside their own room's. hexagon/ stands in for files of base/ and session/.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "npu": {"base"},
    "session": {"base", "npu"},
    "plugin": {"base", "npu", "session"},
    "sampling": set(),
    "capi": {"base", "npu", "session"},
    "npud": {"base", "npu", "session"},
}
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)


def files() -> list[Path]:
    return sorted(f for room in ROOMS for f in (BACKEND / room).rglob("*") if f.suffix in (".c", ".cpp", ".h"))


def included(file: Path, all_files: list[Path]) -> list[Path]:
    """The backend's headers that `file` names; those beside it come first, as for a compiler."""
    found = []
    for name in INCLUDE.findall(file.read_text(encoding="utf-8")):
        fits = [f for f in all_files if str(f).endswith(f"/{name}")]
        found += [f for f in fits if f == file.parent / name] or fits
    return found


def test_rooms_include_what_is_below_them_only() -> None:
    every = files()
    assert {f.relative_to(BACKEND).parts[0] for f in every} == set(ROOMS)
    wrong = []
    for file in every:
        room = file.relative_to(BACKEND).parts[0]
        for header in included(file, every):
            other = header.relative_to(BACKEND).parts[0]
            if other != room and other not in ROOMS[room]:
                wrong.append(f"{file.relative_to(ROOT)} includes {header.relative_to(ROOT)}")
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_no_two_files_of_a_room_need_each_other(room: str) -> None:
    """A header and the file that implements it count as one."""
    every = files()
    needs: dict[str, set[str]] = {}
    for file in every:
        if file.relative_to(BACKEND).parts[0] == room:
            unit = str(file.with_suffix(""))
            needs.setdefault(unit, set()).update(str(h.with_suffix("")) for h in included(file, every))
            needs[unit].discard(unit)
    TopologicalSorter(needs).prepare()  # raises CycleError and names them


def test_the_npu_side_knows_no_ggml() -> None:
    for file in files():
        if file.relative_to(BACKEND).parts[0] != "plugin":
            assert not [n for n in INCLUDE.findall(file.read_text(encoding="utf-8")) if n.startswith("ggml")], file


def test_an_sdist_builds_without_tests_and_benches() -> None:
    """It has neither. CMake reaches for them under TILEBEAM_TESTS alone, which pyproject.toml turns off there."""
    files = [ROOT / "CMakeLists.txt", *(f for d in (BACKEND, ROOT / "ggml_ext") for f in sorted(d.rglob("*")))]
    for file in files:
        if file.name == "CMakeLists.txt" or file.suffix == ".cmake":
            text = re.sub(r"#.*|^option\(.*", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            text = re.sub(r"^if\(TILEBEAM_TESTS\)$.*?^endif\(\)$", "", text, flags=re.MULTILINE | re.DOTALL)
            assert not re.search(r"\b(?:tests|bench)/", text), file
    scikit = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    assert {"tests", "bench"} <= set(scikit["sdist"]["exclude"])
    assert scikit["overrides"] == [
        {
            "if": {"any": {"state": "wheel", "from-sdist": True}},
            "cmake": {"define": {"TILEBEAM_TESTS": "OFF"}},
        }
    ]
