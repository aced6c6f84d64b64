"""tilebeam eval --tir: prompts that ask for programs, which run in the samples of every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_kit import lines
from tilebeam import CompletionOutput, Prompt, RequestOutput, TilebeamError, Usage
from tilebeam.evaluation.config import ModelFile, Setting, Unit
from tilebeam.evaluation.results import _majority, _voted
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.worker import EvalJob, Workbench
from tilebeam.search.tool_forms import MARK, SYSTEM


@pytest.fixture(name="spec")
def _spec(tmp_path: Path) -> str:
    return f"gsm8k:{lines(tmp_path / 'g.jsonl', {'question': 'What is 2 + 3?', 'answer': 'A sum. #### 5'})}"


def test_prompts_ask_for_programs_and_show_one_in_words(spec: str) -> None:
    task = open_task(TaskOptions(spec, tir=True))
    system, question = task.messages(task.items[0])
    assert (system["role"], system["content"]) == ("system", SYSTEM)
    explained, shown, _ = task.messages(task.items[0], words=True)
    assert (explained["role"], shown["role"]) == ("user", "assistant")
    assert MARK in shown["content"]
    assert question == {"role": "user", "content": "What is 2 + 3?"}
    plain = open_task(TaskOptions(spec))
    assert [m["role"] for m in plain.messages(plain.items[0])] == ["user"]
    assert plain.digest != task.digest


def test_examples_of_the_user_take_the_place_of_the_one_that_is_shown(spec: str, tmp_path: Path) -> None:
    shots = lines(tmp_path / "s.jsonl", {"question": "What is 1 + 1?", "answer": "It is 2. #### 2"})
    task = open_task(TaskOptions(spec, tir=True, shots=1, shots_file=str(shots)))
    assert [m["content"] for m in task.messages(task.items[0])][1] == "What is 1 + 1?"
    assert len(task.messages(task.items[0])) == 4


def test_what_cannot_run_programs_says_so(spec: str) -> None:
    with pytest.raises(TilebeamError, match="--tir needs a chat template"):
        open_task(TaskOptions(spec, chat=False, tir=True))
    models = (ModelFile("m", "m.gguf", "0"),)
    setting = Setting(models, ("cpu",), TaskOptions(spec), "d", ("tir",), (1,))
    with pytest.raises(TilebeamError, match="use --tir, not --method tir"):
        setting.parsed_methods()


class _Writes:
    """A model that writes a program and believes its output."""

    n_seq_max, n_ctx = 4, 1000

    def chat_prompt(self, messages: list[dict[str, str]]) -> Prompt:
        return Prompt(messages[-1]["content"])

    def tokenize(self, text: str, **_: bool) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def keep_prefixes(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    raw_decode = keep_prefixes

    def generate(self, prompts: Any, sampling: Any, *, progress: Any = None, on_sample: Any = None) -> Any:
        assert progress is not None
        params = sampling[0]
        ids = prompts[0].tokens(self) if isinstance(prompts[0], Prompt) else list(prompts[0])
        so_far = self.detokenize(ids)
        text = "```python\nprint(2 + 3)\n```\n"
        stop: str | None = MARK
        if MARK in so_far:
            text, stop = f"It is \\boxed{{{so_far.split(MARK)[1].split()[0]}}}.", None
        tokens = self.tokenize(text + (stop or ""))
        outputs = [CompletionOutput(i, text, tokens, "stop", i, stop_reason=stop) for i in range(params.n)]
        for output in outputs:
            if on_sample is not None:
                on_sample(0, output)
        return [RequestOutput(so_far, ids, outputs, Usage(), 0)]


@pytest.mark.parametrize("method", ["", "greedy"])
def test_programs_run_in_the_samples_of_every_method(spec: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TaskOptions(spec, tir=True, unsafe_code=True)
    task = open_task(options)
    models = (ModelFile("m", "m.gguf", "0"),)
    setting = Setting(models, ("cpu",), options, task.digest, ("greedy", "self-consistency"), (2,))
    bench = Workbench(EvalJob(setting), task)
    monkeypatch.setattr(bench, "_lm", lambda *_: _Writes())
    unit = Unit("m", "cpu", 1, 0, 1, 1 if method else 2, method)
    (item,) = bench.run(unit)["items"]
    for sample in item.get("samples", [item]):
        assert sample["text"].endswith(f"{MARK}\n5\n```\nIt is \\boxed{{5}}.")
        assert (sample["answer"], sample["correct"]) == ("5", 1.0)


def test_answers_are_those_of_programs_and_their_votes_count_twice(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TaskOptions(spec, programs=True, unsafe_code=True)
    task = open_task(options)
    models = (ModelFile("m", "m.gguf", "0"),)
    setting = Setting(models, ("cpu",), options, task.digest, ("self-consistency",), (2,))
    assert replace(setting, task=TaskOptions(spec)).digest != setting.digest
    bench = Workbench(EvalJob(setting), task)
    monkeypatch.setattr(bench, "_lm", lambda *_: _Writes())
    (item,) = bench.run(Unit("m", "cpu", 1, 0, 1, 2, ""), lambda _: None)["items"]
    # Its words end within its program: the last number in them is 3.
    assert [(s["answer"], s["correct"], s.get("worth")) for s in item["samples"]] == [("5", 1.0, None)] * 2
    samples = [{"answer": a, "correct": float(a == "5"), "finish": "stop", "text": a} for a in "775"]
    assert _voted(_majority, samples, 3) == 0
    assert _voted(_majority, [*samples[:2], samples[2] | {"worth": 2.0}], 3) == 0.5
    with pytest.raises(TilebeamError, match="--programs is for problems that have an answer"):
        open_task(TaskOptions(f"humaneval:{spec.partition(':')[2]}", programs=True))
