"""tilebeam chat: on a terminal of its own, and line by line through a pipe. Models are tiny and random."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Ran, ok
from gguf_kit import with_metadata
from process_kit import command, environment
from tilebeam import LM, TilebeamError
from tilebeam.gguf import gguf_write as w

from bench.lib.synth import preset, write_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
QUICK = ["--device", "cpu", "-t", 1, "-c", 1024, "-np", 4, "-s", 3]
PROMPT = r"(?m)^>"
DEADLINE = 60.0  # seconds, for a loaded machine


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    shape = preset("tiny", n_layer=1, type="f32", controls=("<|im_start|>", "<|im_end|>"))
    return write_model(folder / "base.gguf", shape)


@pytest.fixture(scope="module")
def model(base: Path) -> Path:
    key = "tokenizer.chat_template"
    return with_metadata(base, base.with_name("m.gguf"), {key: w.kv_text(key, TEMPLATE)})


# --- through a pipe ---------------------------------------------------------------------------------------------------


def talk(model: Path, *lines: str, **changes: Any) -> Ran:
    flags = [*QUICK, "-n", changes.pop("n", 6), *changes.pop("flags", [])]
    return ok("chat", "-m", model, *flags, stdin="".join(f"{line}\n" for line in lines))


def saved(path: Path) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in json.loads(path.read_text())]


def test_each_line_is_answered_and_kept(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    said = talk(model, "", "the cat", " /think is no command", f"/save {file}", flags=["-sys", "be brief"])
    history = saved(file)
    assert [role for role, _ in history] == ["system", *["user", "assistant"] * 2]
    assert [text for role, text in history if role != "assistant"] == ["be brief", "the cat", " /think is no command"]
    assert said.out == "".join(f"{text}\n" for role, text in history if role == "assistant")
    assert "\x1b" not in said.out + said.err
    assert talk(model, "the cat", " /think is no command", flags=["-sys", "be brief"]).out == said.out
    first = talk(model, flags=["-sys", "be brief", "-p", "the cat"])
    assert said.out.startswith(first.out)


def test_commands_change_the_conversation(model: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    lines = ["the cat", f"/save {a}", "/regen", f"/save {b}", "/system in verse", "/reset", f"/save {c}"]
    talk(model, *lines, f"/load {a}", "/system", "and the dog", f"/save {a}", n=20)
    (_, answer), (_, other) = saved(b)[1], saved(a)[1]
    assert answer != other  # drawn anew, from the same question
    assert saved(b)[0] == saved(a)[0] == ("user", "the cat")
    assert saved(c) == [("system", "in verse")]
    assert [role for role, _ in saved(a)] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(("name", "flags"), [("/think", []), ("/best", []), ("/best", ["--scorer", "judge"])])
def test_the_winner_of_several_answers_is_the_answer(name: str, flags: list[str], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    said = talk(
        model, f"{name} 3 the cat", f"/save {file}", f"{name} 2", f"/save {file}", flags=["--extract", "text", *flags]
    )
    assert [role for role, _ in saved(file)] == ["user", "assistant"]  # the question was asked once
    assert said.out.endswith(f"{saved(file)[1][1]}\n")
    assert [int(n) for n in re.findall(r"^#(\d) (?:cut|ended) after", said.err, re.MULTILINE)].count(0) == 2
    assert len(re.findall(r"^#\d (?:cut|ended) after", said.err, re.MULTILINE)) == 5
    assert ("votes: " in said.err) == (name == "/think")
    assert len(re.findall(r"^#\d rated", said.err, re.MULTILINE)) == (0 if name == "/think" else 5)


def test_think_asks_for_programs_where_they_can_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    prepare = LM.prepare_chat

    def noted(lm: LM, messages: Any, *rest: Any) -> Any:
        seen.append([m["content"] for m in messages])
        return prepare(lm, messages, *rest)

    monkeypatch.setattr(LM, "prepare_chat", noted)
    talk(model, "/think 2 the cat", "/best 2", "/system in verse", "/think 2", n=4)
    asks, plain, verse = seen
    assert "```output" in "".join(asks)
    assert asks[-1] == "the cat"
    assert (plain, verse) == (["the cat"], ["in verse", "the cat"])

    def refused(**_: bool) -> None:
        raise TilebeamError("They cannot be confined.")

    monkeypatch.setattr("tilebeam.sandbox.need_confinement", refused)
    talk(model, "/think 2 the cat", n=4)
    assert seen[-1] == ["the cat"]


def test_a_number_in_front_of_a_sum_belongs_to_the_question(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    said = talk(model, "/best 3 + 4?", f"/save {file}", "/best 2 3 + 4?", n=4)
    assert saved(file)[0] == ("user", "3 + 4?")
    assert len(re.findall(r"^#\d rated", said.err, re.MULTILINE)) == 8 + 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/thnk 4", "no /thnk; /help lists"),
        ("/regen", "Nothing was asked yet"),
        ("/best 0 the cat", "at least one"),
        ("/best " + "9" * 5000, "context"),  # more digits than Python makes a number of
        ("/save", "Name the file"),
        ("/save /no/such/folder/t.json", "No such file"),
        ("/load /no/such/file", "No such file"),
        (f"/load {__file__}", "not JSON"),
        pytest.param("the cat " * 400, "/reset begins anew", id="long"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(line: str, words: str, model: Path) -> None:
    flags = [*QUICK, "-n", 4, "-c", 512]
    ran = Ran("chat", "-m", model, *flags, stdin=f"{line}\nthe dog\n")
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert ran.code == 1  # for scripts
    assert ran.out == ok("chat", "-m", model, *flags, stdin="the dog\n").out


def test_a_full_context_is_said_and_nothing_is_dropped(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    flags = [*QUICK, "-c", 256, "--temp", 0]
    ran = Ran("chat", "-m", model, *flags, stdin=f"the cat\nmore\n/save {file}\n/reset\nthe cat\n")
    assert "the context is full; /reset" in ran.err
    assert "the context 256: no answer fits in" in ran.err
    assert [text for role, text in saved(file) if role == "user"] == ["the cat"]
    first, second = ran.out[: len(ran.out) // 2], ran.out[len(ran.out) // 2 :]
    assert first == second


def test_templates_decide_what_a_conversation_may_be(model: Path, base: Path, tmp_path: Path) -> None:
    refused = Ran("chat", "-m", base, *QUICK, stdin="hi\n")
    assert refused.code == 1
    assert "no chat template: it is a base model. tilebeam generate" in refused.err
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]))
    ran = Ran("chat", "-m", model, *QUICK, "-n", 2, stdin=f"/load {bad}\n")
    assert "system comes first" in ran.err


def test_thoughts_have_a_budget(model: Path, tmp_path: Path) -> None:
    key, message = "tokenizer.chat_template", "\nTime is up.\n"
    thinks = with_metadata(model, tmp_path / "thinks.gguf", {key: w.kv_text(key, TEMPLATE + "<think>\n")})
    budget = ["--reasoning-budget", 4, "--reasoning-budget-message", message.replace("\n", "\\n")]
    text = ok("generate", "-m", thinks, *QUICK, "-p", "hi", "-n", 40, *budget).out
    assert text.count(f"{message}</think>") == 1
    said = talk(thinks, "hi", n=40, flags=budget)
    assert message.strip() not in said.out
    assert said.out.strip() in text.partition("</think>")[2]
    assert "no effect" not in said.err
    free = ok("generate", "-m", thinks, *QUICK, "-p", "hi", "-n", 40, "--reasoning-budget", -1).out
    assert message not in free
    for words in (["generate"], ["chat"], ["vote", "-N", 2]):
        ran = ok(*words, "-m", model, *QUICK, "-p", "hi", "-n", 4, "--reasoning-budget", 2, stdin="")
        assert ran.err.count("--reasoning-budget has no effect") == 1
    Ran("generate", "-m", model, "-p", "hi", "--reasoning-budget", -2).fails_with("--reasoning-budget", code=2)


def test_an_answer_is_forced(model: Path) -> None:
    forced = ["--force-answer", "\\n#### "]
    text = ok("generate", "-m", model, *QUICK, "-p", "hi", "-n", 90, *forced, "--temp", 0).out
    assert text.count("\n#### ") == 1
    vote = ok("vote", "-m", model, *QUICK, "-p", "hi", "-n", 50, "-N", 3, *forced)
    assert vote.out.startswith("\n#### ")  # there is no room for more


# --- on a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A chat on a terminal of its own, which tests type into."""

    def __init__(self, *arguments: object, **changes: str) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")  # 40 x 120
        env = environment(TERM="xterm", **changes)
        self.process = subprocess.Popen(
            command("tilebeam", "chat", *map(str, arguments)),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._seen = ""

    def until(self, pattern: str, keys: str = "") -> str:
        """What is shown up to the pattern, without escape codes; keys are typed again each second."""
        end = time.monotonic() + DEADLINE
        while not (found := re.search(pattern, self._seen)):
            assert time.monotonic() < end, self._seen
            ready, _, _ = select.select([self._fd], [], [], 1.0)
            if not ready:
                self.type(keys)
            else:
                data = os.read(self._fd, 1 << 16)
                if b"\x1b[6n" in data:  # where is the cursor?
                    os.write(self._fd, b"\x1b[40;1R")
                self._seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def ask(self, line: str) -> str:
        self.type(f"{line}\r")
        return self.until(r"context \d+ of \d+")

    def leave(self) -> int:
        """Ctrl-D; the exit status."""
        self.until(PROMPT)
        self.type("\x04")
        status = self.process.wait(DEADLINE)
        os.close(self._fd)
        return status


def _own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a job in the background ignores
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(params=["prompt_toolkit", "without"])
def changes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment, once without prompt_toolkit."""
    if request.param == "without":
        (tmp_path / "prompt_toolkit.py").write_text("raise ImportError")
        yield {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"}
    else:
        pytest.importorskip("prompt_toolkit", reason="prompt_toolkit is not installed (extra chat)")
        yield {}


def test_a_conversation_on_a_terminal(model: Path, changes: dict[str, str]) -> None:
    terminal = Terminal("-m", model, *QUICK, "-n", 8, **changes)
    terminal.until("Ctrl-D leaves")
    terminal.until(PROMPT)
    read = [int(n) for n in re.findall(r"(\d+) tokens read, (\d+) kept", terminal.ask("the cat and the dog"))[0]]
    again = [int(n) for n in re.findall(r"(\d+) tokens read, (\d+) kept", terminal.ask("the cat and the dog"))[0]]
    assert read[1] == 0
    assert again[1] >= read[0]  # the first turn stayed in the context
    assert again[0] < 2 * read[0]
    shown = terminal.ask("/think 3")
    assert len(re.findall(r"#\d (?:cut|ended) after", shown)) == 3
    terminal.until(PROMPT)
    terminal.type("half")
    terminal.until("half")
    terminal.until("Ctrl-D leaves", "\x03")  # input() does not hear what comes before it waits
    assert terminal.leave() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(model: Path, changes: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    terminal = Terminal("-m", model, *QUICK, "-c", 65536, "--temp", 0, **changes)  # greedy, it goes on and on
    terminal.until(PROMPT)
    terminal.type("the dog\r")
    terminal.until(r"the dog\s+\S")
    time.sleep(0.3)
    terminal.type("\x03")
    said = re.search(r"(\d+) written.*context (\d+) of 65536", terminal.until(r"of 65536"))
    assert said
    assert 0 < int(said[1]) < 60000
    terminal.until(PROMPT)
    terminal.type("/think 2\r")
    terminal.until("candidates")
    time.sleep(0.5)
    terminal.type("\x03")
    terminal.until("stopped")
    terminal.until(PROMPT)
    terminal.type(f"/save {file}\r")
    assert terminal.leave() == 0
    assert [role for role, _ in saved(file)] == ["user", "assistant"]  # what there was of the first answer
