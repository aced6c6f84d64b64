"""--lora and --lora-scaled, the same in every command that loads a model to run it."""

from __future__ import annotations

import json
from pathlib import Path

import process_kit
import pytest
from tilebeam.cli.options import LoraOptions
from tilebeam.errors import TilebeamError

from bench.lib.adapters import write_adapter
from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", preset("tiny", n_layer=1))
    write_adapter(folder / "a.gguf", model, seed=1)
    (folder / "text.txt").write_text("the question is how many of the people said that there was one " * 40)
    return folder


def adapters(lora: list[str] | None, scaled: list[str] | None) -> list[tuple[str, float]]:
    return LoraOptions(lora=lora, lora_scaled=scaled).adapters()


def test_files_and_scales() -> None:
    assert adapters(None, None) == []
    assert adapters(["a.gguf"], None) == [("a.gguf", 1.0)]
    assert adapters(["a.gguf,b.gguf", "c.gguf"], ["d:e.gguf:-0.5,f.gguf:2"]) == [
        *((name, 1.0) for name in ("a.gguf", "b.gguf", "c.gguf")),
        ("d:e.gguf", -0.5),
        ("f.gguf", 2.0),
    ]
    assert adapters(['"a,b.gguf"'], ['"c,d.gguf:3"']) == [("a,b.gguf", 1.0), ("c,d.gguf", 3.0)]
    for wrong in ("a.gguf", "a.gguf:", ":1", "a.gguf:x", "a.gguf:1:"):
        with pytest.raises(TilebeamError, match="takes FILE:SCALE"):
            adapters(None, [wrong])


def test_generate(folder: Path) -> None:
    model, lora = folder / "model.gguf", folder / "a.gguf"

    def texts(*options: str | Path) -> list[str]:
        common = ("-m", model, "-p", "the question", "-n", "12", "--temp", "0", "-c", "256", "--json")
        done = process_kit.run("tilebeam", "generate", *common, *options)
        assert done.returncode == 0, done.stderr
        assert (str(lora) in done.stderr) == (len(options) > 0)
        return [output["text"] for output in json.loads(done.stdout)["outputs"]]

    plain, adapted = texts(), texts("--lora", lora)
    assert plain != adapted
    assert texts("--lora-scaled", f"{lora}:1") == adapted
    done = process_kit.run("tilebeam", "generate", "-m", model, "-p", "the", "--lora", folder / "none.gguf")
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_perplexity_measures_what_an_adapter_changes(folder: Path) -> None:
    model = folder / "model.gguf"
    common = ("-m", model, "-f", folder / "text.txt", "-c", "64", "--chunks", "2", "-b", "64", "--json")
    base = ("--kl-base", model, "--kl-base-device", "npu")
    found = []
    for options in ((), ("--lora", folder / "a.gguf")):
        done = process_kit.run("tilebeam", "perplexity", *common, *base, *options)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["figures"])
    same, adapted = (figures["kld"]["value"] for figures in found)
    assert same == 0  # the base has no adapter, and without one the model is the same
    assert adapted > 0.02
