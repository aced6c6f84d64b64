"""--lora and --lora-scaled, the same in every command that loads a model to run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Ran, ok
from lora_kit import write_adapter
from tilebeam.cli.options import LoraOptions
from tilebeam.errors import TilebeamError

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", preset("tiny", n_layer=1))
    write_adapter(folder / "a.gguf", model, seed=1)
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
    common = ("generate", "-m", model, "-p", "the question", "-n", 12, "--temp", 0, "-c", 256)

    def texts(*options: str | Path) -> list[str]:
        done = ok(*common, "--json", *options)
        assert (str(lora) in done.err) == (len(options) > 0)
        return [output["text"] for output in json.loads(done.out)["outputs"]]

    plain, adapted = texts(), texts("--lora", lora)
    assert plain != adapted
    assert texts("--lora-scaled", f"{lora}:1") == adapted
    Ran(*common, "--lora", folder / "none.gguf").fails_with("none.gguf does not exist")
