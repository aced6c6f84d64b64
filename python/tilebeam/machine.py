"""What the reports say about the machine. Needs nothing but the standard library."""

from __future__ import annotations

import platform
from pathlib import Path


def _cpuinfo(*keys: str) -> str | None:
    """The first value of one of these keys in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return None


def cpu_info() -> str:
    """The processor's name, or its architecture if it has none."""
    return _cpuinfo("model name") or platform.machine()


def cpu_features() -> set[str]:
    """The instruction set extensions that the kernel reports, by its names; empty if unknown."""
    return set((_cpuinfo("flags", "Features") or "").split())
