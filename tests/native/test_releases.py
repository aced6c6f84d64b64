"""The plugin for the llama-cpp-python that is installed: found, or refused with a sentence that says why."""

from __future__ import annotations

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
from tilebeam.native import releases

from bench.lib.synth import preset, write_model

OTHER = "0.3.99"


def test_the_plugin_of_the_installed_release() -> None:
    there = releases.built()
    assert releases.plugin_file() == there[releases.release_of(releases.installed())]
    assert all(file.is_file() for file in there.values())


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
    environment = process_kit.environment()
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
    for version in ("0.3.35", "0.3.35+cpu", "0.3.9"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        with pytest.raises(TilebeamError, match=r"m\.gguf has the architecture gemma-embedding.*>0\.3\.35'"):
            releases.check_architecture("m.gguf", "gemma-embedding")
    for version in (f"{OTHER}+cpu", "0.4"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        releases.check_architecture("m.gguf", "gemma-embedding")


def test_a_release_that_no_plugin_came_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: f"{OTHER}+cpu")
    newest = max(releases.built(), key=releases.order)
    with pytest.raises(TilebeamError, match=rf"is {OTHER}, and .*=={newest}, or .*TILEBEAM_RELEASE={OTHER}\."):
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
