"""Which file is the plugin for the llama-cpp-python that is installed, and how one is built where none came along.

ggml's backend interface is positional and changes with every release of llama-cpp-python, so the plugin is compiled
for each with that release's own headers. The native files bring it for some releases (`plugins.txt` lists them). For
another one, it is built on first use, where there are a compiler, CMake and Tilebeam's sources, and kept in the user's
cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tilebeam._version import __version__
from tilebeam.errors import TilebeamError
from tilebeam.native import paths

PLUGIN = "libggml-tilebeam.so"
_LIST = "plugins.txt"


def installed() -> str:
    """The version of llama-cpp-python that is installed.

    Raises:
        TilebeamError: none is.
    """
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        newest = max(built(), key=_number)
        raise TilebeamError(f"llama-cpp-python is not installed: pip install llama-cpp-python=={newest}") from None


def built() -> dict[str, Path]:
    """The plugins that came with the native files, by version of llama-cpp-python."""
    try:
        paths.native(PLUGIN)
        lines = paths.native(_LIST).read_text(encoding="utf-8").splitlines()
        return {release: paths.native(name) for release, name in (line.split() for line in lines)}
    except FileNotFoundError as error:
        raise TilebeamError(f"The NPU plugin cannot be loaded: {error}") from None


def plugin_file() -> Path:
    """The plugin for the installed llama-cpp-python.

    Raises:
        TilebeamError: there is none, and it cannot be built here.
    """
    release, there = installed(), built()
    if release in there:
        return there[release]
    kept = cache_folder() / f"{release}-{_stamp()}" / PLUGIN
    return kept if kept.is_file() else _build(release, kept)


def cache_folder() -> Path:
    """Where plugins are kept that were built on first use."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tilebeam" / "plugins"


def _stamp() -> str:
    """Of the native files, which the plugin must be of one build with."""
    from tilebeam.native import executor

    ffi, lib = executor.load()
    return f"{__version__}-{ffi.string(lib.tb_session_build_id()).decode()}"


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


def _build(release: str, target: Path) -> Path:
    known = ", ".join(sorted(built(), key=_number))
    lacks = _lacks()
    if lacks:
        raise TilebeamError(
            f"llama-cpp-python is {release}, and Tilebeam has its plugin for {known}: "
            f"pip install llama-cpp-python=={max(built(), key=_number)}. To build the plugin for {release}, {lacks}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.is_file():
            return target  # another process built it meanwhile
        print(f"tilebeam: building the plugin for llama-cpp-python {release}, once (minutes)", file=sys.stderr)
        steps = [
            ["cmake", "-S", str(paths.SOURCE), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"],
            ["cmake", "--build", folder, "--target", "ggml-tilebeam", "--parallel", str(os.cpu_count() or 1)],
        ]
        steps[0] += [f"-DTILEBEAM_RELEASE={release}", f"-DPython3_EXECUTABLE={sys.executable}"]
        for step in steps:
            _run(step, release)
        os.replace(shutil.copy(Path(folder) / "lib" / PLUGIN, target.with_suffix(".new")), target)
    return target


def _lacks() -> str | None:
    """What a build would need and this machine does not have, as advice."""
    if os.environ.get("TILEBEAM_BUILD_PLUGIN") == "0":
        return "unset TILEBEAM_BUILD_PLUGIN, which is 0"
    if not (paths.SOURCE / "backend" / "CMakeLists.txt").is_file():
        return "install Tilebeam from its sources (pip install --no-binary tilebeam tilebeam, or a checkout)"
    missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
    return f"install {' and '.join(missing)}" if missing else None


def _run(step: list[str], release: str) -> None:
    """One step of a build: its progress on a terminal, what it said where it failed."""
    said: list[str] = []
    with subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as work:
        assert work.stdout is not None
        for line in work.stdout:
            said.append(line)
            if line.startswith("[") and sys.stderr.isatty():
                print(f"\r\x1b[K{line.rstrip()[:79]}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if work.returncode != 0:
        tail = "".join(said[-12:]).strip()
        raise TilebeamError(f"The plugin for llama-cpp-python {release} could not be built ({step[0]}):\n{tail}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _number(release: str) -> tuple[int, ...]:
    """For order."""
    return tuple(int(part) for part in release.split(".") if part.isdigit())
