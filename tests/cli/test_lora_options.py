"""--lora and --lora-scaled, the same in every command that loads a model to run it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import process_kit
import pytest
from tilebeam.cli.main import app
from tilebeam.cli.options import LoraOptions
from tilebeam.errors import TilebeamError
from typer.testing import CliRunner

from bench.lib.adapters import write_adapter
from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", preset("tiny", n_layer=1))
    write_adapter(folder / "a.gguf", model, seed=1)
    (folder / "text.txt").write_text("the question is how many of the people said that there was one " * 40)
    return folder


@pytest.mark.parametrize(
    "command", ["generate", "best-of-n", "vote", "beam", "dvts", "adaptive", "bench", "perplexity", "serve", "trace"]
)
def test_every_command_that_runs_a_model_has_them(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).output
    assert "--lora " in text
    assert "--lora-scaled " in text


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


def test_bench(folder: Path) -> None:
    small = ("-p", "8", "-n", "0", "-r", "1", "--no-warmup", "-o", "csv")
    done = process_kit.run("tilebeam", "bench", "-m", folder / "model.gguf", *small, "--lora", folder / "a.gguf")
    assert done.returncode == 0, done.stderr
    assert len(list(csv.DictReader(io.StringIO(done.stdout)))) == 2
    done = process_kit.run("tilebeam", "bench", "-m", folder / "model.gguf", *small, "--lora", folder / "text.txt")
    assert done.returncode == 1
    assert "text.txt is not a GGUF" in done.stderr


@pytest.mark.parametrize("command", ["serve", "vote", "trace"])
def test_an_adapter_that_cannot_be_applied_is_named(folder: Path, tmp_path: Path, command: str) -> None:
    options = {"serve": ("--port", "0"), "vote": ("-p", "the", "-N", "2"), "trace": ("-o", tmp_path / "t.json")}
    done = process_kit.run("tilebeam", command, "-m", folder / "model.gguf", *options[command], "--lora", "none.gguf")
    assert done.returncode == 1
    assert "tilebeam: The LoRA adapter none.gguf does not exist." in done.stderr
