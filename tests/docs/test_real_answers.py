"""What the programs of README and cookbook answer with real instruct models, where those are at hand: `make model`
fetches the 0.5B, `python -m bench.real.sources 1.5B` the other. Questions have answers that both models can find."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tilebeam
from tilebeam.answers.code import program_of, question_of
from tilebeam.sandbox import Test, run_tests

from bench.real.sources import FILES, MODELS

ROOT = Path(__file__).resolve().parents[2]
HEADS = ROOT / "bench" / "real" / "heads"
Run = Callable[..., str]

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(params=list(MODELS))
def run(
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Run:
    """Runs a program with model.gguf and its head.gguf beside it; gives what it printed."""
    name = request.param
    if not (file := FILES / MODELS[name].file).exists():
        pytest.skip(f"not fetched: python -m bench.real.sources {name}")
    (tmp_path / "model.gguf").symlink_to(file)
    (tmp_path / "head.gguf").symlink_to(HEADS / f"{name}.gguf")

    def run(program: Path | str, *files: str, said: str = "") -> str:
        path = ROOT / "docs" / "cookbook" / f"{program}.py" if isinstance(program, str) else program
        # A process of its own: programs need not close their models.
        command = [sys.executable, str(path), "model.gguf", *files]
        done = subprocess.run(command, cwd=tmp_path, input=said, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_readme_elects_what_is_right(run: Run, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(example)
    answer, _, best = run(program).partition("\n")
    assert answer.startswith("3 {'3': ")
    assert tilebeam.last_number(best) == "3"


def test_a_vote(run: Run) -> None:
    assert "\nanswer: 72\n" in run("vote")


def test_the_best_by_the_head(run: Run) -> None:
    assert tilebeam.last_number(run("best_of_n", "head.gguf").partition("scores:")[0]) == "3"


def test_a_program_that_passes_its_examples(run: Run) -> None:
    text, _, shares = run("code_examples").partition("share of the examples")
    assert "1.0" in shares
    question = question_of('def roman(n: int) -> str:\n    """Roman."""\n')
    assert question is not None
    assert run_tests(program_of(question, text), "roman", [Test("assert roman(1994) == 'MCMXCIV'")]).passed == (True,)


def test_facts_and_a_label(run: Run) -> None:
    facts, label = run("json_schema").splitlines()
    assert "'name': 'Battle of Hastings'" in facts
    assert "'year': 1066, 'kind': 'event'" in facts
    assert label == "war"


def test_choices(run: Run) -> None:
    shown = run("choices").splitlines()
    assert shown[0] == "The capital of France is Paris"
    assert "Water boils at a temperature of 100 degrees Celsius" in shown


def test_a_function_a_passage_a_conversation_and_a_file(run: Run, tmp_path: Path) -> None:
    assert run("tools").startswith('forecast {"city": "Bern"')
    assert run("retrieve").splitlines()[1] == "  A kitten sleeps up to twenty hours a day."
    assert "Paris" in run("chat", said="What is the capital of France?\n\n")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"id": 1, "question": "What is 7 times 8?"}) + "\n")
    run("batch", "questions.jsonl", "out.jsonl")
    assert "56" in json.loads((tmp_path / "out.jsonl").read_text())["answer"]
    assert re.search(r"def area\(width: \w+, height: \w+\)", run("guess_ahead"))
