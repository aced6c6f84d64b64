"""Tasks of evaluations: items of files, examples, checkers, extraction, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_kit import CHECKS, lines
from tilebeam import TilebeamError
from tilebeam.evaluation.functions import load_function
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task


def test_items_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(CHECKS)
    path = lines(
        tmp_path / "t.jsonl",
        {"prompt": "1+1=", "answer": 2},
        "",
        {"prompt": "3/6=", "answer": "0.50", "id": "half"},
        {"prompt": "x", "answer": "0"},
    )
    task = open_task(TaskOptions(f"jsonl:{path}", template="Q: {prompt}\nA:"))
    assert [i.id for i in task.items] == ["0", "half", "2"]
    assert task.items[0].prompt == task.items[0].body == "Q: 1+1=\nA:"
    assert task.verdict(task.items[0], "it is 2.0") == 1
    assert task.verdict(task.items[0], "2 or 3") == 0
    assert task.verdict(task.items[0], "none") == 0
    assert task.verdict(task.items[1], "0.5") == 1
    own = open_task(TaskOptions(f"jsonl:{path}", checker=f"{tmp_path}/checks.py:right"))
    assert [own.verdict(own.items[2], chr(n)) for n in (99, 100)] == [1, 0]
    assert task.name == "jsonl:t.jsonl"
    assert len(open_task(TaskOptions(f"jsonl:{path}", items=2)).items) == 2


def test_examples_of_a_file_come_first(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"prompt": "5+5", "answer": "10"})
    shots = lines(tmp_path / "s.jsonl", {"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"})
    options = TaskOptions(f"jsonl:{path}", shots_file=str(shots), template="{question} =", shot_answer=" {answer}\n")
    assert open_task(options).items[0].prompt == "1+1 = 2\n2+2 = 4\n5+5 ="
    assert open_task(replace(options, shots=1)).items[0].prompt == "1+1 = 2\n5+5 ="
    with pytest.raises(TilebeamError, match="2 examples, not 3"):
        open_task(replace(options, shots=3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["{"], "line 1 is not JSON"),
        ([{"answer": "1", "q": "a"}], 'line 1 has no text under "prompt" or .*; it has "answer", "q". --field'),
        ([{"answer": "1", "messages": [{"role": "assistant", "content": "a"}]}], "must end with a text of the user"),
        ([{"answer": "1", "messages": [{"role": "system"}, {"role": "user", "content": "a"}]}], "--chat"),
        ([{"prompt": "a"}, {"prompt": "b", "answer": "1"}], "1 of 2 items have no answer, the first is item 0"),
        ([{"prompt": "a", "answer": ["1"]}], "must be a text or a number"),
        ([{"prompt": "a", "answer": "1", "checker": "c.py:f"}], "no checker of its own"),
        ([{"prompt": "a", "answer": "1", "id": 1}, {"prompt": "b", "answer": "1", "id": "1"}], "comes twice"),
        ([], "no items"),
    ],
)
def test_bad_files_are_named_by_line(tmp_path: Path, content: list[Any], message: str) -> None:
    path = lines(tmp_path / "t.jsonl", *content)
    with pytest.raises(TilebeamError, match=message):
        open_task(TaskOptions(f"jsonl:{path}"))


@pytest.mark.parametrize(
    ("kind", "line", "options"),
    [
        ("jsonl", {"question": "6 * 7?"}, {}),
        ("jsonl", {"prompt": "no", "q": "6 * 7?"}, {"field": "q"}),
        ("jsonl", {"messages": [{"role": "user", "content": "6 * 7?"}]}, {"template": "{prompt}"}),
        ("gsm8k", {"prompt": "6 * 7?"}, {"chat": False, "template": "{question}"}),
        ("math", {"problem": "6 * 7?", "unique_id": "a"}, {"chat": False, "template": "{problem}"}),
    ],
)
def test_questions_go_by_their_usual_names_and_need_no_answer(
    tmp_path: Path, kind: str, line: dict[str, Any], options: dict[str, Any]
) -> None:
    task = open_task(TaskOptions(f"{kind}:{lines(tmp_path / 't.jsonl', line)}", **options))
    assert [(i.question, i.prompt, i.answer) for i in task.items] == [("6 * 7?", "6 * 7?", None)]
    assert not task.judged
    with pytest.raises(TilebeamError, match="no answers to judge by"):
        task.verdict(task.items[0], "42")


def test_turns_before_a_question_stay_before_it(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    path = lines(tmp_path / "t.jsonl", {"messages": talk, "answer": 2})
    task = open_task(TaskOptions(f"jsonl:{path}", chat=True, template="Q: {question}"))
    assert task.messages(task.items[0]) == [talk[0], {"role": "user", "content": "Q: 1+1"}]
    assert task.judged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": "gsm8k"}, "write KIND:FILE with jsonl, gsm8k, math"),
        ({"spec": "mmlu:mmlu_test.jsonl"}, r"Choices by likelihood.*: LM\.loglikelihoods"),
        ({"items": 5}, "has 1 items, not 5"),
        ({"items": 0}, "at least 1"),
        ({"template": "{nothing}"}, "does not fit"),
        ({"template": "{question.text}"}, "does not fit.*its fields are {prompt}, {answer}"),
        ({"template": "{answer[first]}"}, "does not fit"),
        ({"shot_answer": "{answer.text}", "shots_file": "SHOTS"}, "--shot-answer .* does not fit"),
        ({"shot_answer": " {answer}"}, "--shot-answer: .*--shots-file"),
        ({"tools_grammar": False}, "--no-tools-grammar is for bfcl"),
        ({"extract": "("}, "regular expression"),
        ({"checker": "just_a_name"}, "names no function"),
        ({"checker": "no_such_file.py:f"}, "cannot be imported: no_such_file.py does not exist"),
        ({"shots": 2}, "--shots-file"),
    ],
)
def test_bad_options_of_a_task(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "t.jsonl", {"prompt": "a", "answer": "1"})
    if "shots_file" in changes:
        changes |= {"shots_file": str(lines(tmp_path / "s.jsonl", {"prompt": "b", "answer": "2"}))}
    with pytest.raises(TilebeamError, match=message):
        open_task(replace(TaskOptions(f"jsonl:{path}"), **changes))


def test_a_checker_that_fails_or_answers_nonsense_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("def bad(item, text): return 1 / 0\ndef two(item, text): return 2\nx = 3\n")
    path = lines(tmp_path / "t.jsonl", {"prompt": "a", "answer": "1"})
    for name, message in (("bad", "ZeroDivisionError"), ("two", "0 to 1, not 2")):
        task = open_task(TaskOptions(f"jsonl:{path}", checker=f"{tmp_path}/c.py:{name}"))
        with pytest.raises(TilebeamError, match=message):
            task.verdict(task.items[0], "t")
    with pytest.raises(TilebeamError, match="has no function x"):
        load_function(f"{tmp_path}/c.py:x", "--checker")
    with pytest.raises(TilebeamError, match="does not exist"):
        load_function(f"{tmp_path}/d.py:x", "--checker")


@pytest.mark.parametrize(
    ("extract", "right", "text", "verdict"),
    [
        ("boxed", r"2\frac{1}{2}", r"\boxed{2.5}", True),
        ("boxed", "x = 5", r"\boxed{5}", True),
        ("last-number", "1 1/2", "it is 1.5", True),
        ("last-number", "10,000", "it is 10{,}000", True),
        ("math", "X^2", r"\boxed{X^{2}}", True),
        ("math", "2 1/2", r"\boxed{3/2}", False),
        ("math", "2 1/2", r"\boxed{\frac{5}{2}}", True),
    ],
)
def test_right_answers_are_read_as_answers_are(
    tmp_path: Path, extract: str, right: str, text: str, verdict: bool
) -> None:
    if extract == "math":
        pytest.importorskip("math_verify", reason="needs math-verify (the extra math)")
    path = lines(tmp_path / "t.jsonl", {"prompt": "a", "answer": right})
    task = open_task(TaskOptions(f"jsonl:{path}", extract=extract))
    assert task.verdict(task.items[0], text) == verdict


def test_the_digest_covers_prompts_answers_and_judges(tmp_path: Path) -> None:
    def digest(answer: str = "1", source: str = CHECKS, folder: str = "a", **changes: Any) -> str:
        place = tmp_path / folder / str(abs(hash((answer, source))))
        place.mkdir(parents=True, exist_ok=True)
        (place / "c.py").write_text(source)
        path = lines(place / "t.jsonl", {"prompt": "p", "answer": answer})
        return open_task(TaskOptions(f"jsonl:{path}", checker=f"{place}/c.py:right", **changes)).digest

    assert digest() == digest(folder="b")
    assert len({digest(), digest(answer="2"), digest(source=CHECKS + "#"), digest(template="{prompt}?")}) == 4
