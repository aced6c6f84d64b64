"""The list of kernel sets (kernels/sets.cmake) is what is compiled, what dispatch.cpp picks from, and what
docs/architecture.md names."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
from kernel_sets import KERNELS, flags, sets
from tilebeam.native import executor

ARCHITECTURES = {"x86_64": "__x86_64__", "aarch64": "__aarch64__", "hexagon": "__hexagon__"}
ALL = [isa for architecture in ARCHITECTURES for isa in sets(architecture)]


def test_every_folder_is_a_set() -> None:
    folders = {path.name for path in KERNELS.iterdir() if path.is_dir()}
    assert folders == {*ALL, "portable"}
    assert all(flags(isa) for isa in ALL if isa != "hvx")


@pytest.mark.parametrize(("architecture", "macro"), ARCHITECTURES.items())
def test_dispatch_knows_the_sets_in_the_same_order(architecture: str, macro: str) -> None:
    text = (KERNELS / "dispatch.cpp").read_text(encoding="utf-8")
    table = text[text.index("compiled[] = {") :]
    part = re.search(rf"defined\({macro}\)\n(.*?)#(?:elif|endif)", table, re.DOTALL)
    assert part is not None
    assert re.findall(r'\{"(\w+)",', part[1]) == sets(architecture)


def test_the_executor_has_no_others() -> None:
    isas = executor.isas()
    known = sets({"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine()))
    assert isas == [isa for isa in known if isa in isas] + ["portable"]


def test_the_drawing_names_them() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.lstrip().startswith("kernels "))
    assert set(re.findall(r"\w+", line.split("int8")[0])) == {"kernels", "portable", *ALL}
