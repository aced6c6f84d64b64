"""What the scripts of bench/ share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "bench"  # random models and packed files, written on first use
