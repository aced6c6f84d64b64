"""The plugin for the llama-cpp-python that is installed: found, or refused with a sentence that says why."""

from __future__ import annotations

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


WITHOUT = """
import sys
from importlib import metadata
import tilebeam

def missing(name):
    raise metadata.PackageNotFoundError(name)

metadata.version, sys.modules["llama_cpp"] = missing, None
try:
    tilebeam.load(sys.argv[1], "cpu")
except tilebeam.TilebeamError as error:
    print(error)
"""


def test_a_load_without_llama_cpp_python_says_so(tmp_path: Path) -> None:
    done = process_kit.python(WITHOUT, write_model(tmp_path / "tiny.gguf", preset("tiny", type="q8_0")))
    assert "llama-cpp-python is not installed: pip install" in done.stdout, done.stderr


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
