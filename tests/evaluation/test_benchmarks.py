"""Tasks of known data sets in their original lines: prompts with and without a chat template, examples, verdicts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from eval_kit import lines
from tilebeam import CompletionOutput, Prompt, TilebeamError
from tilebeam.cli.main import app
from tilebeam.evaluation.config import ModelFile, Setting
from tilebeam.evaluation.named_scorers import check_scorer, modelless_scorer
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import KINDS, open_task
from tilebeam.evaluation.worker import EvalJob
from tilebeam.sandbox import child
from typer.testing import CliRunner

DUCKS = {
    "question": "Janet has 16 ducks and sells 7. How many are left? ",
    "answer": "She has 16 - 7 = <<16-7=9>>9 ducks.\n#### 9",
}
HOUSE = {"question": "A house costs $80,000 and a car 1,200. Both?", "answer": "80,000 + 1,200\n#### 81,200"}
TRAIN = [{"question": f"{i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"} for i in range(12)]

POINT = {
    "problem": "Convert $(0,3)$ to polar coordinates.",
    "solution": r"We have $r = 3.$ Therefore, it is $\boxed{\left( 3, \frac{\pi}{2} \right)}.$",
    "answer": r"\left( 3, \frac{\pi}{2} \right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
HALF = {"problem": "Halve 1.", "solution": r"It is $\boxed{\frac12}$.", "level": "Level 1", "type": "Algebra"}

ADDING = {
    "task_id": "HumanEval/900",
    "prompt": "from typing import List\n\n\n"
    "def total(x: List[int]) -> int:\n    '''Add.\n    >>> total([1, 2])\n    3\n    '''\n",
    "entry_point": "total",
    "canonical_solution": "    return sum(x)\n",
    "test": "def check(candidate):\n    assert candidate([]) == 0\n    assert candidate([2, 3]) == 5\n",
}


class Marks:
    """A model whose chat template shows who said what."""

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return Prompt("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")


class Base:
    """A model without one."""

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:  # noqa: ARG002
        raise TilebeamError("This model has no chat template.")


def test_every_kind_of_the_table_is_there() -> None:
    for name in KINDS:
        with pytest.raises((TilebeamError, FileNotFoundError), match="no-such"):
            open_task(TaskOptions(f"{name}:no-such"))


class TestGsm8k:
    @pytest.fixture
    def options(self, tmp_path: Path) -> TaskOptions:
        return TaskOptions(f"gsm8k:{lines(tmp_path / 'test.jsonl', DUCKS, HOUSE)}")

    def test_a_question_goes_through_the_chat_template(self, options: TaskOptions) -> None:
        task = open_task(options)
        prompt = task.prompt(task.items[0], Marks()).text
        assert prompt.startswith("[user]Janet has 16 ducks and sells 7. How many are left?\n\nPlease reason")
        assert r"\boxed{}" in prompt
        assert prompt.endswith("[assistant]")
        assert [i.answer for i in task.items] == ["9", "81200"]
        assert task.defaults.max_tokens == 512
        assert task.name == "gsm8k:test.jsonl"
        with pytest.raises(TilebeamError, match=r"no chat template\. Or .* --no-chat"):
            task.prompt(task.items[0], Base())

    def test_without_a_template_it_is_plain_text_with_a_stop(self, options: TaskOptions, tmp_path: Path) -> None:
        train = lines(tmp_path / "train.jsonl", *TRAIN)
        task = open_task(replace(options, chat=False, shots=2, shots_file=str(train)))
        assert task.prompt(task.items[0], Base()).text == (
            "Question: 0 + 0?\nAnswer: 0\n#### 0\n\nQuestion: 1 + 1?\nAnswer: 2\n#### 2\n\n"
            "Question: Janet has 16 ducks and sells 7. How many are left?\nAnswer:"
        )
        assert task.defaults.stop == ("\nQuestion:",)

    def test_examples_are_earlier_turns(self, options: TaskOptions, tmp_path: Path) -> None:
        train = str(lines(tmp_path / "train.jsonl", *TRAIN))
        task = open_task(replace(options, shots=1, shots_file=train, template="{question}"))
        asked = "Janet has 16 ducks and sells 7. How many are left?"
        assert task.prompt(task.items[0], Marks()).text == f"[user]0 + 0?[assistant]0\n#### 0[user]{asked}[assistant]"
        assert len(open_task(replace(options, shots_file=train)).shots) == 8
        with_examples = [replace(options, shots_file=train, chat=c, shots=n) for c in (False, True) for n in (1, 2)]
        assert len({open_task(o).digest for o in with_examples}) == 4
        with pytest.raises(TilebeamError, match="12 examples, not 13"):
            open_task(replace(options, shots_file=train, shots=13))
        with pytest.raises(TilebeamError, match="line 2 is one of the examples"):
            open_task(replace(options, shots_file=str(lines(tmp_path / "leak.jsonl", HOUSE)), shots=1))

    @pytest.mark.parametrize(
        ("text", "right"),
        [
            ("16 - 7 = 9\n#### 9", True),
            ("#### 9.00\n\nI hope that helps with your 16 ducks!", True),
            ("#### **$9**", True),
            (r"#### \(9\)", True),
            (r"#### \boxed{9} ducks", True),
            ("so 9 of them.", True),
            (r"they are \(\boxed{9}\) at the end of those 4 hours", True),
            (r"\boxed{9 \text{ ducks}}, of 16", True),
            (r"\boxed{\text{nine}}, which is 9", True),
            ("#### 9\n#### 10", False),
            ("#### 1. Count\nThere are 16.\n#### 2: Subtract\nThat leaves 9", True),
            ("#### 12. Count\nleft are 9", True),
            ("#### 19", False),
            ("none", False),
            ("", False),
        ],
    )
    def test_the_number_behind_the_mark_counts(self, options: TaskOptions, text: str, right: bool) -> None:
        task = open_task(options)
        assert task.verdict(task.items[0], text) == right

    def test_thousands_and_units(self, options: TaskOptions) -> None:
        task = open_task(options)
        house = task.items[1]
        assert task.verdict(house, "#### $81,200.00") == 1
        assert task.verdict(house, "#### 81200 dollars") == 1
        assert task.verdict(house, "#### 81") == 0

    def test_compressed_and_broken_files(self, tmp_path: Path, options: TaskOptions) -> None:
        packed = tmp_path / "test.jsonl.gz"
        packed.write_bytes(gzip.compress((tmp_path / "test.jsonl").read_bytes()))
        assert open_task(TaskOptions(f"gsm8k:{packed}")).digest == open_task(options).digest
        packed.write_bytes(packed.read_bytes()[:40])
        with pytest.raises(TilebeamError, match="gzip"):
            open_task(TaskOptions(f"gsm8k:{packed}"))
        bad = lines(tmp_path / "bad.jsonl", DUCKS, {"question": "x", "answer": "5"})
        with pytest.raises(TilebeamError, match=r"line 2: .* does not end in ####"):
            open_task(TaskOptions(f"gsm8k:{bad}"))
        with pytest.raises(TilebeamError, match='line 1 has no text under "answer"'):
            open_task(TaskOptions(f"gsm8k:{lines(tmp_path / 'b.jsonl', {'question': 'x', 'answer': ''})}"))

    def test_where_the_file_lies_is_no_part_of_the_setting(self) -> None:
        model = (ModelFile("m", "m.gguf", "x"),)
        for spec in ("gsm8k:a/t.jsonl", "gsm8k:/b/t.jsonl", "gsm8k:t.jsonl"):
            setting = Setting(model, ("cpu",), TaskOptions(spec, shots_file="c/s.jsonl.gz"), "d", ("best-of-n",), (1,))
            task = setting.as_dict()["task"]
            assert (task["spec"], task["shots_file"]) == ("gsm8k:t.jsonl", "s.jsonl.gz")


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify (the extra math)")
class TestMath:
    @pytest.fixture
    def options(self, tmp_path: Path) -> TaskOptions:
        return TaskOptions(f"math:{lines(tmp_path / 'math.jsonl', POINT, HALF)}")

    def test_items_and_prompts(self, options: TaskOptions, tmp_path: Path) -> None:
        task = open_task(options)
        assert [(i.id, i.answer) for i in task.items] == [
            ("test/precalculus/807.json", r"( 3, \frac{\pi}{2} )"),
            ("1", "1/2"),
        ]
        assert task.items[0].data["subject"] == "Precalculus"
        assert task.prompt(task.items[1], Marks()).text.startswith("[user]Halve 1.\n\nPlease reason")
        train = lines(tmp_path / "train.jsonl", {"problem": "1+1", "solution": r"$\boxed{2}$", "answer": "2"})
        base = open_task(replace(options, chat=False, shots=1, shots_file=str(train)))
        assert base.prompt(base.items[1], Base()).text == (
            "Problem:\n1+1\n\nSolution:\n$\\boxed{2}$\n\nProblem:\nHalve 1.\n\nSolution:"
        )
        with pytest.raises(TilebeamError, match="no box in its solution"):
            open_task(TaskOptions(f"math:{lines(tmp_path / 'bad.jsonl', {'problem': 'x', 'solution': 'y'})}"))

    @pytest.mark.parametrize(
        ("item", "text", "right"),
        [
            (0, r"so \boxed{(3, \pi/2)}", True),
            (0, r"\boxed{(3, 90^\circ)} no: \boxed{\left(3,\frac{\pi}{2}\right)} as $r = 3$", True),
            (0, r"\boxed{(3, \pi)}", False),
            (0, "3", False),
            (1, r"\boxed{0.5}", True),
            (1, r"\boxed{\frac{1}{2}} of 1, not 2", True),
            (1, r"\boxed{\frac{1}{2", False),
            (1, "The answer is $1/2$.", True),
        ],
    )
    def test_boxes_are_equal_as_mathematics(self, options: TaskOptions, item: int, text: str, right: bool) -> None:
        task = open_task(options)
        assert task.verdict(task.items[item], text) == right


class TestHumanEval:
    @pytest.fixture
    def options(self, tmp_path: Path) -> TaskOptions:
        file = tmp_path / "HumanEval.jsonl.gz"
        file.write_bytes(gzip.compress(json.dumps(ADDING).encode()))
        return TaskOptions(f"humaneval:{file}")

    def test_programs_are_asked_for_and_judged_by_hidden_tests(self, options: TaskOptions) -> None:
        task = open_task(options)
        (item,) = task.items
        prompt = task.prompt(item, Marks()).text
        assert item.id == "HumanEval/900"
        assert prompt.endswith(f"```python\n{ADDING['prompt'].strip()}\n```[assistant]")
        assert "candidate" not in prompt
        assert task.verdict(item, "Sure:\n```python\ndef total(x: List[int]):\n    return sum(x)") == 1
        assert task.verdict(item, "```python\ndef total(x):\n    return 3\n```") == 0
        assert task.extract("```python\ndef total(x):  # it\n    return 3\n```") == "def total(x):\n    return 3"

    def test_a_base_model_goes_on_where_the_prompt_ends(self, options: TaskOptions) -> None:
        task = open_task(replace(options, chat=False))
        (item,) = task.items
        assert task.prompt(item, Base()).text == ADDING["prompt"]
        assert "\ndef " in task.defaults.stop
        assert task.verdict(item, "    return sum(x)\n") == 1
        assert task.verdict(item, "    return 3\n") == 0

    def test_the_examples_select_and_the_tests_judge(self, options: TaskOptions) -> None:
        """A program that knows the example alone looks right to the scorer, and is not."""
        task = open_task(options)
        (item,) = task.items
        check_scorer("examples", None)
        scorer = modelless_scorer("examples", lambda *_: 0.0, "\n")
        texts = ["```python\ndef total(x):\n    return 3\n```", "    return 0", "    return sum(x)"]
        candidates = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(texts)]
        assert scorer.score(task.prompt(item, Marks()), candidates) == [1.0, 0.0, 1.0]
        assert [task.verdict(item, t) for t in texts] == [0.0, 0.0, 1.0]

    def test_broken_lines_are_named(
        self, tmp_path: Path, options: TaskOptions, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = lines(tmp_path / "bad.jsonl", ADDING | {"entry_point": "other"})
        with pytest.raises(TilebeamError, match=r"bad.jsonl line 1: the prompt does not define other"):
            open_task(TaskOptions(f"humaneval:{bad}"))
        open_task(options)
        monkeypatch.setitem(child._PLAIN.greeting(), "unconfined", "no filters")
        with pytest.raises(TilebeamError, match="--unsafe-code"):
            open_task(options)
        task = open_task(replace(options, unsafe_code=True))
        assert task.verdict(task.items[0], "    return sum(x)") == 1


def test_the_command_takes_what_is_not_said_from_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[EvalJob] = []

    def evaluate(job: EvalJob, *_: object, **__: object) -> None:
        jobs.append(job)
        raise TilebeamError("seen")

    monkeypatch.setattr("tilebeam.evaluation.runner.evaluate", evaluate)
    (tmp_path / "m.gguf").write_bytes(b"x")
    sums, programs = lines(tmp_path / "g.jsonl", DUCKS), lines(tmp_path / "h.jsonl", ADDING)
    for arguments in (
        [f"--task=gsm8k:{sums}"],
        [f"--task=gsm8k:{sums}", "--no-chat", "-n", "99"],
        [f"--task=gsm8k:{sums}", "--stop", "\\n\\n", "--scorer", "verifier"],
        [f"--task=humaneval:{programs}", "--unsafe-code"],
    ):
        ran = CliRunner().invoke(
            app, ["eval", f"--model={tmp_path / 'm.gguf'}", f"--out={tmp_path / 'out'}", *arguments]
        )
        assert "seen" in ran.stderr, ran.stderr
    said = [(s.sampling["max_tokens"], s.sampling["stop"], s.scorers, s.task.chat) for s in (j.setting for j in jobs)]
    assert said == [
        (512, [], ("logprob",), None),
        (99, ["\nQuestion:"], ("logprob",), False),
        (512, ["\n\n"], ("verifier",), None),
        (768, ["\n```\n\n"], ("logprob", "examples"), None),
    ]
    assert [j.setting.task.unsafe_code for j in jobs] == [False, False, False, True]
