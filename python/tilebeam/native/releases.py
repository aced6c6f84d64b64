"""The choice of the plugin for the llama-cpp-python that is installed, and how one is built where none came along.

ggml's backend interface is positional and changes with every release of llama-cpp-python, so the plugin is compiled
for each with that release's own headers. The native files bring it for some releases (`plugins.txt` lists them). For
another one, it is built on first use, where there are a compiler, CMake, pip and Tilebeam's sources, and kept in the
user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tilebeam._ext import cpus
from tilebeam.errors import TilebeamError
from tilebeam.native import paths

PLUGIN = "libggml-tilebeam.so"
_LIST = "plugins.txt"


def installed() -> str:
    """Return the version of llama-cpp-python that is installed, as it names itself.

    Raises:
        TilebeamError: none is.
    """
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
    """Return the plugin for the installed llama-cpp-python.

    Raises:
        TilebeamError: there is none, and it cannot be built here.
    """
    release, there = release_of(installed()), built()
    if release in there:
        return there[release]
    try:
        sources = _sources()
        kept = cache_folder() / release / f"libggml-tilebeam-{_digest(sources)}.so"
        return kept if kept.is_file() else _build(release, sources, kept)
    except TilebeamError:
        raise
    except (OSError, RuntimeError) as error:  # an unwritable folder, no home, no locks
        raise TilebeamError(
            f"The plugin for llama-cpp-python {release} cannot be kept: {error}. XDG_CACHE_HOME names another folder."
        ) from None


def cache_folder() -> Path:
    """Return the folder of plugins that were built on first use."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tilebeam" / "plugins"


def _sources() -> Path:
    """Return Tilebeam's C++ sources: of a checkout, or those that the package brings."""
    return paths.SOURCE if (paths.SOURCE / "backend" / "CMakeLists.txt").is_file() else paths.PACKAGE / "source"


def _digest(sources: Path) -> str:
    """Return the digest of all that a plugin is made of."""
    digest = hashlib.sha256()
    for folder in ("backend", "ggml_ext"):
        for file in sorted((sources / folder).rglob("*")):
            if file.suffix in (".c", ".cpp", ".h", ".cmake", ".txt") or file.name == "ggml_source.py":
                digest.update(str(file.relative_to(sources)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


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


def _build(release: str, sources: Path, target: Path) -> Path:
    known = ", ".join(sorted(built(), key=order))
    lacks = _lacks(release, sources)
    if lacks:
        raise TilebeamError(
            f"llama-cpp-python is {release}, and Tilebeam has its plugin for {known}: "
            f"pip install llama-cpp-python=={max(built(), key=order)}. To build the plugin for {release}, {lacks}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        if target.is_file():
            return target  # another process built it meanwhile
        print(f"tilebeam: building the plugin for llama-cpp-python {release}, once (minutes)", file=sys.stderr)
        work = target.parent / "build"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed
        try:
            if not _headers(release).is_dir():
                _fetch(release, sources)
            configure = ["cmake", "-S", str(sources), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release"]
            configure += ["-DTILEBEAM_TESTS=OFF", f"-DTILEBEAM_RELEASE={release}"]
            configure += [f"-DPython3_EXECUTABLE={sys.executable}", f"-DTILEBEAM_SOURCE_CACHE={_source_cache()}"]
            configure += [] if _makes() else ["-G", "Ninja"]
            _run(configure, release)
            jobs = str(cpus.default_threads())
            _run(["cmake", "--build", str(work), "--target", "ggml-tilebeam", "--parallel", jobs], release)
            made = work / "lib" / PLUGIN
            _check_build(made, sources)
            with made.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(made, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _check_build(made: Path, sources: Path) -> None:
    """Check that the plugin and the other native files are of the same sources."""
    from tilebeam.native import executor

    ffi, lib = executor.load()
    if ffi.string(lib.tb_session_build_id()) not in made.read_bytes():
        raise TilebeamError(
            f"The sources in {sources} are not those that Tilebeam was built from: build it anew (make)."
        )


def _lacks(release: str, sources: Path) -> str | None:
    """List what a build would need and this machine does not have, as advice."""
    if os.environ.get("TILEBEAM_BUILD_PLUGIN") == "0":
        return "unset TILEBEAM_BUILD_PLUGIN, which is 0"
    if not (sources / "backend" / "CMakeLists.txt").is_file():
        return "use a checkout of Tilebeam (make)"
    there = {
        "cmake": _program("cmake"),
        "a C compiler": "CC" in os.environ or _program("cc", "gcc", "clang"),
        "a C++ compiler": "CXX" in os.environ or _program("c++", "g++", "clang++"),
        "make": _makes() or _program("ninja"),
        "pip": _headers(release).is_dir() or importlib.util.find_spec("pip") is not None,
    }
    missing = ", ".join(name for name, found in there.items() if not found)
    return f"install {missing}" if missing else None


def _program(*names: str) -> bool:
    """Tell whether one of these is installed."""
    return any(shutil.which(name) for name in names)


def _makes() -> bool:
    """Tell whether CMake has what it builds with unless it is told otherwise."""
    return "CMAKE_GENERATOR" in os.environ or _program("make", "gmake")


def _source_cache() -> Path:
    """Return the folder of source distributions of llama-cpp-python."""
    return cache_folder() / "ggml-source"


def _headers(release: str) -> Path:
    """Return what is needed of a release's source distribution once it was fetched."""
    return _source_cache() / f"llama_cpp_python-{release}" / "vendor"


def _fetch(release: str, sources: Path) -> None:
    """Fetch the source distribution of a release. CMake would do so, too, but not say in a sentence why it cannot."""
    script = sources / "backend" / "cmake" / "ggml_source.py"
    step = [sys.executable, str(script), "--release", release, "--cache", str(_source_cache())]
    done = subprocess.run(step, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        why = done.stderr.strip().removeprefix("tilebeam: ")
        raise TilebeamError(f"The plugin for llama-cpp-python {release} could not be built: {why}")


def _run(step: list[str], release: str) -> None:
    """Run one step of a build: its progress on a terminal, what it said where it failed."""
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
    """Let one process at a time in."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_PARTS = re.compile(r"(?:(\d+)!)?(\d*(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?")


def order(version: str) -> tuple[object, ...]:
    """Return what sorts versions as Python packages are sorted: 1.0.dev1, 1.0a1, 1.0rc1, 1.0 and 1.0+cpu, 1.0.post1."""
    found = _PARTS.match(version)
    assert found is not None
    epoch, numbers, stage, count, post, dev = found.groups()
    before = ("a", "b", "rc").index(stage) if stage else -1 if dev and not post else 3
    parts = [int(part) for part in numbers.split(".") if part]
    while parts and parts[-1] == 0:
        parts.pop()
    return int(epoch or 0), parts, before, int(count or 0), int(post or -1), float(dev or "inf")
