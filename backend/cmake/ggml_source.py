"""Find or fetch the source distribution of the pinned llama-cpp-python and print "dir;version;commit" for CMake."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def pinned() -> str:
    """The version of llama-cpp-python that pyproject.toml depends on."""
    found = re.search(r'"llama-cpp-python==([^"]+)"', PROJECT.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{PROJECT} pins no version of llama-cpp-python")
    return found[1]


def fetch(cache: Path) -> Path:
    """Unpack the source distribution into `cache` once; pip finds it by name and version."""
    version = pinned()
    root = cache / f"llama_cpp_python-{version}"
    if (root / "vendor").is_dir():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", "llama-cpp-python", "--dest", tmp, f"llama-cpp-python=={version}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (archive,) = Path(tmp).glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if re.search(r"/vendor/llama\.cpp/|/\.git/modules/vendor/", m.name)]
            tar.extractall(tmp, members=wanted, filter="data")
        (Path(tmp) / root.name).rename(root)
    return root


def commit_of(root: Path) -> str:
    """The llama.cpp commit that the distribution carries: its build reports the first digits of it."""
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
    parser.add_argument("--source", default="", help="an unpacked source distribution, to fetch nothing")
    parser.add_argument("--cache", type=Path, required=True, help="where to keep a fetched one")
    args = parser.parse_args()
    try:
        root = Path(args.source) if args.source else fetch(args.cache)
        ggml = root / "vendor/llama.cpp/ggml"
        for header in ("include/ggml-backend.h", "src/ggml-backend-impl.h"):
            if not (ggml / header).is_file():
                print(f"tilebeam: {root} is no llama-cpp-python source: {header} is missing", file=sys.stderr)
                return 1
    except (OSError, subprocess.CalledProcessError, tarfile.TarError, ValueError) as err:
        print(f"tilebeam: cannot fetch the source of llama-cpp-python: {err}", file=sys.stderr)
        return 1
    print(f"{ggml};{version_of(ggml)};{commit_of(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
