"""What people bring along from other programs: llama.cpp's options, names of commands, tab completion, Ctrl-C; and that
sentences for the shell name its options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Ran, ok
from tilebeam.cli.commands import Command
from tilebeam.cli.console import as_options
from tilebeam.cli.main import app
from typer.main import get_command

from bench.lib import synth

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", synth.preset("tiny", n_layer=1))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("-fa", {"flash_attn": True}),
        ("-fa -n 3", {"flash_attn": True, "n_predict": 3}),
        ("-fa on -n 3", {"flash_attn": True, "n_predict": 3}),
        ("-n 3 -fa off --mlock", {"flash_attn": False, "n_predict": 3}),
        ("-ngl 99 --no-mmap", {"n_gpu_layers": 99}),
        ("--numa distribute -n 3", {"n_predict": 3}),
        ("--numa=numactl -n 3", {"n_predict": 3}),
        ("-cnv", {"chat": True}),
        ("-no-cnv", {"chat": False}),
        ("--stop --mlock", {"stop": ["--mlock"]}),
        ("-n 3 -n 4", {"n_predict": 4}),
        ("--device tilebeam", {"device": "tilebeam"}),
        ("--device npu", {"device": "npu"}),
        ("-hf a/b -hff c", {"hf_repo": ["a/b"], "hf_file": "c", "model": None}),
    ],
)
def test_options_of_llama_cpp(typed: str, meant: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*(["-m", "x.gguf"] if "-hf" not in typed else []), "-p", "hi", *typed.split()]
    params = COMMANDS["generate"].make_context("generate", words).params
    assert {name: params[name] for name in meant} == meant
    said = capsys.readouterr().err
    assert ("ignored: --" in said) == ("map" in typed or "numa" in typed or typed.endswith("off --mlock"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate -m x -p hi -i", "No such option: -i: `tilebeam chat` converses."),
        ("vote -m x -mu http://x", "No such option: -mu: download the file"),
        ("eval -m x --task jsonl:x -ngl 99", "No such option: -ngl: --device says where"),
        ("eval", "Missing option '-m' and '--task'."),
        ("serve", "Missing option -m (a GGUF file) or -hf"),
        ("generate -m x -p hi --numa isolate", "No such option: --numa: distribute or numactl; in place of isolate"),
        ("generate -m x -p hi --numa", "No such option: --numa: distribute or numactl"),
        ("generat", "Did you mean 'generate'"),
    ],
)
def test_what_is_not_taken_is_named(words: str, said: str) -> None:
    ran = Ran(*words.split())
    assert ran.code == 2
    assert said in " ".join(ran.err.split())


def test_status_lines_say_what_is_true_of_the_machine(model: Path) -> None:
    run = ("-n", 2, "-t", 2)
    ran = ok("generate", "-m", model, "-p", "the", *run, "-c", 1, "-fa", "off", "-ngl", 99)
    (about,) = [line for line in ran.err.splitlines() if "slot" in line]
    assert ", tilebeam: 2 threads, " in about
    assert about.endswith(", 256 cells, 1 slot")
    assert "npu" not in about.lower()
    assert "-c 1: a context has at least 256 cells" in ran.err
    assert (
        ", cpu (stock): 2 threads, 4096 cells" in ok("generate", "-m", model, "-p", "the", *run, "--device", "cpu").err
    )
    rows = ok("bench", "-m", model, "-p", 8, "-n", 0, "-r", 1, "--device", "cpu,tilebeam").out
    assert [line.split("|")[4].strip() for line in rows.splitlines() if "pp8" in line] == ["cpu", "tilebeam"]
    with_json = json.loads(ok("generate", "-m", model, "-p", "the", *run, "--device", "tilebeam", "--json").out)
    assert with_json["device"] == "npu"


@pytest.mark.parametrize(
    ("size", "n_params", "described"),
    [
        ("0.5B", 630_000_000, "0.5B"),
        (None, 630_167_424, "630M"),
        (None, 1_543_714_304, "1.5B"),
        ("big\n", 3_140_000, "3.1M"),
    ],
)
def test_a_models_size_is_the_one_that_its_file_tells(
    monkeypatch: pytest.MonkeyPatch, size: str | None, n_params: int, described: str
) -> None:
    from tilebeam.native import llama

    def put(text: str) -> Any:
        return lambda _, *rest: setattr(rest[-2], "value", text.encode())

    monkeypatch.setattr(llama.C, "llama_model_desc", put("qwen2 1B Q4_K - Medium"))
    monkeypatch.setattr(llama.C, "llama_model_meta_val_str", put(size or ""))
    one = object.__new__(llama.Model)
    one.pointer, one.n_params = None, n_params
    assert one.description() == f"qwen2 {described} Q4_K_M"


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        ("tilebeam be", {"best-of-n", "beam", "bench"}, {"vote"}),
        ("tilebeam vote --extr", {"--extract"}, {"--file"}),
        ("tilebeam generate --device ", {"tilebeam", "cpu", "auto"}, set()),
        ("tilebeam reward tr", {"train"}, {"test"}),
    ],
)
def test_bash_completes(words: str, offered: set[str], not_offered: set[str]) -> None:
    env = os.environ | {"_TILEBEAM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(["tilebeam"], executable=_script(), env=env, capture_output=True, text=True, check=False)
    assert offered <= set(done.stdout.split())
    assert not not_offered & set(done.stdout.split())


def _script() -> Path:
    return Path(sys.executable).with_name("tilebeam")


def test_bash_is_told_how() -> None:
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    told = subprocess.run([_script(), "--show-completion", "bash"], env=env, capture_output=True, text=True, check=True)
    assert "_TILEBEAM_COMPLETE=complete_bash" in told.stdout
    subprocess.run(["bash", "-n"], input=told.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("library", "shell"),
    [
        ('use device="tilebeam", or unpack it', "use --device tilebeam, or unpack it"),
        ("file exists; overwrite=True replaces it", "file exists; --force replaces it"),
        ("need n_gpu_layers=-1: all layers", "need -ngl -1: all layers"),
        ("n_ctx (256) is less than max_tokens", "-c (256) is less than -n"),
        ("the device overwrite said", "the device overwrite said"),
        ("n_ctx_train, my.n_ctx, x-n_ctx", "n_ctx_train, my.n_ctx, x-n_ctx"),
    ],
)
def test_sentences_for_the_shell_name_its_options(library: str, shell: str) -> None:
    assert as_options(library) == shell


def test_safetensors_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    Ran("generate", "-m", tmp_path / "model.safetensors", "-p", "x").fails_with("convert_hf_to_gguf.py")


def test_help_begins_with_what_matters() -> None:
    """Of large commands eight options, among them the model and the prompts or the task; all others behind them."""
    for name, must in {
        "vote": ["-m", "-hf", "-p", "-f", "--budget", "-n"],
        "eval": ["--task"],
        "serve": ["--port"],
    }.items():
        lines = ok(name, "--help").out.splitlines()
        start = lines.index("Options:")
        shown = [line.split()[0].strip(",") for line in lines[start + 1 : lines.index("", start)] if line[2] == "-"]
        first = [p for flag in shown for p in COMMANDS[name].params if flag in p.opts]
        assert len(first) == 8
        assert {flag for p in first for flag in p.opts} >= {"-m", "-hf", *must}
        assert "Further options:" in lines
    program = ok("--help").out
    headings = ["Ask a model:", "Search for a better answer:", "Serve:", "Measure:", "Models and files:"]
    assert [line for line in program.splitlines() if line in headings] == headings
    assert all(
        flag in {f for c in COMMANDS.values() for p in c.params for f in p.opts} | {"--system"}
        for flag in Command.first
    )
