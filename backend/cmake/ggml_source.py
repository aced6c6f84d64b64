"""Find or fetch source distributions of llama-cpp-python; print "dir;version;commit" of their ggml for CMake.

pyproject.toml has the releases that Tilebeam is made for: `[tool.tilebeam] llama-cpp-python`, oldest first.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def releases() -> list[str]:
    """List the versions of llama-cpp-python that Tilebeam is made for, oldest first."""
    with PROJECT.open("rb") as file:
        return list(tomllib.load(file)["tool"]["tilebeam"]["llama-cpp-python"])


def fetch(release: str, cache: Path) -> Path:
    """Unpack the source distribution into `cache` once; pip finds it by name and version.

    Raises:
        OSError: it cannot be had; says why.
    """
    root = cache / f"llama_cpp_python-{release}"
    if (root / "vendor").is_dir():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        download(release, Path(tmp), cache)
        (archive,) = Path(tmp).glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if re.search(r"/vendor/llama\.cpp/|/\.git/modules/vendor/", m.name)]
            tar.extractall(tmp, members=wanted, filter="data")
        try:
            (Path(tmp) / root.name).rename(root)
        except OSError:  # another build has fetched it meanwhile
            if not (root / "vendor").is_dir():
                raise
    return root


def download(release: str, folder: Path, cache: Path) -> None:
    """Have pip fetch the source distribution into a folder.

    Raises:
        OSError: it cannot; says why, and what to do without it.
    """
    otherwise = f"or unpack llama_cpp_python-{release}.tar.gz in {cache.resolve()}"
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"Python ({sys.executable}) has no pip: install it, {otherwise}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--dest", str(folder), f"llama-cpp-python=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    if "(from versions: none)" in done.stderr:
        raise OSError(f"pip reaches no package index: connect this machine to a network, {otherwise}")
    errors = re.findall(r"^ERROR: (.*)", done.stderr, re.MULTILINE)
    raise OSError(f"pip says: {errors[-1] if errors else done.stderr.strip()}")


def check_release(root: Path, release: str) -> None:
    """Raise ValueError if a source distribution is of another release than the one that is wanted."""
    package = root / "llama_cpp" / "__init__.py"
    found = re.search(r'__version__ = "([^"]+)"', package.read_text(encoding="utf-8")) if package.is_file() else None
    if found and found[1] != release:
        raise ValueError(f"{root} is {found[1]}, not {release}: say so with -DTILEBEAM_RELEASE={found[1]}")


def commit_of(root: Path) -> str:
    """Return the llama.cpp commit that the distribution carries: its build reports the first digits of it."""
    head = root / ".git/modules/vendor/llama.cpp/HEAD"
    text = head.read_text().strip() if head.exists() else ""
    return text if re.fullmatch(r"[0-9a-f]{40}", text) else "unknown"


def version_of(ggml: Path) -> str:
    """ggml's version as its CMakeLists.txt has it, such as "0.9.4"."""
    text = (ggml / "CMakeLists.txt").read_text()
    parts = [re.search(rf"GGML_VERSION_{p} (\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(m.group(1) for m in parts if m)


def main() -> int:
    """Find or fetch the source and print what CMake needs of it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the releases, semicolons between them")
    parser.add_argument("--release", help="which (default: the newest)")
    parser.add_argument("--source", default="", help="an unpacked source distribution, to fetch nothing")
    parser.add_argument("--cache", type=Path, help="where to keep a fetched one")
    args = parser.parse_args()
    if args.list:
        print(";".join(releases()))
        return 0
    release = args.release or releases()[-1]
    try:
        root = Path(args.source) if args.source else fetch(release, args.cache)
        check_release(root, release)
        ggml = root / "vendor/llama.cpp/ggml"
        for header in ("include/ggml-backend.h", "src/ggml-backend-impl.h"):
            if not (ggml / header).is_file():
                print(f"tilebeam: {root} is no llama-cpp-python source: {header} is missing", file=sys.stderr)
                return 1
    except (OSError, tarfile.TarError, ValueError) as err:
        print(f"tilebeam: cannot fetch the source of llama-cpp-python {release}: {err}", file=sys.stderr)
        return 1
    print(f"{ggml};{version_of(ggml)};{commit_of(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
