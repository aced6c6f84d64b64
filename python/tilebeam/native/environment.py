"""The environment variables that Tilebeam reads, in Python or in its native libraries."""

from __future__ import annotations

import difflib
import os

PREFIX = "TILEBEAM_"

# What each is for.
VARIABLES = {
    "TILEBEAM_NPU": "how the NPU runs: thread, process or qemu-hexagon",
    "TILEBEAM_THREADS": "worker threads",
    "TILEBEAM_ISA": "a kernel set",
    "TILEBEAM_NUMERICS": "how products are computed: int8 or fp16",
    "TILEBEAM_SOFTMAX": "attention: exponents from the FP16 table (table) or in float32 (exact)",
    "TILEBEAM_DETERMINISTIC": "1: results do not depend on what else is computed beside them",
    "TILEBEAM_PACKED_CACHE": "room for packed files that are kept for the next load",
    "TILEBEAM_FUSE": "0 runs graphs op by op",
    "TILEBEAM_LIB_DIR": "the folder of the native libraries",
    "TILEBEAM_ALLOW_UNKNOWN_COMMIT": "1 lets the plugin run in a ggml whose commit is not known",
    "TILEBEAM_API_KEY": "a key that requests to the server must bring",
    "TILEBEAM_DEBUG": "1 shows where a command failed",
}
SECRET = frozenset({"TILEBEAM_API_KEY"})


def settings() -> dict[str, str]:
    """Return those that are set, and to what; secrets are not shown."""
    return {name: "(set)" if name in SECRET else os.environ[name] for name in VARIABLES if name in os.environ}


def unread() -> dict[str, str | None]:
    """Return variables with Tilebeam's prefix that are set and that nothing reads, with the name probably meant."""
    known = [name.removeprefix(PREFIX) for name in VARIABLES]
    found: dict[str, str | None] = {}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1, 0.75)
            found[name] = PREFIX + close[0] if close else None
    return found
