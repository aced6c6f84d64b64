"""`pip install .` alone gives a working tilebeam: a wheel is built, unpacked elsewhere and used from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    "TILEBEAM_LIB_DIR" in os.environ, reason="native files come from TILEBEAM_LIB_DIR, not from a wheel"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    # The folder in which `make setup` built for this checkout: the same objects, so that only what changed is compiled.
    command += ["--config-settings=build-dir=build/editable", "--wheel-dir", str(folder), str(ROOT)]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = folder.glob("tilebeam-*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as z:
        z.extractall(folder / "site")
    for program in (folder / "site/tilebeam/lib").glob("tilebeam-npud*"):
        program.chmod(0o755)  # pip keeps the mode, zipfile does not
    return folder / "site"


def run(installed: Path, code: str) -> subprocess.CompletedProcess[str]:
    # Without site, so that the editable install's import hook is not there; its dependencies are.
    paths = [str(installed), sysconfig.get_path("purelib")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(command, cwd=installed.parent, capture_output=True, text=True, timeout=300)


def test_everything_is_inside(installed: Path) -> None:
    names = {str(p.relative_to(installed)) for p in installed.rglob("*") if p.is_file()}
    for name in ("libggml-tilebeam.so", "libtilebeam_npu.so", "libtilebeam_sampling.so", "tilebeam-npud"):
        assert f"tilebeam/lib/{name}" in names
    assert "tilebeam/lib/libtilebeam_ext.so" in names
    assert "tilebeam/py.typed" in names  # the types are for users, too
    assert {f"tilebeam/{folder}__init__.pyi" for folder in ("", "gguf/", "search/")} <= names  # read at run time, too
    pages = ROOT / "python/tilebeam/pages"
    parts = {str(p.relative_to(ROOT / "python")) for folder in ("parts", "vendor") for p in (pages / folder).iterdir()}
    assert {f"tilebeam/pages/vendor/LICENSE-{name}" for name in ("marked", "purify", "temml")} < parts
    assert parts <= names
    assert not [n for n in names if n.endswith((".cpp", ".c"))]
    listed = (installed / "tilebeam/lib/plugins.txt").read_text().split()
    assert listed[0] in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tilebeam"]["llama-cpp-python"]
    assert {f"tilebeam/lib/{name}" for name in listed[1::2]} <= names


def test_nothing_else_is_inside(installed: Path) -> None:
    """No tests, no benches, and none of the equipment that both use."""
    assert {p.name.split("-")[0] for p in installed.iterdir()} == {"tilebeam"}
    for equipment in ("synth", "metadata"):
        assert not (installed / "tilebeam/gguf" / f"{equipment}.py").exists()
    used = re.compile(r"^\s*(?:from|import) (?:bench|tests|gguf_tools|ggml_ext)\b", re.MULTILINE)
    assert not [p for p in installed.rglob("tilebeam/**/*.py") if used.search(p.read_text(encoding="utf-8"))]


def test_doctor_finds_nothing_wrong(installed: Path) -> None:
    done = run(installed, "from tilebeam.cli.main import main\nsys.argv = ['tilebeam', 'doctor']\nmain()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


def test_the_plugin_is_the_wheels_own(installed: Path) -> None:
    code = "import tilebeam, llama_cpp\ntilebeam.register()\nprint(llama_cpp.llama_supports_gpu_offload())\n"
    done = run(installed, code + "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'tilebeam' in line})")
    assert done.returncode == 0, done.stderr
    offload, libraries = done.stdout.splitlines()
    assert offload == "True"
    assert str(installed / "tilebeam/lib/libggml-tilebeam.so") in libraries.split()
