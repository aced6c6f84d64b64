"""The plugin for the llama-cpp-python that is installed: found, built on first use and kept, or refused with a sentence
that says why."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import llama_cpp
import process_kit
import pytest
from tilebeam.errors import TilebeamError
from tilebeam.native import paths, releases

from bench.lib.synth import preset, write_model

OTHER = "0.3.99"
SCRIPT = Path("backend/cmake/ggml_source.py")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A release that no plugin came for, and a cache with its source alone."""
    monkeypatch.setattr(metadata, "version", lambda _: OTHER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source(tmp_path).mkdir(parents=True)
    return tmp_path


def source(folder: Path) -> Path:
    """Where that release's source lies."""
    return folder / "cache" / "tilebeam" / "plugins" / "ggml-source" / f"llama_cpp_python-{OTHER}" / "vendor"


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_plugin_of_the_installed_release() -> None:
    there = releases.built()
    assert releases.plugin_file() == there[releases.release_of(releases.installed())]
    assert all(file.is_file() for file in there.values())


def test_versions_are_ordered_as_pep_440_has_it() -> None:
    """What `pip` and `packaging` take them for; the installed one may be of any form."""
    order = ["0.9.9", "0.9.36.dev1", "0.9.36a2", "0.9.36b1", "0.9.36rc1.dev2", "0.9.36rc1", "0.9.36rc2", "0.9.36"]
    order += ["0.9.36.post0.dev1", "0.9.36.post0", "0.9.36.post1", "0.9.37", "0.10", "1!0.1"]
    assert all(releases.order(a) < releases.order(b) for a, b in itertools.pairwise(order))
    for same in ("0.9.36+cpu", "0.9.36.0", "0.9.36+cu124.1"):
        assert releases.order(same) == releases.order("0.9.36")
    assert releases.order("unknown") < releases.order("0.1")


READ = """
import sys, tilebeam
from tilebeam.native import releases
print(releases.installed(), tilebeam.register().device_names())
with tilebeam.load(sys.argv[1], "npu", n_ctx=256, threads=1, lookup=False) as lm:
    print(lm.generate("the question", max_tokens=8, temperature=0)[0].outputs[0].token_ids)
"""


def test_a_local_label_is_of_the_same_release(tmp_path: Path) -> None:
    """As prebuilt wheels have one: the plugin of the release is taken, and finds that ggml is the one of its commit."""
    own = releases.release_of(releases.installed())
    about = tmp_path / "site" / f"llama_cpp_python-{own}+cpu.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {own}+cpu\n")
    (tmp_path / "site" / "llama_cpp").symlink_to(Path(llama_cpp.__file__).parent)
    model = write_model(tmp_path / "tiny.gguf", preset("tiny", type="q8_0"))
    environment = process_kit.environment(TILEBEAM_BUILD_PLUGIN="0")
    labelled = environment | {"PYTHONPATH": f"{tmp_path / 'site'}:{environment['PYTHONPATH']}"}
    said = []
    for variables in (labelled, environment):
        command = [sys.executable, "-c", READ, str(model)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines())
    assert said[0][0] == f"{own}+cpu ['HMX0']"
    assert said[0][1:] == said[1][1:] != []


def test_no_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(TilebeamError, match="not installed: pip install llama-cpp-python=="):
        releases.installed()


def test_a_model_that_a_release_aborts_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    releases.check_architecture("m.gguf", "qwen2")
    monkeypatch.setattr(metadata, "version", lambda _: "0.3.35")
    releases.check_architecture("m.gguf", "qwen2")
    for version in ("0.3.35", "0.3.35+cpu", "0.3.35rc1"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        with pytest.raises(TilebeamError, match=r"m\.gguf has the architecture gemma-embedding.*>0\.3\.35'"):
            releases.check_architecture("m.gguf", "gemma-embedding")
    for version in (f"{OTHER}+cpu", f"{OTHER}rc1", "0.4"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        releases.check_architecture("m.gguf", "gemma-embedding")


def refusal() -> str:
    """What is said where there is no plugin."""
    with pytest.raises(TilebeamError) as caught:
        releases.plugin_file()
    return str(caught.value)


def test_what_a_build_lacks_is_said(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = sorted(releases.built(), key=releases.order)
    advice = (
        f"llama-cpp-python is {OTHER}, and Tilebeam has its plugin for {', '.join(there)}: "
        f"pip install llama-cpp-python=={there[-1]}. To build the plugin for {OTHER}, "
    )
    monkeypatch.setenv("TILEBEAM_BUILD_PLUGIN", "0")
    assert refusal() == f"{advice}unset TILEBEAM_BUILD_PLUGIN, which is 0."
    monkeypatch.delenv("TILEBEAM_BUILD_PLUGIN")
    for name in ("CC", "CXX", "CMAKE_GENERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert refusal() == f"{advice}install cmake, a C compiler, a C++ compiler, make."
    for name in ("cmake", "gcc", "clang++"):
        program(other / "bin", name, "")
    assert refusal() == f"{advice}install make."
    program(other / "bin", "ninja", "")
    source(other).rmdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert refusal() == f"{advice}install pip."
    monkeypatch.setattr(paths, "SOURCE", other)
    monkeypatch.setattr(paths, "PACKAGE", other)
    assert refusal() == f"{advice}use a checkout of Tilebeam (make)."


def test_a_source_that_cannot_be_fetched_is_a_sentence(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: pip's own lines are many."""
    make_plugins(other, monkeypatch, paths.native(releases.PLUGIN))
    source(other).rmdir()
    folder = source(other).parent.parent
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert refusal() == (
        f"The plugin for llama-cpp-python {OTHER} could not be built: cannot fetch the source of llama-cpp-python "
        f"{OTHER}: pip reaches no package index: connect this machine to a network, or unpack "
        f"llama_cpp_python-{OTHER}.tar.gz in {folder}"
    )
    assert not (other / "log").exists()


def test_a_python_without_pip_is_told_so(tmp_path: Path) -> None:
    """As `uv venv` makes them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    command = [python, paths.SOURCE / SCRIPT, "--release", OTHER, "--cache", tmp_path / "cache"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"tilebeam: cannot fetch the source of llama-cpp-python {OTHER}: Python ({python}) has no pip: install it, or "
        f"unpack llama_cpp_python-{OTHER}.tar.gz in {tmp_path / 'cache'}\n"
    )


def make_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    """A CMake that writes down how it is called, and "builds" a copy of a file. Nothing is compiled here; that
    tests/releases/run.py does."""
    copy = f'[ "$1" = --build ] && mkdir -p "$2/lib" && cp "{made}" "$2/lib/{releases.PLUGIN}"'
    program(folder / "bin", "cmake", f'echo "$@" >> "{folder}/log"\n{copy}\nexit 0')
    program(folder / "bin", "c++", "")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def test_a_build_is_made_once_and_kept(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = paths.native(releases.PLUGIN)
    make_plugins(other, monkeypatch, real)
    first = releases.plugin_file()
    assert first.read_bytes() == real.read_bytes()
    assert first.is_relative_to(other / "cache" / "tilebeam" / "plugins" / OTHER)
    assert releases.plugin_file() == first
    calls = (other / "log").read_text().splitlines()
    assert len(calls) == 2
    assert f"-DTILEBEAM_RELEASE={OTHER}" in calls[0]
    assert str(paths.SOURCE) in calls[0]
    assert sorted(f.name for f in first.parent.iterdir()) == [first.name, "lock"]


def test_other_sources_are_built_anew(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update: a plugin that was built before does not hide a mended one."""
    make_plugins(other, monkeypatch, paths.native(releases.PLUGIN))
    sources = other / "checkout"
    (sources / "backend" / "plugin").mkdir(parents=True)
    (sources / "backend" / "CMakeLists.txt").write_text("1")
    (sources / "backend" / "plugin" / "lower.cpp").write_text("old")
    monkeypatch.setattr(paths, "SOURCE", sources)
    first = releases.plugin_file()
    (sources / "backend" / "plugin" / "lower.cpp").write_text("new")
    assert releases.plugin_file() != first
    assert len((other / "log").read_text().splitlines()) == 4


def test_a_plugin_of_other_sources_than_the_rest_is_refused(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (other / "made").write_text("a plugin without this build's number")
    make_plugins(other, monkeypatch, other / "made")
    assert refusal() == (
        f"The sources in {paths.SOURCE} are not those that Tilebeam was built from: build it anew (make)."
    )
    assert not list((other / "cache").rglob("*.so"))


def test_a_build_that_fails_says_why_and_leaves_nothing(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(other / "bin", "cmake", "echo there is no such release; exit 1")
    program(other / "bin", "c++", "")
    monkeypatch.setenv("PATH", f"{other / 'bin'}:/usr/bin:/bin")
    assert refusal() == (
        f"The plugin for llama-cpp-python {OTHER} could not be built (cmake):\nthere is no such release"
    )
    assert [f.name for f in (other / "cache").rglob("*") if f.is_file()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_a_sentence(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugins(other, monkeypatch, other / "nothing")
    shutil.rmtree(other / "cache")
    (other / "cache").write_text("a file")
    folder = other / "cache" / "tilebeam" / "plugins" / OTHER
    assert refusal() == (
        f"The plugin for llama-cpp-python {OTHER} cannot be kept: [Errno 20] Not a directory: '{folder}'. "
        "XDG_CACHE_HOME names another folder."
    )


CHANGED = {  # functions of another ggml, and what the plugin then says
    "void ggml_set_name(void * t, const char * n) {}": "struct ggml_tensor",
    "unsigned long ggml_backend_buffer_get_size(void * b) { return 1; }": "struct ggml_backend_buffer",
    "unsigned long ggml_backend_buft_get_alignment(void * b) { return 3; }": "struct ggml_backend_buffer_type_i",
    "int ggml_backend_dev_type(void * d) { return 77; }": "struct ggml_backend_device_i",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("code", CHANGED, ids=CHANGED.values())
def test_each_struct_and_vtable_is_tried(code: str, tmp_path: Path) -> None:
    """In a ggml one of whose functions does something else than the plugin's headers say."""
    (tmp_path / "f.c").write_text(code)
    library = tmp_path / "f.so"
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, tmp_path / "f.c"], check=True)
    said = loaded(releases.plugin_file(), LD_PRELOAD=str(library))
    assert f"is not the one of its commit: {CHANGED[code]} differs" in said


def loaded(plugin: Path, **environment: str) -> str:
    """What is said when ggml loads a plugin, which it must refuse."""
    code = (
        "import ctypes, sys, llama_cpp; lib = ctypes.CDLL('libggml.so.0');"
        "lib.ggml_backend_load.restype = ctypes.c_void_p; lib.ggml_backend_load.argtypes = [ctypes.c_char_p];"
        "print(lib.ggml_backend_load(sys.argv[1].encode()))"
    )
    command = [sys.executable, "-c", code, str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.stdout.split() == ["None"], done.stderr
    return done.stderr


def test_ggml_that_was_changed_after_its_commit_is_refused(tmp_path: Path) -> None:
    """A plugin that asks for an op by another number than its headers', as if ggml had been changed."""
    image = releases.plugin_file().read_bytes()
    assert image.count(b"FLASH_ATTN_EXT\0") == 1
    copy = tmp_path / releases.PLUGIN
    copy.write_bytes(image.replace(b"FLASH_ATTN_EXT\0", b"FLASH_ATTN_OLD\0"))
    assert "is not the one of its commit: enum ggml_op differs" in loaded(copy)
