"""bfcl: what counts as the right call, and an evaluation of calls."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tilebeam import CompletionOutput, Prompt, RequestOutput, SamplingParams, TilebeamError, Usage
from tilebeam.chat.prepared import PreparedChat
from tilebeam.chat.tool_grammar import forced_grammar
from tilebeam.chat.tools import tool_use, tools_of
from tilebeam.evaluation.config import ModelFile, Setting, Unit
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.worker import EvalJob, Workbench
from tools_kit import HERMES

PARAMETERS: dict[str, Any] = {
    "type": "dict",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "New York, NY"]},
        "days": {"type": "integer", "optional": True, "default": 1},
        "share": {"type": "float"},
        "points": {"type": "array", "items": {"type": "float"}},
        "names": {"type": "tuple", "items": {"type": "string"}},
        "where": {"type": "dict", "properties": {"x": {"type": "integer"}, "y": {"type": "any"}}},
        "parts": {"type": "array", "items": {"type": "dict", "properties": {"n": {"type": "integer"}}}},
    },
    "required": ["city"],
}
LINE: dict[str, Any] = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "How is the weather?"}]],
    "function": [
        {"name": "weather.at", "description": "Forecast", "parameters": PARAMETERS},
        {"name": "now", "description": "Time", "parameters": {"type": "dict", "properties": {}, "required": []}},
    ],
}
TRUTH: dict[str, Any] = {
    "city": ["New York, NY", "NYC"],
    "days": ["", 2],
    "share": ["", 1, 0.5],
    "points": ["", [1, 2.5]],
    "names": ["", ["A-B", "c"]],
    "where": ["", {"x": [1, 2], "y": ["", "top"]}],
    "parts": ["", [{"n": [1]}, {"n": [2, 3]}]],
}


def written(folder: Path, *lines: dict[str, Any], answers: bool = True) -> Path:
    (folder / "possible_answer").mkdir(exist_ok=True)
    file = folder / "BFCL_small.json"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    truths = [{"id": line["id"], "ground_truth": [{"weather.at": TRUTH}]} for line in lines]
    (folder / "possible_answer" / file.name).write_text("".join(json.dumps(t) + "\n" for t in truths if answers))
    return file


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"city": "new york ny"}, True),
        ({"city": "Bern"}, False),
        ({"days": 2}, False),  # the city is missing
        ({"city": "NYC", "days": 2}, True),
        ({"city": "NYC", "days": 2.0}, False),
        ({"city": "NYC", "days": "2"}, False),
        ({"city": "NYC", "hours": 2}, False),  # unexpected
        ({"city": "NYC", "share": 1}, True),
        ({"city": "NYC", "share": 0.5}, True),
        ({"city": "NYC", "points": [1, 2.5]}, True),
        ({"city": "NYC", "points": [2.5, 1]}, False),
        ({"city": "NYC", "points": ["1", 2.5]}, False),
        ({"city": "NYC", "names": ["a c", "C"]}, False),
        ({"city": "NYC", "names": ["AB", "C"]}, True),
        ({"city": "NYC", "where": {"x": 2}}, True),
        ({"city": "NYC", "where": {"y": "top"}}, False),
        ({"city": "NYC", "where": {"x": 1, "z": 1}}, False),
        ({"city": "NYC", "parts": [{"n": 1}, {"n": 3}]}, True),
        ({"city": "NYC", "parts": [{"n": 1}]}, False),
    ],
)
def test_arguments_are_right_where_the_authors_accept_them(tmp_path: Path, arguments: Any, right: bool) -> None:
    task = open_task(TaskOptions(f"bfcl:{written(tmp_path, LINE)}"))
    call = {"name": "weather.at", "arguments": arguments}
    assert task.verdict(task.items[0], json.dumps([call])) == right


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '[{"name": "now", "arguments": {}}]',
        '[{"name": "weather.at"}]',
        '[{"name": "weather.at", "arguments": []}]',
        json.dumps(2 * [{"name": "weather.at", "arguments": {"city": "NYC"}}]),
    ],
)
def test_other_texts_are_wrong(tmp_path: Path, text: str) -> None:
    task = open_task(TaskOptions(f"bfcl:{written(tmp_path, LINE)}"))
    assert task.verdict(task.items[0], text) == 0


@pytest.mark.parametrize(
    ("options", "line", "said"),
    [
        ({"shots": 1}, LINE, "no --shots"),
        ({"chat": False}, LINE, "no --shots"),
        ({"field": "question"}, LINE, "or --field"),
        ({}, LINE | {"question": [[{"role": "user", "content": ["How?"]}]]}, "line 1 is no question of BFCL"),
        ({}, LINE | {"question": [["How?", {"role": "user", "content": "How?"}]]}, "line 1 is no question of BFCL"),
        ({}, LINE | {"question": "How?"}, "line 1 is no question of BFCL"),
        ({}, LINE | {"function": []}, "line 1 is no question of BFCL"),
        ({}, LINE | {"ground_truth": [{"weather.at": {"wind": [1]}}]}, "line 1 is no question of BFCL"),
        ({}, LINE | {"ground_truth": [{"now": {}}, {"now": {}}]}, "line 1 is no question of BFCL"),
        ({}, LINE | {"ground_truth": [{"weather.at": []}]}, "line 1 is no question of BFCL"),
        ({}, LINE | {"ground_truth": [{"weather.at": {"city": "NYC"}}]}, "line 1 is no question of BFCL"),
    ],
)
def test_what_is_no_item_says_so(tmp_path: Path, options: Any, line: Any, said: str) -> None:
    with pytest.raises(TilebeamError, match=said):
        open_task(TaskOptions(f"bfcl:{written(tmp_path, line)}", **options))
    with pytest.raises(TilebeamError, match="possible_answer"):
        open_task(TaskOptions(f"bfcl:{written(tmp_path, LINE, answers=False)}"))


@pytest.mark.parametrize("line", ['{"id": "a"}', "[1]", '{"id": ["a"], "ground_truth": []}'])
def test_answers_without_an_id_or_a_call(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, LINE)
    (answers := path.parent / "possible_answer" / path.name).write_text(line + "\n")
    with pytest.raises(TilebeamError, match=f'{answers} needs an "id"'):
        open_task(TaskOptions(f"bfcl:{path}"))


class _Calls:
    """A model that calls two functions by turns; one that no grammar holds also writes words."""

    def __init__(self) -> None:
        self.asked: list[SamplingParams] = []

    def prepare_chat(self, messages: Any, *, tools: Any, tool_choice: Any, **_: Any) -> PreparedChat:
        use = tool_use(tools_of(tools), tool_choice, HERMES)
        assert use is not None
        assert "city" in forced_grammar(use)
        return PreparedChat(Prompt(messages[-1]["content"]), SamplingParams(grammar='root ::= "x"'), use, None)

    raw_decode = staticmethod(nullcontext)

    def generate(self, prompts: Any, sampling: Any, **_: Any) -> list[RequestOutput]:
        self.asked += sampling
        right = '<tool_call>\n{"name": "weather.at", "arguments": {"city": "nyc"}}\n</tool_call>'
        texts = [right, right.replace('"nyc"', '"NYC."'), "Let me see." if sampling[0].grammar is None else right]
        samples = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(texts[: sampling[0].n])]
        return [RequestOutput(p.text, [], samples, Usage(), 0) for p in prompts]


@pytest.mark.parametrize("grammar", [True, False])
def test_calls_are_read_judged_and_vote(tmp_path: Path, grammar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TaskOptions(f"bfcl:{written(tmp_path, LINE)}", tools_grammar=grammar)
    task = open_task(options)
    setting = Setting((ModelFile("m", "m", "0"),), ("cpu",), options, task.digest, ("greedy", "self-consistency"), (3,))
    assert ("tools_grammar" in setting.as_dict()["task"]) is not grammar
    bench, lm = Workbench(EvalJob(setting), task), _Calls()
    monkeypatch.setattr(bench, "_lm", lambda *_: lm)
    (item,) = bench.run(Unit("m", "cpu", 1, 0, 1, 3))["items"]
    call = '[{"name": "weather.at", "arguments": {"city": "nyc"}}]'
    assert [s["answer"] for s in item["samples"]] == [call, call, call if grammar else None]
    assert [s["correct"] for s in item["samples"]] == [1, 1, float(grammar)]
    assert all(bool(params.grammar) is grammar for params in lm.asked)
    (one,) = bench.run(Unit("m", "cpu", 1, 0, 1, 1, "greedy"))["items"]
    assert (one["text"], one["correct"]) == (call, 1)
