"""Tilebeam: test-time scaling on local hardware.

    import tilebeam
    lm = tilebeam.load("model.gguf")
    best = tilebeam.BestOfN().infer(lm, "Question: ...", budget=16)

Importing the package is cheap: llama_cpp, numpy and the native libraries are loaded on first use. `__init__.pyi` is the
table of the public names.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
    raise ImportError(
        f"Tilebeam runs on Linux on x86-64 and aarch64; this is {platform.system()} on {platform.machine()}."
    )

from tilebeam.errors import TilebeamError
from tilebeam.gguf.lazy_names import lazy_names

_get, __dir__, __all__ = lazy_names(globals())


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ImportError as error:
        if "libtilebeam_ext" not in str(error):
            raise
        # It lies beside the plugin, so a lost or wrong folder is first noticed here.
        raise TilebeamError(f"The libraries libggml-tilebeam.so and libtilebeam_ext.so are needed: {error}") from None
