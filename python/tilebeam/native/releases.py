"""The choice of the plugin for the llama-cpp-python that is installed.

ggml's backend interface is positional and changes with every release of llama-cpp-python, so the plugin is compiled
for each with that release's own headers. The native files bring it for some releases (`plugins.txt` lists them).
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.native import paths

PLUGIN = "libggml-tilebeam.so"
_LIST = "plugins.txt"


def installed() -> str:
    """Return the version of llama-cpp-python that is installed, as it names itself; TilebeamError: none is."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        newest = max(built(), key=order)
        raise TilebeamError(f"llama-cpp-python is not installed: pip install llama-cpp-python=={newest}") from None


def release_of(version: str) -> str:
    """Strip a version's local label, such as the +cpu of a prebuilt wheel, which tells what it is a build of. Whether
    it is so, the plugin finds out itself by ggml's commit."""
    return version.partition("+")[0]


def built() -> dict[str, Path]:
    """List the plugins that came with the native files, by version of llama-cpp-python."""
    try:
        paths.native(PLUGIN)
        lines = paths.native(_LIST).read_text(encoding="utf-8").splitlines()
        return {release: paths.native(name) for release, name in (line.split() for line in lines)}
    except FileNotFoundError as error:
        raise TilebeamError(f"The NPU plugin cannot be loaded: {error}") from None


def plugin_file() -> Path:
    """Return the plugin for the installed llama-cpp-python; TilebeamError: there is none."""
    release, there = release_of(installed()), built()
    if release not in there:
        known = sorted(there, key=order)
        raise TilebeamError(
            f"llama-cpp-python is {release}, and Tilebeam has its plugin for {', '.join(known)}: pip install "
            f"llama-cpp-python=={known[-1]}, or install Tilebeam from a checkout for {release}: pip install --no-deps "
            f". -C cmake.define.TILEBEAM_RELEASE={release}."
        )
    return there[release]


def map_files(params: Any, wanted: bool) -> None:
    """Have llama.cpp map a model's file, or read it.

    Args:
        params: llama_model_params. Before 0.3.35 they have a flag for it, then a mode.
    """
    import llama_cpp.llama_cpp as capi

    if hasattr(params, "load_mode"):
        params.load_mode = capi.LLAMA_LOAD_MODE_MMAP if wanted else capi.LLAMA_LOAD_MODE_NONE
    else:
        params.use_mmap = wanted


def check_architecture(path: object, architecture: str) -> None:
    """Refuse a model on which the llama.cpp of the installed release ends the process, on any backend.

    Raises:
        TilebeamError: it is one.
    """
    last = _ABORTS_UP_TO.get(architecture)
    if last is not None and order(installed()) <= order(last):
        raise TilebeamError(
            f"{path} has the architecture {architecture}, on which llama-cpp-python aborts up to {last}: "
            f"pip install 'llama-cpp-python>{last}'."
        )


_ABORTS_UP_TO = {"gemma-embedding": "0.3.35"}


def order(version: str) -> list[int]:
    """Return what sorts releases: the numbers that a version begins with."""
    return [int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number]  # type: ignore[index]
