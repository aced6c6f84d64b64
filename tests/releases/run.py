"""Test Tilebeam with every release of llama-cpp-python that it is made for.

    python tests/releases/run.py [0.3.35 ..] [--quick] [--json FILE]

For each release: llama-cpp-python is compiled into a folder of its own (minutes, once), the plugin is built against its
headers, and then with both: the tests of the device, of whole models' logits, of loading and of decoding (tests/plugin,
tests/model, tests/native, tests/engine), and llama.cpp's test-backend-ops from the same sources (--quick: its
thinned-out set). All is kept in build/releases; what was compiled is not compiled again. The exit status is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "releases"
sys.path.insert(0, str(ROOT / "backend" / "cmake"))
import ggml_source  # noqa: E402


def run(command: list[object], log: Path, **environment: str) -> int:
    """Run a command with its output in a file; its exit status."""
    with log.open("w") as file:
        words = [str(word) for word in command]
        return subprocess.run(words, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=file).returncode


def compiled(release: str) -> Path:
    """A folder with that llama-cpp-python alone, and one with the native files for it."""
    home = BUILD / release
    site, native = home / "site", home / "native"
    home.mkdir(parents=True, exist_ok=True)
    if not (site / "llama_cpp").is_dir():
        print(f"{release}: compiling llama-cpp-python", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-binary", "llama-cpp-python", "--target", site]
        log, extras = home / "install.log", f"{os.environ.get('CMAKE_ARGS', '')} -DLLAVA_BUILD=OFF"
        must(run([*pip, f"llama-cpp-python=={release}"], log, CMAKE_ARGS=extras), log)
    print(f"{release}: building the plugin", flush=True)
    configure: list[object] = ["cmake", "-S", ROOT, "-B", native, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DTILEBEAM_RELEASE={release}", f"-DPython3_EXECUTABLE={sys.executable}"]
    must(run(configure, home / "cmake.log"), home / "cmake.log")
    must(run(["cmake", "--build", native], home / "build.log"), home / "build.log")
    return home


def must(status: int, log: Path) -> None:
    """End with what a command said if it failed."""
    if status:
        sys.exit(f"failed; the end of {log}:\n{''.join(log.read_text().splitlines(keepends=True)[-15:])}")


def tested(release: str, quick: bool) -> dict[str, Any]:
    """What the tests said of a release."""
    home = compiled(release)
    path = os.pathsep.join(filter(None, [str(home / "site"), os.environ.get("PYTHONPATH")]))
    here = {"PYTHONPATH": path, "TILEBEAM_LIB_DIR": str(home / "native" / "lib")}
    print(f"{release}: testing", flush=True)
    began = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    pytest += ["tests/plugin", "tests/model", "tests/native", "tests/engine"]
    older = release != ggml_source.releases()[-1]
    # What these ask is of the newest: all its ops, and architectures that older ones do not know.
    newest = ("tests/plugin/test_backend_ops.py", "tests/plugin/test_archs.py", "tests/engine/test_recurrent_models.py")
    pytest += [f"--ignore={file}" for file in newest if older]
    status = run(pytest, home / "pytest.log", **here)
    said = (home / "pytest.log").read_text().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", said)}
    ops_json = home / "ops.json"
    ops_json.unlink(missing_ok=True)
    ops = [sys.executable, "tests/backend_ops/run.py", "--json", ops_json, *([] if quick else ["--all"])]
    ops += ["--older"] if older else []
    ops_status = run(ops, home / "ops.log", **here)
    cases = json.loads(ops_json.read_text()) if ops_json.exists() else {}
    sums = {key: sum(op[key] for op in cases.values()) for key in ("claimed", "passed", "failed")}
    asked = ["--release", release, "--cache", ROOT / "build/ggml-source"]
    source = subprocess.check_output([sys.executable, ROOT / "backend/cmake/ggml_source.py", *asked], text=True)
    return {
        "release": release,
        "ggml": " ".join(source.split(";")[1:])[:19],
        "tests": counts,
        "ops": sums,
        "passed": status == 0 and ops_status == 0,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def main() -> int:
    """Test the releases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="of llama-cpp-python (default: all of pyproject.toml)")
    parser.add_argument("--quick", action="store_true", help="fewer cases of test-backend-ops")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    results = []
    for release in options.releases or ggml_source.releases():
        results.append(tested(release, options.quick))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    columns = ["llama-cpp-python", "ggml", "tests passed", "failed", "skipped", "cases of test-backend-ops", "passed"]
    print(f"\n| {' | '.join([*columns, 'minutes'])} |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in results:
        failed = r["tests"].get("failed", 0) + r["tests"].get("errors", 0) + r["tests"].get("error", 0)
        counts = f"{r['tests'].get('passed', 0)} | {failed} | {r['tests'].get('skipped', 0)}"
        cases = f"{r['ops']['claimed']} | {r['ops']['passed']}"
        print(f"| {r['release']} | {r['ggml']} | {counts} | {cases} | {r['minutes']} |")
    return 0 if all(r["passed"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
