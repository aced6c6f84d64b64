"""The plugin for the llama-cpp-python that is installed: found, built on first use and kept, or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from tilebeam.errors import TilebeamError
from tilebeam.native import paths, releases

OTHER = "0.3.99"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A release that no plugin came for, and an empty cache."""
    monkeypatch.setattr(metadata, "version", lambda _: OTHER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_plugin_of_the_installed_release() -> None:
    there = releases.built()
    assert releases.plugin_file() == there[releases.installed()]
    assert all(file.is_file() for file in there.values())


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
    with pytest.raises(TilebeamError, match=r"m\.gguf has the architecture gemma-embedding.*>0\.3\.35'"):
        releases.check_architecture("m.gguf", "gemma-embedding")


def test_what_a_build_lacks_is_said(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = f"llama-cpp-python is {OTHER}, and Tilebeam has its plugin for .*: pip install llama-cpp-python=="
    monkeypatch.setenv("TILEBEAM_BUILD_PLUGIN", "0")
    with pytest.raises(TilebeamError, match=advice + ".*unset TILEBEAM_BUILD_PLUGIN"):
        releases.plugin_file()
    monkeypatch.delenv("TILEBEAM_BUILD_PLUGIN")
    monkeypatch.setenv("PATH", str(other))
    with pytest.raises(TilebeamError, match=advice + r".*install cmake and c\+\+"):
        releases.plugin_file()
    monkeypatch.setattr(paths, "SOURCE", other)
    monkeypatch.setattr(paths, "PACKAGE", other)
    with pytest.raises(TilebeamError, match=advice + ".*use a checkout of Tilebeam"):
        releases.plugin_file()


def make_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    """A CMake that writes down how it is called, and "builds" a copy of a file."""
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
    with pytest.raises(TilebeamError, match="not those that Tilebeam was built from"):
        releases.plugin_file()
    assert not list((other / "cache").rglob("*.so"))


def test_a_build_that_fails_says_why_and_leaves_nothing(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(other / "bin", "cmake", "echo there is no such release; exit 1")
    program(other / "bin", "c++", "")
    monkeypatch.setenv("PATH", f"{other / 'bin'}:/usr/bin:/bin")
    with pytest.raises(TilebeamError, match=rf"{OTHER} could not be built \(cmake\):\nthere is no such release"):
        releases.plugin_file()
    assert [f.name for f in (other / "cache").rglob("*") if f.is_file()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_a_sentence(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plugins(other, monkeypatch, other / "nothing")
    (other / "cache").write_text("a file")
    with pytest.raises(TilebeamError, match=r"cannot be kept: .*XDG_CACHE_HOME names another folder"):
        releases.plugin_file()


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
