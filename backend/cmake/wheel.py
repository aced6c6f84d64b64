"""Build wheels that run on other people's machines: plugins for all known releases of llama-cpp-python, glibc 2.28 or
later (manylinux_2_28), x86-64 and aarch64.

    python backend/cmake/wheel.py [--arch x86_64,aarch64] [--out dist]

The compiler is zig's clang (the package ziglang): it brings libc's headers and symbols of any version for any CPU, and
links the C++ library statically. auditwheel checks what a wheel asks of a machine; the one thing that it lets pass is
libggml-base.so.0, which llama-cpp-python brings. The wheel for this machine's CPU is then installed into an environment
of its own, with this environment's llama-cpp-python, and `tilebeam doctor` runs there with no compiler in reach.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}"
ARCHES = ("x86_64", "aarch64")
# zig takes no -march for Arm, but features of a CPU, by LLVM's names of them.
_SCRIPT = """#!/bin/sh
for a; do
    shift
    case $a in -march=armv8.2-a+*) a=-mcpu=generic+v8_2a+$(echo "${a#*+}" | sed s/fp16/fullfp16/) ;; esac
    set -- "$@" "$a"
done
"""


def compilers(arch: str, folder: Path) -> dict[str, str]:
    """Scripts that compile for a CPU: CC and CXX."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        sys.exit("ziglang is not installed: pip install ziglang auditwheel wheel (make wheel does so)")
    home = Path(package.origin).parent
    found = {}
    for name, language in (("CC", "cc"), ("CXX", "c++")):
        script = folder / f"{arch}-{language}"
        script.write_text(f'{_SCRIPT}exec {home / "zig"} {language} -target {arch}-linux-gnu.{GLIBC} "$@"\n')
        script.chmod(0o755)
        found[name] = str(script)
    return found


def build(arch: str, folder: Path) -> Path:
    """Build a wheel of this tree for a CPU, named linux_ARCH."""
    environment = os.environ | compilers(arch, folder) | {"_PYTHON_HOST_PLATFORM": f"linux-{arch}"}
    defines = ["cmake.define.TILEBEAM_RELEASES=all"]
    if arch != os.uname().machine:
        defines += ["cmake.define.CMAKE_SYSTEM_NAME=Linux", f"cmake.define.CMAKE_SYSTEM_PROCESSOR={arch}"]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    for define in (f"build-dir=build/wheel-{arch}", *defines):
        command += ["--config-settings", define]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The wheel for {arch} could not be built:\n{(done.stdout + done.stderr)[-4000:]}")
    (wheel,) = folder.glob(f"tilebeam-*-linux_{arch}.whl")
    return wheel


def checked(wheel: Path, arch: str, out: Path) -> Path:
    """Name the wheel after what it runs on, which auditwheel confirms."""
    show = [sys.executable, "-m", "auditwheel", "show", "--disable-isa-ext-check", str(wheel)]
    told = " ".join(subprocess.run(show, capture_output=True, text=True, check=True).stdout.split())
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", told)}
    most = tuple(map(int, GLIBC.split(".")))
    if not versions or max(versions) > most:
        sys.exit(f"{wheel.name} asks for another glibc than {GLIBC}: {told}")
    others = set(re.findall(r"\b(lib[\w.+-]+\.so[\d.]*)", told)) - _ALLOWED
    if others:
        sys.exit(f"{wheel.name} asks for {', '.join(sorted(others))}, which not every machine has: {told}")
    tag = [sys.executable, "-m", "wheel", "tags", "--platform-tag", f"{PLATFORM}_{arch}", str(wheel)]
    name = subprocess.run(tag, capture_output=True, text=True, check=True).stdout.split()[-1]
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel.with_name(name), out / name))


_ALLOWED = {"libggml-base.so.0", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}


def tried(wheel: Path, folder: Path) -> str:
    """Install a wheel where nothing else is and run it without a compiler; what that took."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        sys.exit("llama-cpp-python is not installed here, so the wheel cannot be tried (make wheel installs it)")
    home = Path(package.origin).parent
    venv.create(folder / "bare", with_pip=True)
    programs = folder / "bare" / "bin"
    where = [programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    for part in (home, *home.parent.glob("llama_cpp_python-*.dist-info")):
        shutil.copytree(part, site / part.name)
    start = time.monotonic()
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", wheel], check=True)
    seconds = time.monotonic() - start
    alone = {"PATH": str(programs), "HOME": str(folder)}
    done = subprocess.run([programs / "tilebeam", "doctor"], env=alone, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{wheel.name} does not run in an environment of its own:\n{(done.stdout + done.stderr)[-4000:]}")
    return f"installed in {seconds:.0f} s, tilebeam doctor finds nothing wrong"


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=",".join(ARCHES), help=f"comma separated (default: {','.join(ARCHES)})")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    options = parser.parse_args()
    arches = options.arch.split(",")
    if unknown := set(arches) - set(ARCHES):
        parser.error(f"--arch {unknown.pop()}: of {', '.join(ARCHES)}")
    with tempfile.TemporaryDirectory() as folder:
        for arch in arches:
            wheel = checked(build(arch, Path(folder)), arch, options.out)
            found = tried(wheel, Path(folder)) if arch == os.uname().machine else "not run: another CPU's"
            print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB): {found}", flush=True)


if __name__ == "__main__":
    main()
