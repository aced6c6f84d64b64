"""The plugin for the llama-cpp-python that is installed: found, built on first use and kept, or refused."""

from __future__ import annotations

import ctypes
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
    with pytest.raises(TilebeamError, match=advice + ".*install Tilebeam from its sources"):
        releases.plugin_file()


def test_a_build_is_made_once_and_kept(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CMake that writes down how it is called and makes a file."""
    make = '[ "$1" = --build ] && mkdir -p "$2/lib" && echo made > "$2/lib/libggml-tilebeam.so"'
    program(other / "bin", "cmake", f'echo "$@" >> "$LOG"\n{make}\nexit 0')
    program(other / "bin", "c++", "")
    monkeypatch.setenv("PATH", f"{other / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("LOG", str(other / "log"))
    first = releases.plugin_file()
    assert first.read_text() == "made\n"
    assert first.is_relative_to(other / "cache" / "tilebeam" / "plugins")
    assert releases.plugin_file() == first
    calls = (other / "log").read_text().splitlines()
    assert len(calls) == 2
    assert f"-DTILEBEAM_RELEASE={OTHER}" in calls[0]
    assert str(paths.SOURCE) in calls[0]
    assert [f.name for f in first.parent.iterdir() if f.name != "lock"] == [first.name]


def test_a_build_that_fails_says_why_and_leaves_nothing(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(other / "bin", "cmake", "echo there is no such release; exit 1")
    program(other / "bin", "c++", "")
    monkeypatch.setenv("PATH", f"{other / 'bin'}:/usr/bin:/bin")
    with pytest.raises(TilebeamError, match=rf"{OTHER} could not be built \(cmake\):\nthere is no such release"):
        releases.plugin_file()
    assert not list((other / "cache").rglob(releases.PLUGIN))


def test_ggml_that_was_changed_after_its_commit_is_refused(tmp_path: Path) -> None:
    """A plugin that asks for an op by another number than its headers', as if ggml had been changed."""
    image = releases.plugin_file().read_bytes()
    assert image.count(b"FLASH_ATTN_EXT\0") == 1
    copy = tmp_path / releases.PLUGIN
    copy.write_bytes(image.replace(b"FLASH_ATTN_EXT\0", b"FLASH_ATTN_OLD\0"))
    code = (
        "import ctypes, sys, llama_cpp; lib = ctypes.CDLL('libggml.so.0');"
        "lib.ggml_backend_load.restype = ctypes.c_void_p; lib.ggml_backend_load.argtypes = [ctypes.c_char_p];"
        "print(lib.ggml_backend_load(sys.argv[1].encode()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True)
    assert done.stdout.split() == ["None"]
    assert "is not the one of its commit: enum ggml_op differs" in done.stderr
    assert ctypes.CDLL(str(releases.plugin_file()))
