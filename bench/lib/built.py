"""Programs that only a build from a checkout makes, for tests and benches."""

from __future__ import annotations

import os
from pathlib import Path

from tilebeam.native.paths import SOURCE


def built(name: str) -> Path:
    """Return the path of one.

    Raises:
        FileNotFoundError: this build has no such program.
    """
    path = Path(os.environ.get("TILEBEAM_LIB_DIR") or SOURCE / "build" / "editable" / "lib") / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: build with CMake from a checkout (make setup)")
    return path
