"""Choices scored by their likelihood: files in their original lines, prompts, figures against formulas and against
llama-perplexity --multiple-choice built from the pinned sources, the command from end to end."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import engine_kit
import llama_cpp
import numpy as np
import pytest
import tilebeam
from eval_kit import lines
from html_kit import Page
from tilebeam import LM, Likelihood, Prompt, TilebeamError
from tilebeam.cli import main as cli
from tilebeam.evaluation import choices
from tilebeam.evaluation.options import TaskOptions
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.choice import ChoiceTask
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

ROOT = Path(__file__).parents[2]
# Where llama-cpp-python's wheel puts what it does not load itself.
LIBRARIES = Path(llama_cpp.__file__).parents[1] / "lib"

FIELD = {
    "subject": "abstract_algebra",
    "question": "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.",
    "choices": ["0", "4", "2", "6"],
    "answer": "B",
}
ORGAN = {"subject": "anatomy", "question": "Which is an organ? ", "choices": ["arm", "liver", "x", "y"], "answer": "B"}
DEV = [
    {"subject": subject, "question": f"{subject} {i}?", "choices": ["a", "b", "c", "d"], "answer": "ABCD"[i % 4]}
    for subject in ("anatomy", "abstract_algebra")
    for i in range(5)
]
SWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping tiles off.", "is holding a cube.", "starts pulling [step] up  roofing."],
    "label": 3,
}
GRANDE = {
    "sentence": "The trophy does not fit into the case because the _ is too large.",
    "option1": "trophy",
    "option2": "case",
    "answer": "1",
}
SKY = {"question": "The sky is", "choices": ["blue", "a very old door"], "answer": 0}


class Marks:
    """A model whose chat template shows who said what."""

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return Prompt("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")


def opened(kind: str, path: Path, **more: Any) -> ChoiceTask:
    task = open_task(TaskOptions(f"{kind}:{path}", **more))
    assert isinstance(task, ChoiceTask)
    return task


# --- files ------------------------------------------------------------------------------------------------------------


def test_mmlu_asks_for_a_letter_behind_examples_of_its_subject(tmp_path: Path) -> None:
    file, dev = lines(tmp_path / "test.jsonl", FIELD, ORGAN), str(lines(tmp_path / "dev.jsonl", *DEV))
    task = opened("mmlu", file)
    prompt, letters = zip(*task.ways(task.items[1], Marks()), strict=True)
    assert letters == (" A", " B", " C", " D")
    assert set(prompt) == {
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
        "Which is an organ?\nA. arm\nB. liver\nC. x\nD. y\nAnswer:"
    }
    shot = opened("mmlu", file, shots=1, shots_file=dev)
    assert shot.ways(shot.items[0], Marks())[0][0].startswith(
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "abstract_algebra 0?\nA. a\nB. b\nC. c\nD. d\nAnswer: A\n\nFind the degree"
    )
    five = opened("mmlu", file, shots_file=dev)
    assert [five.items[1].prompt.count(f"anatomy {i}?") for i in range(5)] == [1] * 5
    with pytest.raises(TilebeamError, match="5 examples of abstract_algebra, not 6"):
        opened("mmlu", file, shots=6, shots_file=dev)
    assert len({t.digest for t in (task, shot, five)}) == 3


def test_mmlu_as_a_conversation(tmp_path: Path) -> None:
    file, dev = lines(tmp_path / "test.jsonl", ORGAN), str(lines(tmp_path / "dev.jsonl", *DEV))
    task = opened("mmlu", file, shots=1, shots_file=dev, chat=True, prefix="Letters only.\n")
    assert task.ways(task.items[0], Marks())[1] == (
        "[user]Letters only.\nanatomy 0?\nA. a\nB. b\nC. c\nD. d\nAnswer:[assistant]A"
        "[user]Which is an organ?\nA. arm\nB. liver\nC. x\nD. y\nAnswer:[assistant]",
        "B",
    )


def test_lines_of_other_sets(tmp_path: Path) -> None:
    task = opened("choice", lines(tmp_path / "mixed.jsonl", SWAG, GRANDE, SKY))
    swag, grande, sky = (task.ways(item, Marks()) for item in task.items)
    assert swag[3] == ("Roof shingle removal: A man is sitting on a roof. He", " starts pulling up roofing.")
    assert grande == [
        ("The trophy does not fit into the case because the trophy", " is too large."),
        ("The trophy does not fit into the case because the case", " is too large."),
    ]
    assert sky == [("The sky is", " blue"), ("The sky is", " a very old door")]
    assert [item.data["right"] for item in task.items] == [3, 0, 0]
    asked = opened("choice", task.path, template="Q: {question}\n{options}\nA: ").ways(task.items[2], Marks())
    assert asked[0] == ("The sky is", " blue")  # the item was made by the other task's template
    lettered = opened("choice", lines(tmp_path / "sky.jsonl", SKY), template="Q: {question}\n{options}\nA: ")
    assert lettered.ways(lettered.items[0], Marks())[0] == ("Q: The sky is\nA. blue\nB. a very old door\nA: ", "blue")


def test_examples_before_other_sets(tmp_path: Path) -> None:
    shots = str(lines(tmp_path / "shots.jsonl", GRANDE, SKY))
    task = opened("choice", lines(tmp_path / "sky.jsonl", {**SKY, "question": "The sea is"}), shots_file=shots)
    assert task.items[0].prompt == (
        "The trophy does not fit into the case because the trophy is too large.\n\nThe sky is blue\n\nThe sea is"
    )


@pytest.mark.parametrize(("answer", "right"), [(0, 0), (1, 1), ("blue", 0), ("a very old door", 1), ("A", 0), ("B", 1)])
def test_how_an_answer_is_named(tmp_path: Path, answer: Any, right: int) -> None:
    task = opened("choice", lines(tmp_path / "sky.jsonl", {**SKY, "answer": answer}))
    assert task.items[0].data["right"] == right


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        ("choice", {**SKY, "answer": 2}, "its place from 0"),
        ("choice", {**SKY, "answer": "C"}, "names 0 of the choices"),
        ("choice", {**SKY, "choices": ["B", "A"], "answer": "A"}, "names 2 of the choices"),
        ("choice", {**SKY, "choices": ["blue"]}, "at least two texts"),
        ("choice", {**SKY, "choices": ["blue", ""]}, "at least two texts"),
        ("choice", {**SKY, "question": ""}, 'no text under "question"'),
        ("choice", {**SWAG, "label": 4}, "the number of an ending"),
        ("choice", {**GRANDE, "sentence": "No gap."}, "has no gap"),
        ("choice", {**GRANDE, "answer": "3"}, "must be 1 or 2"),
        ("mmlu", {**ORGAN, "answer": "E"}, "the letter of one of the choices"),
        ("mmlu", SKY, 'no text under "subject"'),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, kind: str, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(TilebeamError, match=f"line 1.*{reason}"):
        opened(kind, lines(tmp_path / "bad.jsonl", line))


def test_a_sentence_with_a_gap_is_no_conversation(tmp_path: Path) -> None:
    with pytest.raises(TilebeamError, match="--no-chat"):
        opened("choice", lines(tmp_path / "gap.jsonl", GRANDE), chat=True)


def test_items_are_drawn_by_seed(tmp_path: Path) -> None:
    file = lines(tmp_path / "many.jsonl", *({**SKY, "question": f"{i}"} for i in range(100)))
    first, again, other = (
        [item.id for item in opened("choice", file, items=10, item_seed=seed).items] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first == sorted(first, key=int)
    assert first != [str(i) for i in range(10)]
    assert [i.question for i in opened("choice", file, items=10).items] == first
    with pytest.raises(TilebeamError, match="100 items, not 101"):
        opened("choice", file, items=101)


# --- figures ----------------------------------------------------------------------------------------------------------


def likelihood(tokens: list[int], logprobs: list[float]) -> Likelihood:
    return Likelihood(tokens, logprobs, False, 1, 1)


def test_means_begin_where_choices_differ() -> None:
    found = [likelihood([5, 6, 7], [-1, -2, -3]), likelihood([5, 6, 8, 9], [-1, -2, -4, -6])]
    assert choices.per_token(found) == [-3, -5]
    # One choice begins the other: it keeps its last token.
    assert choices.per_token([likelihood([5], [-1]), likelihood([5, 6], [-1, -3])]) == [-1, -2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = preset("tiny", arch="qwen2", type="f32", n_layer=2)
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", config)


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=8, threads=1, **engine_kit.EXACT) as model:
        yield model


def test_records_hold_the_three_figures(lm: LM, tmp_path: Path) -> None:
    task = opened("choice", lines(tmp_path / "mixed.jsonl", SWAG, GRANDE, SKY))
    records = choices.score(task, lm, task.items)
    assert [(r["id"], r["right"]) for r in records] == [("0", 3), ("1", 0), ("2", 0)]
    for item, record in zip(task.items, records, strict=True):
        for (prompt, text), found in zip(task.ways(item, lm), record["choices"], strict=True):
            ids, start = lm.tokenize(prompt + text), len(lm.tokenize(prompt))
            logits = lm.logits(ids).astype(np.float64)[start - 1 : -1]
            logits -= np.log(np.exp(logits).sum(1, keepdims=True))
            total = float(logits[range(len(ids) - start), ids[start:]].sum())
            assert found["sum"] == pytest.approx(total, abs=1e-3)
            assert found["per character"] == pytest.approx(total / (len(text) - 1), abs=1e-3)
            assert found["tokens"] == len(ids) - start
    grande = records[1]["choices"]
    assert grande[0]["per token"] == pytest.approx(grande[0]["sum"] / grande[0]["tokens"])


def test_accuracy_by_subject(tmp_path: Path) -> None:
    task = opened("mmlu", lines(tmp_path / "test.jsonl", FIELD, ORGAN, {**ORGAN, "question": "And this?"}))
    scores = ([0, 1], [2, 1], [1, 3])
    table = [[{"right": 1, "choices": [dict.fromkeys(choices.FIGURES, v) for v in row]} for row in scores]]
    values = dict(choices.verdicts(table))
    assert [v.tolist() for v in values.values()] == [[[1, 0, 1]]] * 3
    everything, algebra, anatomy = choices.by_subject(task.items, values)
    assert (everything["subject"], algebra["subject"], anatomy["subject"]) == ("all", "abstract_algebra", "anatomy")
    assert everything["figures"]["sum"]["stderr"] == pytest.approx((2 / 3 * 1 / 3 / 2) ** 0.5)
    assert algebra["figures"]["sum"] == {"accuracy": 1.0, "stderr": None}
    assert anatomy["items"] == 2


def test_examples_that_do_not_fit_are_found_before_anything_runs(lm: LM, tmp_path: Path) -> None:
    long = {**SKY, "question": "the people " * 300}
    task = opened("choice", lines(tmp_path / "long.jsonl", SKY, long))
    with pytest.raises(TilebeamError, match=r"have (\d+) tokens with their examples, the context 512: take -c \1,"):
        choices.check_room(task, lm)


# --- llama-perplexity -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def multiple_choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-perplexity of the pinned sources, made to print what it computes for every answer."""
    sources = sorted(ROOT.glob("build/ggml-source/*/vendor/llama.cpp"))
    if not sources or not (LIBRARIES / "libllama-common.so").exists() or which("c++") is None:
        pytest.skip("the sources of llama.cpp, its libllama-common.so or a compiler is missing")
    folder = tmp_path_factory.mktemp("llama-perplexity")
    llama = sources[-1]
    for source in (llama / "tools/perplexity").glob("*.cpp"):
        text = source.read_text()
        shown = text.replace('//LOG("    <%s> : %g', 'LOG("    <%s> : %.6f')
        assert source.name == "main.cpp" or shown != text
        (folder / source.name).write_text(shown)
    includes = [f"-I{llama / name}" for name in ("common", "include", "ggml/include", "vendor")]
    linked = [f"-L{LIBRARIES}", "-lllama-common", "-lllama", "-lggml", "-lggml-base"]
    command = ["c++", "-O0", "-std=c++17", *includes, *map(str, folder.glob("*.cpp")), "-o", str(folder / "program")]
    subprocess.run([*command, *linked, "-lpthread"], check=True, capture_output=True, timeout=300)
    return folder / "program"


def task_file(path: Path, tasks: Sequence[tuple[str, Sequence[str], int]]) -> Path:
    """llama-perplexity's binary format: the number of tasks, where each begins, and the tasks."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<I", len(raw)) + raw

    bodies = []
    for question, answers, right in tasks:
        labels = [int(i == right) for i in range(len(answers))]
        one = struct.pack("<I", len(answers)) + b"".join(map(text, answers)) + struct.pack(f"<{len(labels)}i", *labels)
        bodies.append(text(question) + one + struct.pack("<I", 0))
    places = np.cumsum([4 + 4 * len(bodies), *map(len, bodies[:-1])]).astype(np.uint32)
    path.write_bytes(struct.pack("<I", len(bodies)) + places.tobytes() + b"".join(bodies))
    return path


def test_the_same_numbers_as_llama_perplexity(multiple_choice: Path, path: Path, lm: LM, tmp_path: Path) -> None:
    items = [
        ("it was the number of the", ["people", "number of it", "time that is", "in"], 1),
        ("the question is", ["that the people", "that the number", "in time"], 0),
        ("to be or not to be", ["was a question of time", "is the question"], 1),
    ]
    file = task_file(tmp_path / "tasks.bin", items)
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    options = ["--multiple-choice", "-bf", file, "-c", 512, "-np", 8, "-t", 1, *exact]
    command = [str(x) for x in (multiple_choice, "-m", path, *options)]
    env = os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES)}
    for _ in range(5):  # its log has a thread of its own, which the exit sometimes overtakes
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        printed = done.stdout + done.stderr
        theirs = [float(x) for x in re.findall(r"^    <.*> : (-?[\d.]+)$", printed, re.MULTILINE)]
        right = re.findall(r"^3\t([\d.]+)$", printed, re.MULTILINE)
        if len(theirs) == sum(len(choices_of) for _, choices_of, _ in items) and right:
            break
    objects = [{"question": q, "choices": c, "answer": answer} for q, c, answer in items]
    task = opened("choice", lines(tmp_path / "items.jsonl", *objects))
    records = choices.score(task, lm, task.items)
    own = [choice["per token"] for record in records for choice in record["choices"]]
    assert own == pytest.approx(theirs, abs=2e-4)
    accuracy = dict(choices.verdicts([records]))["per token"].mean()
    assert right == [f"{100 * accuracy:.8f}"]


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_scores_resumes_and_reports(path: Path, tmp_path: Path) -> None:
    word = {"subject": "words", "choices": ["of", "the", "people", "number"], "answer": "C"}
    file = lines(tmp_path / "test.jsonl", ORGAN, *({**word, "question": f"Which word, {i}?"} for i in range(5)))
    options = ("-m", path, "--task", f"mmlu:{file}", "-o", tmp_path / "out", "-t", 1, "-c", 512, "--unit-items", 2)
    both = ("--device", "npu,cpu")
    run(*options, *both)
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [(r["device"], r["figure"], r["items"]) for r in report["accuracy"]] == [
        (device, figure, 6) for device in ("npu", "cpu") for figure in choices.FIGURES
    ]
    assert [(s["subject"], s["items"]) for s in report["subjects"]] == [("all", 6), ("anatomy", 1), ("words", 5)] * 2
    assert len(report["comparisons"]) == 3
    (chart,) = Page((tmp_path / "out/report.html").read_text()).data
    assert [m[1] for m in chart["series"][0]["marks"]] == pytest.approx([100 * r["value"] for r in report["accuracy"]])
    text = (tmp_path / "out/report.md").read_text()
    assert "choices scored by their likelihood" in text
    assert "| anatomy | 1 |" in text
    results = (tmp_path / "out/results.jsonl").read_bytes()
    log = (tmp_path / "out/log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out/log.jsonl").write_text("".join(log[:-1]))  # the last unit is lost
    run(*options, *both)
    assert (tmp_path / "out/results.jsonl").read_bytes() == results
    assert not list((tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize(
    ("option", "name"),
    [(("--budget", 4), "--budget"), (("--scorer", "logprob"), "--scorer"), (("--method", "vote"), "--method")],
)
def test_what_samples_is_refused(path: Path, tmp_path: Path, option: tuple[object, ...], name: str) -> None:
    file = lines(tmp_path / "sky.jsonl", SKY)
    said = run("-m", path, "--task", f"choice:{file}", "-o", tmp_path / "out", *option, code=1)
    assert f"nothing is sampled: leave out {name}" in " ".join(said.split())
    assert not os.path.exists(tmp_path / "out")


def test_options_that_change_nothing_are_one_task(tmp_path: Path) -> None:
    file = lines(tmp_path / "sky.jsonl", SKY)
    options = TaskOptions(f"choice:{file}")
    assert open_task(options).digest == open_task(replace(options, item_seed=9)).digest
