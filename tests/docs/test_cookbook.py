"""The programs of docs/cookbook run on small random models, and docs/cookbook.md shows them as they are."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tilebeam
from encoder_kit import ENCODERS, write_encoder
from gguf_kit import with_metadata
from tilebeam.gguf import gguf_write as w
from tilebeam.scoring.own_reward import maker_of
from tilebeam.scoring.reward_heads import Head, save_head

from bench.lib.synth import preset, write_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "docs" / "cookbook").glob("*.py"))
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.gguf with a chat template, prm.gguf, head.gguf, embed.gguf, rerank.gguf."""
    folder = tmp_path_factory.mktemp("cookbook")
    base = write_model(folder / "base.gguf", preset("tiny", type="q8_0", n_layer=2))
    key = "tokenizer.chat_template"
    model = with_metadata(base, folder / "model.gguf", {key: w.kv_text(key, TEMPLATE)})
    reward = {"reward.kind": "token", "reward.tag": " ?", "reward.good": "1", "reward.bad": "2"}
    with_metadata(base, folder / "prm.gguf", {k: w.kv_text(k, v) for k, v in reward.items()})
    with tilebeam.load(model, "cpu", n_ctx=256, threads=1) as lm:
        weight = np.random.default_rng(1).normal(0, 0.1, (1, lm.n_embd)).astype(np.float32)
        save_head(
            folder / "head.gguf", Head(((weight, np.zeros(1, np.float32)),), features=("mean",), maker=maker_of(lm))
        )
    for name, kind in (("embed", "bert-mean"), ("rerank", "bert-rank")):
        write_encoder(folder / f"{name}.gguf", next(e for e in ENCODERS if e.name == kind))
    return folder


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program in this process; gives what it printed."""

    def run(name: str, *files: str, said: str = "") -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [name, *files])
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        runpy.run_path(str(ROOT / "docs" / "cookbook" / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_conversation(run: Run) -> None:
    assert run("chat", "model.gguf", said="hello\nand again\n\n").count("> ") >= 3  # and those of random texts


def test_a_batch_goes_on_where_it_stopped(run: Run, folder: Path) -> None:
    items = [{"id": i, "question": f"how many {i}"} for i in range(5)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "out.jsonl").write_text('{"id": 3, "answer": "known"}\n')
    assert run("batch", "model.gguf", "questions.jsonl", "out.jsonl").count("tokens") == 4
    written = [json.loads(line) for line in (folder / "out.jsonl").open()]
    assert sorted(item["id"] for item in written) == [0, 1, 2, 3, 4]
    assert run("batch", "model.gguf", "questions.jsonl", "out.jsonl") == ""


def test_a_function_is_called(run: Run) -> None:
    told = run("tools", "model.gguf")
    assert re.match(r'forecast \{ ?"city":.*"days": ?[1-7] ?\} -> .*: rain for [1-7] days', told, re.DOTALL), told


def test_json_and_a_label(run: Run) -> None:
    found = run("json_schema", "model.gguf").splitlines()
    assert re.fullmatch(r"\{'name': .+, 'year': \d{1,4}, 'kind': '(person|place|event)'\}", found[0])
    assert found[1] in ("war", "peace")


def test_a_vote(run: Run) -> None:
    assert "answer:" in run("vote", "model.gguf")


def test_code(run: Run) -> None:
    assert re.search(r"that each passes:( 0\.0){8}\n", run("code_examples", "model.gguf"))


def test_the_best_of_n(run: Run) -> None:
    found = run("best_of_n", "model.gguf", "head.gguf")
    assert len(re.findall(r"0\.\d\d", found.partition("scores:")[2])) == 16
    assert "rate them: 0" in found


def test_a_beam(run: Run) -> None:
    assert re.search(r"\d+ beginnings dropped, [1-9]\d* tokens rated", run("beam", "model.gguf", "prm.gguf"))


def test_retrieval(run: Run) -> None:
    assert run("retrieve", "embed.gguf", "rerank.gguf").count("\n") == 4
    assert run("retrieve", "model.gguf").count("\n") == 3


def test_streams(run: Run) -> None:
    found = run("streams", "model.gguf")
    assert {f"[{i}]" for i in range(3)} <= set(re.findall(r"\[\d\]", found))
    assert found.count("\n---\n") == 2


def test_guesses(run: Run) -> None:
    for draft in ((), ("base.gguf",)):
        assert re.search(r"\d+ tokens, \d+ of \d+ guesses were right", run("guess_ahead", "model.gguf", *draft))


def test_choices(run: Run) -> None:
    assert run("choices", "model.gguf").count("\n") == 7


@pytest.mark.parametrize("program", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_the_page_shows_each_program(program: Path) -> None:
    code = program.read_text(encoding="utf-8")
    page = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    assert f"(`docs/cookbook/{program.name}`)\n\n```python\n{code}```\n" in page
    assert code.count("\n") <= 30
    assert f'run("{program.stem}"' in Path(__file__).read_text(encoding="utf-8")
