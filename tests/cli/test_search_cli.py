"""tilebeam best-of-n, vote, beam, dvts, adaptive: options, output, and errors. Models are tiny and random."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from cli_kit import Ran, ok, record
from gguf_kit import with_metadata
from html_kit import Page
from rich.cells import cell_len
from tilebeam import (
    CompletionOutput,
    Prompt,
    SamplingParams,
    SearchResult,
    TilebeamError,
    Trajectory,
    Usage,
    VoteResult,
)
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.cli import search_view
from tilebeam.cli.options import ForcingOptions, SamplingOptions, TextOptions, TokenOptions, grouped, option
from tilebeam.gguf import gguf_write
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.contract import Pruned
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

PRM = ["--reward-kind", "token", "--reward-tag", "?", "--reward-labels", "1,2"]
QUICK = ["-n", 8, "-t", 1, "--device", "cpu", "-s", 3, "-c", 1024]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "tiny.gguf", preset("tiny", arch="qwen3", n_layer=2))


# --- what they do -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["beam", "dvts"])
def test_search_by_steps(command: str, model: Path) -> None:
    flags = [command, "-m", model, "--prm", model, *PRM, "-p", "the cat", "-N", 4, "--beam-width", 2, "--max-steps", 3]
    flags += ["--step-stop", "e", "--max-step-tokens", 3, "--aggregate", "prod", *QUICK]
    found = record(*flags)
    assert found["device"] == "cpu"
    assert found["budget"] == 4
    assert len(found["candidates"]) == len(found["scores"]) == len(found["trajectories"])
    for candidate, trajectory, score in zip(found["candidates"], found["trajectories"], found["scores"], strict=True):
        assert "".join(trajectory["steps"]) == candidate["text"]
        assert len(candidate["token_ids"]) <= 8
        assert score == pytest.approx(math.prod(trajectory["scores"]))
        assert all(0 < s < 1 for s in trajectory["scores"])
    rivals = [s for s, t in zip(found["scores"], found["trajectories"], strict=True) if t["finished"]]
    assert found["scores"][found["best_index"]] == max(rivals or found["scores"])
    assert found["usage"]["scored_tokens"] > 0
    text = ok(*flags, "-v")
    assert "scored" in text.err
    assert text.out == found["text"] + "\n"
    lines = [line for line in text.err.splitlines() if "[" in line]
    assert sum("> " in line for line in lines) == 1
    for i, score in enumerate(found["scores"]):
        assert sum(f"{i}: {score:.3f}, " in line for line in lines) == 1
    assert text.err.count("pruned") == len(found["pruned"])
    voted = record(*flags, "--extract", "text")
    assert voted["candidates"] == found["candidates"]
    assert voted["answer"] == max(voted["votes"], key=voted["votes"].__getitem__)
    assert 0 < sum(voted["votes"].values()) <= sum(found["scores"]) + 1e-9


@pytest.mark.parametrize(
    ("looping", "told"),
    [
        ([[0, 0, 0]], ""),
        ([[1, 0, 1]], "candidates 0, 2 repeat themselves\n"),
        ([[1, 0], [1, 1]], "3 of 4 candidates repeat themselves\n"),
    ],
)
def test_loops_are_told(looping: list[list[int]], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["It is blue.", "It is blue. " * 20]
    groups = [[CompletionOutput(i, texts[loops], [1], "stop", 0) for i, loops in enumerate(g)] for g in looping]
    search_view.tell_loops([SearchResult("p", g, [0.0] * len(g), 0, Usage(), 0, len(g), []) for g in groups])
    assert capsys.readouterr().err == told


def test_best_of_n_and_vote_with_a_reward_model(model: Path) -> None:
    reward = ["--prm", model, *PRM, "--aggregate", "min", "--step-stop", "e"]
    best = record("best-of-n", "-m", model, *reward, "-p", "the cat", "-N", 4, *QUICK)
    assert best["scores"][best["best_index"]] == max(best["scores"])
    assert all(0 < s < 1 for s in best["scores"])
    vote = record("vote", "-m", model, *reward, "-p", "the cat", "-N", 4, "--extract", "text", *QUICK)
    assert vote["scores"] == pytest.approx(best["scores"])
    assert sum(vote["votes"].values()) == pytest.approx(sum(vote["scores"]))
    flags = ["vote", "-m", model, *reward, "-p", "the cat", "-N", 3, "--extract", "text", *QUICK]
    assert "weight" in ok(*flags, "-v").err
    assert "weight" not in ok(*flags).err


def test_adaptive_stops(model: Path) -> None:
    flags = ["adaptive", "-m", model, "-p", "the cat", "-N", 12, "--extract", r"(?s).*()", *QUICK]
    silent = Ran(*flags, "--confidence", 0.9, "--json")
    assert (silent.code, len(json.loads(silent.out)["candidates"])) == (1, 12)
    assert json.loads(silent.out)["answer"] is None  # an empty group is no answer
    assert "No candidate has an answer" in silent.err
    assert Ran(*flags).out.endswith("answer: none\n")
    greedy = ["adaptive", "-m", model, "-p", "the cat", "-N", 12, "--extract", "text", "--temp", 0, *QUICK]
    found = record(*greedy)
    assert (len(found["candidates"]), found["settled"]) == (4, True)
    assert found["confidence"] == 1 - 0.5**5  # all were cut
    told = ok(*greedy)
    assert "settled after 4 of 12 candidates, confidence 0.969" in told.err
    assert told.out == f"{found['text']}\nanswer: {found['answer']}\n"
    weighed = record(*greedy, "--prm", model, *PRM)
    assert sum(weighed["scores"]) == pytest.approx(sum(weighed["votes"].values()))


@pytest.mark.parametrize("command", ["vote", "beam"])
def test_pages(command: str, model: Path, tmp_path: Path) -> None:
    """The page says what --json says."""
    file = tmp_path / "out.html"
    flags = [command, "-m", model, "-p", "the <cat>", "-N", 4, "--html", file, *QUICK]
    if command == "beam":
        flags += ["--prm", model, *PRM, "--beam-width", 2, "--max-steps", 3, "--step-stop", "e"]
    found = record(*flags)
    page = Page(file.read_text())
    assert page.texts["pre"][0] == "the <cat>"
    assert page.texts["pre"][1].strip() in ("(empty)", found["text"].replace("\0", "\ufffd").strip())
    shown = [row["id"] for row in page.named("tr") if "id" in row]
    assert sorted(shown) == sorted(f"q0-c{i}" for i in range(len(found["candidates"])))
    assert {model.name, "cpu", str(found["seed"])} <= set(page.texts["dd"])
    flags[flags.index(file)] = tmp_path / "no" / "out.html"
    Ran(*flags).fails_with("No such file or directory", "no")


def test_judges(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.txt"
    template.write_text("{prompt}{answer} good? ")
    flags = ["-m", model, "-p", "the cat", "-N", 3, "--scorer", "judge", "--judge-template", template, *QUICK]
    best = record("best-of-n", *flags)
    assert best["usage"]["scored_tokens"] > 0
    assert all(0 <= s <= 1 for s in best["scores"])
    other = record("best-of-n", *flags, "--judge-model", model)
    assert other["scores"] == pytest.approx(best["scores"], abs=1e-3)


def test_examples_of_a_question_choose_programs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random model writes is no program; a question without a function is refused."""
    question = tmp_path / "question.txt"
    question.write_text("def f(x):\n    '''Double.\n    >>> f(1)\n    2\n    '''\n")
    flags = ["best-of-n", "-m", model, "-N", 2, "--scorer", "examples", *QUICK]
    found = record(*flags, "-f", question)
    assert found["scores"] == [0.0, 0.0]
    assert "begins with def" in Ran(*flags, "-p", "1 + 1").err
    monkeypatch.setattr("tilebeam.sandbox.need_confinement", _refuse)
    Ran(*flags, "-f", question).fails_with("no filter")


def _refuse(*, unsafe: bool) -> None:
    assert not unsafe
    raise TilebeamError("no filter")


def test_other_scorers_and_weights(model: Path) -> None:
    flags = ["-m", model, "-p", "the cat", "-N", 4, *QUICK]
    total = record("best-of-n", *flags, "--scorer", "logprob-sum")
    assert total["scores"] == pytest.approx([c["cumulative_logprob"] for c in total["candidates"]])
    vote = record("vote", *flags, "--weighting", "logprob", "--extract", "text")
    assert vote["scores"] == pytest.approx(
        [math.exp(c["cumulative_logprob"] / len(c["token_ids"])) for c in vote["candidates"]]
    )
    softmax = ["--weighting", "softmax", "--sharpness", 2, "--scorer", "tail-entropy"]
    shares = record("vote", *flags, *softmax, "--extract", "text")
    assert sum(shares["votes"].values()) == pytest.approx(1)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def instruct(model: Path) -> Path:
    """A model with a chat template."""
    options = preset("tiny", arch="qwen3", n_layer=2, controls=("<|im_start|>", "<|im_end|>"))
    plain = write_model(model.with_name("plain.gguf"), options)
    record = gguf_write.kv_text("tokenizer.chat_template", TEMPLATE)
    return with_metadata(plain, model.with_name("instruct.gguf"), {"tokenizer.chat_template": record})


@pytest.mark.parametrize("command", ["generate", "vote", "beam", "tir"])
def test_the_chat_template_of_the_file_is_the_default(command: str, instruct: Path, model: Path) -> None:
    flags = [command, "-p", "the cat", "-N", 2, *QUICK]
    if command == "beam":
        flags += ["--prm", model, *PRM, "--beam-width", 2, "--max-steps", 2, "--step-stop", "e"]
    if command in ("vote", "tir"):
        flags += ["--extract", "text"]
    chat = ok(*flags, "-m", instruct, "--json")
    prompt = json.loads(chat.out)["prompt"]
    assert prompt.endswith("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n")
    assert "chat template applied; --raw turns it off" in chat.err
    for raw in ("--raw", "--no-chat"):
        plain = ok(*flags, "-m", instruct, raw, "--json")
        assert json.loads(plain.out)["prompt"] == "the cat"
        assert "chat template applied" not in plain.err
    if command != "tir":
        assert json.loads(ok(*flags, "-m", model, "--json").out)["prompt"] == "the cat"
    shown = ok(*flags, "-m", instruct, *([] if command == "generate" else ["-v"]))
    assert "<|im" not in shown.out + shown.err
    assert ("the cat" in shown.err) == (command != "generate")


@pytest.mark.parametrize(
    ("given", "chat", "samples", "prompts", "most"),
    [
        (None, False, 4, 1, (4096 - 8) // 4),
        (None, False, 16, 9, (4096 - 8) // 16),
        (None, True, 16, 9, 1024),
        (None, True, 2, 1, (4096 - 8) // 2),
        (7, True, 16, 9, 7),
        (-1, False, 4, 1, None),
    ],
)
def test_texts_are_as_long_as_fits(given: int | None, chat: bool, samples: int, prompts: int, most: int | None) -> None:
    class Model:
        n_ctx, n_seq_max = 4096, 16

        def tokenize(self, text: str) -> list[int]:
            return [*text.encode()]

    drawing = SamplingOptions(text=TextOptions(tokens=TokenOptions(), n_predict=given, forcing=ForcingOptions()))
    asked = [Prompt("8 tokens", list(range(8)) if chat else None)] * prompts
    assert drawing.fitted(drawing.params(), Model(), asked, samples).max_tokens == most  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "tokens", "params", "steps", "said"),
    [
        ("llls", 256, 256, None, "3 of 4 candidates were cut at 256 tokens; -n 512 gives more room"),
        ("l", 1024, 1024, None, "1 of 1 candidates was cut at 1024 tokens; -n 2048 -c 4096 gives more room"),
        ("l", 1990, None, None, "1 of 1 candidates was cut at 1990 tokens; -c 4096 gives more room"),
        ("ls", 90, 256, 40, "1 of 2 candidates was cut after 40 steps; --max-steps 80 gives more room"),
        ("ss", 9, 256, None, ""),
    ],
)
def test_how_many_were_cut(
    ends: str, tokens: int, params: int | None, steps: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Model:
        n_ctx, chat_template = 2048, TEMPLATE

    reasons: dict[str, Any] = {"l": "length", "s": "stop"}
    texts = [CompletionOutput(i, "", [0] * tokens, reasons[end], i) for i, end in enumerate(ends)]
    sampling = SamplingParams(max_tokens=params)
    search_view.tell_cut("candidates", texts, sampling, Model(), steps)  # type: ignore[arg-type]
    assert capsys.readouterr().err.strip() == said


# --- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["beam"], ["process reward model", "--prm"]),
        (["dvts", "--orm", "MODEL", *PRM], ["process reward model", "--prm"]),
        (["beam", "--prm", "MODEL"], ["--reward-kind"]),
        (["beam", "--prm", "no.gguf"], ["no.gguf", "does not exist"]),
        (["beam", "--prm", "MODEL", *PRM, "-N", 6], ["multiple of beam_width (4), not 6"]),
        (["best-of-n", "--prm", "MODEL", *PRM, "--scorer", "judge"], ["not both"]),
        (["best-of-n", "--reward-tag", "?"], ["need a reward model", "--prm"]),
        (["best-of-n", "--aggregate", "min"], ["need a reward model", "--prm"]),
        (["best-of-n", "--prm", "MODEL", "--orm", "MODEL"], ["either with --prm or with --orm"]),
        (["best-of-n", "--judge-template", "a.txt"], ["--scorer judge"]),
        (["best-of-n", "--step-stop", "."], ["--step-stop", "--prm"]),
        (["best-of-n", "--scorer", "judge", "--judge-template", "no.txt"], ["no.txt"]),
        (["vote", "--weighting", "reward"], ["--prm, --orm or --reward-head"]),
        (["vote", "--prm", "MODEL", *PRM, "--weighting", "plain"], ["--weighting reward"]),
        (["vote", "--scorer", "logprob"], ["softmax"]),
        (["vote", "--sharpness", 2, "--weighting", "logprob"], ["softmax"]),
        (["vote", "--prm", "MODEL", *PRM, "--weighting", "softmax", "--scorer", "logprob"], ["not both"]),
        (["adaptive", "--step-stop", "."], ["--step-stop", "--prm"]),
        (["adaptive", "--weighting", "reward"], ["--prm, --orm or --reward-head"]),
        (["adaptive", "--prm", "MODEL", *PRM, "--weighting", "plain"], ["--weighting reward"]),
        (["adaptive", "--extract", "["], ["--extract", "regular expression"]),
        (["vote", "--extract", "numbr"], ["--extract", "'numbr': do you mean last-number?"]),
        (["vote", "--extract", "= [0-9]+"], ["--extract", "last-number, gsm8k", "without a group in parentheses"]),
    ],
)
def test_options_that_do_not_fit(flags: list[Any], words: list[str], model: Path) -> None:
    command, *rest = (model if f == "MODEL" else f for f in flags)
    Ran(command, "-m", model, "-p", "x", *QUICK, *rest).fails_with(*words)


# --- how results look -------------------------------------------------------------------------------------------------


def candidates(*texts: str) -> list[CompletionOutput]:
    return [CompletionOutput(i, t, [1, 2], "stop" if i else "length", i) for i, t in enumerate(texts)]


def shown(result: SearchResult) -> list[str]:
    from tilebeam.cli import console

    screen = console.out()
    with screen.capture() as capture:
        screen.print(search_view.details(result, result.prompt))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(cell_len, lines)) <= screen.width
    return lines


def test_steps_that_candidates_share_are_one_branch() -> None:
    result = SearchResult(
        "what [is] 1+1?",
        candidates("a\nb\n", "a\nc\n", "a\nc\nd"),
        [0.2, 0.5, 0.9],
        2,
        Usage(),
        0,
        4,
        [
            Trajectory(("a\n", "b\n"), (0.7, 0.2), False),
            Trajectory(("a\n", "c\n"), (0.7, 0.5)),
            Trajectory(("a\n", "c\n", "d"), (0.7, 0.5, 0.9)),
        ],
        pruned=[Pruned(("[x]\n",), (0.1,), False, round=1, score=0.1, bar=0.7, tokens=2, step_tokens=2)],
    )
    assert shown(result) == [
        "what [is] 1+1?",
        "├── 0.700 a",
        "│   ├── 0.500 c  [1: 0.500, ended]",
        "│   │   └── 0.900 d  [> 2: 0.900, ended]",
        "│   └── 0.200 b  [0: 0.200, cut]",
        "└── 0.100 [x]  [pruned]",
    ]


def test_votes_show_their_tally(capsys: pytest.CaptureFixture[str]) -> None:
    same = {"usage": Usage(), "seed": 0, "budget": 8, "trajectories": [Trajectory((t,)) for t in "xyz"]}
    vote = VoteResult(
        "p",
        candidates(*"xyz"),
        [1.0] * 3,
        1,
        **same,
        answers=[None, "7", "7"],
        votes={"7": 2.0},
        answer=VotedAnswer("7"),
    )
    lines = shown(vote)
    assert "weight" not in lines[2]
    assert sum(">1 │" in line and "7" in line for line in lines) == 1
    settled = AdaptiveResult(**vars(vote), confidence=0.96875, settled=True)
    for result, more in ((vote, ""), (settled, "; settled after 3 of 8 candidates, confidence 0.969")):
        search_view.show(result, "what?", titled=True, verbose=False)
        told = capsys.readouterr()
        assert (told.out, told.err) == ("what?\ny\nanswer: 7\n", f"votes: 7 x2{more}\n")


# --- groups of options ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    one: Annotated[int, typer.Option("--one")]
    two: str = option("b", "-t", "--two")


@dataclass(frozen=True, kw_only=True)
class Group:
    pair: Pair
    four_five: int = option(0, min=0)


def test_groups_are_options_to_typer_and_dataclasses_to_the_command() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @grouped
    def command(group: Group, three: bool = option(False, "--three")) -> None:
        seen.append((group, three))

    run = CliRunner().invoke
    assert run(app, ["--one", "1", "--three", "--four-five", "4"]).exit_code == 0
    assert run(app, ["-t", "c", "--one", "2"]).exit_code == 0
    assert seen == [(Group(pair=Pair(one=1), four_five=4), True), (Group(pair=Pair(one=2, two="c")), False)]
    for wrong in (["--two", "c"], ["--one", "x"], ["--one", "1", "--four-five", "-1"]):  # --one is required
        assert run(app, wrong).exit_code == 2

    with pytest.raises(TypeError, match="two options one"):

        @grouped
        def twice(pair: Pair, one: int = option(1)) -> None:
            del pair, one
