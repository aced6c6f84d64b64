"""llama.cpp's own test programs: built once from the source that belongs to the installed llama-cpp-python, linked
against that wheel's libraries. The plugin comes in through GGML_BACKEND_PATH."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from tilebeam.native import releases

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "HMX0"


def script(folder: str) -> ModuleType:
    """The module of tests/`folder`/run.py."""
    spec = importlib.util.spec_from_file_location(f"{folder}_run", ROOT / "tests" / folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def wheel_libs() -> Path:
    """The directory of the shared libraries that llama-cpp-python brought."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise RuntimeError("llama-cpp-python is not installed")
    return Path(spec.origin).parent / "lib"


def environment() -> dict[str, str]:
    """The environment in which an upstream program finds the plugin."""
    return {**os.environ, "GGML_BACKEND_PATH": str(releases.plugin_file())}


def llama_cpp_source() -> Path:
    """The llama.cpp source that belongs to the installed llama-cpp-python, fetched once."""
    command = [sys.executable, str(ROOT / "backend/cmake/ggml_source.py"), "--cache", str(ROOT / "build/ggml-source")]
    command += ["--release", releases.release_of(releases.installed())]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Path(out.strip().split(";")[0]).parent


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def build(
    name: str, folder: str, libraries: Sequence[str], headers: Path | None = None, own: Path | None = None
) -> Path:
    """Compile tests/NAME.cpp of llama.cpp unless this source and these libraries have been seen before.

    Args:
        folder: of build/, for the program.
        libraries: names of the wheel's libraries to link, such as "ggml-base".
        headers: for a program of llama.cpp itself and not only of ggml: a folder with headers in place of those of
            llama.cpp's library "common", which no wheel has.
        own: a program that includes the source of that one, instead.
    """
    libs, source = wheel_libs(), llama_cpp_source()
    program_source = source / "tests" / f"{name}.cpp"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    includes = [source / "ggml/include", source / "ggml/src"]
    if headers:
        includes = [headers, *includes, source / "include", source / "src"]
    if own:
        includes.append(source / "tests")
    command = [compiler, "-std=c++17", "-O1", "-w", *(f"-I{i}" for i in includes)]
    command += [str(own or program_source), f"-L{libs}", f"-Wl,-rpath,{libs}", "-pthread"]
    command += [f"-l:lib{library}.so.0" for library in libraries]
    digest = hashlib.sha256(" ".join(command).encode() + program_source.read_bytes())
    for file in [*(sorted(headers.iterdir()) if headers else []), *([own] if own else [])]:
        digest.update(file.read_bytes())
    out = ROOT / "build" / folder / digest.hexdigest()[:16] / (own.stem if own else name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.parent / "lock"):
        if not out.exists():
            print(f"building {out.name} from {program_source}", file=sys.stderr)
            partial = out.with_suffix(".tmp")
            # A sanitizer run preloads its runtime; the compiler must not have it.
            env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
            subprocess.run([*command, "-o", str(partial)], check=True, env=env)
            partial.rename(out)
    return out
