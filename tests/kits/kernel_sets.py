"""The kernel sets and their compiler's options, as backend/npu/kernels/sets.cmake lists them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "backend" / "npu" / "kernels"


@cache
def _variables() -> dict[str, list[str]]:
    text = re.sub(r"#[^\n]*", "", (KERNELS / "sets.cmake").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for name, values in re.findall(r"^set\((\w+)\s([^()]*)\)", text, re.MULTILINE):
        found[name] = [
            word
            for value in values.replace('""', "").split()
            for word in (found[value[2:-1]] if value.startswith("${") else [value])
        ]
    return found


def sets(architecture: str) -> list[str]:
    """Names of the sets of `architecture` (x86_64, aarch64, hexagon), best first, without portable."""
    return _variables()[f"KERNEL_SETS_{architecture}"]


def flags(isa: str) -> list[str]:
    """What g++ is told when it compiles the folder of a set."""
    return [re.sub(r"^\$<\$<CXX_COMPILER_ID:GNU>:(.*)>$", r"\1", flag) for flag in _variables()[f"KERNEL_FLAGS_{isa}"]]
