"""Files of prompts answered into files: `-o`, under kills, torn lines, full disks and other settings. Models are tiny
and random."""

from __future__ import annotations

import json
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import process_kit
import pytest
from cli_kit import Ran, ok
from gguf_kit import with_metadata
from lora_kit import write_adapter
from tilebeam.evaluation.log import GrowingFile
from tilebeam.gguf import gguf_write as w
from tilebeam.scoring.reward_heads import Head, save_head

from bench.lib.synth import preset, write_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
QUICK = ["--device", "cpu", "-t", 1, "-c", 2048, "-np", 8]
PRM = ["--reward-kind", "token", "--reward-tag", "?", "--reward-labels", "1,2", "--step-stop", "e"]
TALK = [{"role": "system", "content": "brief"}, {"role": "user", "content": "the bird"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    base = write_model(folder / "base.gguf", preset("tiny", arch="qwen3", n_layer=1, type="f32"))
    key = "tokenizer.chat_template"
    return with_metadata(base, folder / "m.gguf", {key: w.kv_text(key, TEMPLATE)})


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Questions by three names; the second line, which is the file's third, has no id."""
    return questions(
        tmp_path / "in.jsonl", {"id": "a", "question": "the cat"}, "", {"prompt": "the dog"}, {"messages": TALK}
    )


def questions(path: Path, *lines: Any) -> Path:
    path.write_text("".join((json.dumps(line) if line else "") + "\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[Any]:
    return sorted((r["id"] for r in results(path)), key=str)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", ["-N", 2]),
        ("vote", ["-N", 3, "--extract", "text"]),
        ("best-of-n", ["-N", 3]),
        ("adaptive", ["-N", 4, "--extract", "text"]),
        ("beam", ["-N", 4, "--prm", "MODEL", *PRM, "--max-steps", 2]),
        ("dvts", ["-N", 4, "--prm", "MODEL", *PRM, "--max-steps", 2]),
    ],
)
def test_each_prompt_gets_a_line(command: str, flags: list[Any], model: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    flags = [model if f == "MODEL" else f for f in flags]
    ran = ok(command, "-m", model, "-f", asked, "-o", out, *flags, *QUICK, "-n", 8, "-s", 3)
    assert ran.out == ""
    assert "seed 3" in ran.err
    found = {r["id"]: r for r in results(out)}
    assert {key: r["question"] for key, r in found.items()} == {"a": "the cat", 3: "the dog", 4: TALK}
    assert found[4]["prompt"] == "system: brief|user: the bird|"
    assert sum("setting" in r for r in found.values()) == 1
    printed = json.loads(ok(command, "-m", model, "-p", "the dog", *flags, *QUICK, "-n", 8, "-s", 3, "--json").out)
    assert printed.keys() == found[3].keys() - {"id", "question", "setting"}
    texts = [[t["text"] for t in r.get("candidates") or r["outputs"]] for r in (printed, found[3])]
    assert texts[0] == texts[1]


def test_the_same_command_goes_on(model: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["vote", "-m", model, "-f", asked, "-o", out, "-N", 2, "--extract", "text", "-n", 4, *QUICK]
    ok(*flags)
    whole = out.read_text()
    assert "3 of 3 results" in ok(*flags).err
    assert out.read_text() == whole
    lines = whole.splitlines(keepends=True)
    out.write_text(lines[0] + lines[1] + lines[2][:40])  # killed while it wrote
    ran = ok(*flags, "-np", 4)  # how the machine runs may differ
    assert "has 2 of 3 results; its last line was not complete and is dropped" in " ".join(ran.err.split())
    assert out.read_text().startswith(lines[0] + lines[1])
    assert ids(out) == [3, 4, "a"]
    assert len({r["seed"] for r in results(out)}) == 1  # as it was begun, though no --seed was given
    with asked.open("a") as file:
        file.write('{"question": "the cat"}\n{"id": "a", "question": "the cat"}\n')
    ok(*flags)
    assert ids(out) == [3, 4, 5, "a", "a"]
    assert out.read_text().count('"setting"') == 1
    ok(*flags, "--overwrite", "--temp", 0.5)
    assert out.read_text().count('"setting"') == 1
    assert not out.read_text().startswith(lines[0])


def test_other_settings_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    asked = questions(tmp_path / "in.jsonl", {"problem": "the cat"})
    out = tmp_path / "out.jsonl"
    flags = ["vote", "-m", model, "-f", asked, "-o", out, "-N", 2, "--extract", "text", "-n", 4, *QUICK]
    ok(*flags, "-s", 1)
    before = out.read_text()
    for changes, words in (
        (["--temp", 0.5], "--temp was 0.8, is 0.5"),
        (["-N", 3], "--n-samples was 2, is 3"),
        (["-s", 2], "--seed was 1, is 2"),
        (["--raw"], "--chat was null, is false"),
        (["-m", model.with_name("base.gguf")], "--model was "),
    ):
        ran = Ran(*flags, *changes)
        assert ran.code == 1
        assert words in ran.err
        assert "--overwrite" in ran.err
    ran = Ran("best-of-n", "-m", model, "-f", asked, "-o", out, "-N", 2, "-n", 4, *QUICK)
    assert '--extract was "text", is null' in ran.err
    assert 'command was "vote", is "best-of-n"' in ran.err
    assert out.read_text() == before
    Ran(*flags, "--html", tmp_path / "p.html").fails_with("--html", "-o")
    Ran(*flags[:-2][:5], "--overwrite", *QUICK).fails_with("--overwrite is for the file of -o")
    other = tmp_path / "other.jsonl"
    other.write_text('{"mine": 1}\n')
    assert "holds no results" in Ran(*flags, "-o", other).err
    other.write_text("mine\n")
    assert "line 1 is damaged" in Ran(*flags, "-o", other).err
    assert other.read_text() == "mine\n"


def test_files_count_by_what_they_hold(model: Path, asked: Path, tmp_path: Path) -> None:
    """An adapter or a head that was trained anew is another one, also under the same name."""
    head, adapter, out = tmp_path / "h.gguf", tmp_path / "a.gguf", tmp_path / "out.jsonl"
    n_embd = preset("tiny").n_embd

    def trained(seed: int) -> None:
        weights = np.random.default_rng(seed).normal(size=(1, n_embd)).astype(np.float32)
        save_head(head, Head(((weights, np.zeros(1, np.float32)),), features=("last",)))
        write_adapter(adapter, model, seed=seed)

    trained(1)
    flags = ["best-of-n", "-m", model, "-f", asked, "-N", 2, "-n", 4, "-s", 1, *QUICK]
    for option in (("--reward-head", head), ("--lora-scaled", f"{adapter}:0.5")):
        ok(*flags, *option, "-o", out, "--overwrite")
        assert "3 of 3 results" in ok(*flags, *option, "-o", out).err
        trained(2)
        assert f"other settings: {option[0].removesuffix('-scaled')} was" in Ran(*flags, *option, "-o", out).err
        trained(1)
        ok(*flags, *option, "-o", out, "--swa-full", "--cache-ram", 0, "--packed-cache", 0)


def test_what_another_process_writes_is_not_overwritten(model: Path, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with GrowingFile(out) as file:
        file.append({"id": "a"})
        flags = ["generate", "-m", model, "-f", asked, "-o", out, "--overwrite", "-n", 4, *QUICK]
        assert "Another process is writing" in Ran(*flags).err
        file.append({"id": "b"})
    assert ids(out) == ["a", "b"]


def test_results_go_to_no_device(model: Path, asked: Path) -> None:
    """What it holds is read first, which of a terminal or of /dev/zero has no end."""
    for device in ("/dev/ptmx", "/dev/zero"):
        ran = Ran("generate", "-m", model, "-f", asked, "-o", device, "-n", 4, *QUICK)
        assert f"tilebeam: {device} is not a regular file." in ran.err


def test_a_prompt_that_is_too_long_is_named_before_others_take_hours(model: Path, tmp_path: Path) -> None:
    asked = questions(tmp_path / "in.jsonl", {"prompt": "the cat"}, {"id": "long", "prompt": "the cat " * 3000})
    out = tmp_path / "out.jsonl"
    ran = Ran("generate", "-m", model, "-f", asked, "-o", out, "-n", 4, *QUICK)
    assert ran.code == 1
    assert "Prompt long: " in ran.err
    assert out.read_text() == ""


MANY = 60


def many(tmp_path: Path) -> Path:
    return questions(tmp_path / "many.jsonl", *({"prompt": f"question {i} the cat"} for i in range(MANY)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_it_has_lost_no_line(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["vote", "-m", model, "-f", many(tmp_path), "-o", out, "-N", 2, "--extract", "text", "-n", 60, *QUICK]
    process = process_kit.start("tilebeam", *map(str, flags))
    end = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    kept = out.read_bytes().count(b"\n")
    assert kept < MANY
    if number == signal.SIGINT:
        assert process.returncode == 130
        told = re.search(rf"Interrupted: (\d+) of {MANY} results are in", " ".join(said.split()))
        assert told
        assert kept - int(told[1]) in (0, 1)  # it may come when a line was just written
    assert f"{kept} of {MANY} results" in " ".join(ok(*flags).err.split())
    assert ids(out) == sorted(range(1, MANY + 1), key=str)


def test_a_full_disk_is_a_sentence(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["generate", "-m", model, "-f", many(tmp_path), "-o", out, "-n", 20, *QUICK]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))

    ran = process_kit.run("tilebeam", *map(str, flags), preexec_fn=limited)
    assert ran.returncode == 1
    assert f"tilebeam: {out}: File too large." in ran.stderr
    assert "Traceback" not in ran.stderr
    assert out.stat().st_size == 1 << 14
    ok(*flags)
    assert len(ids(out)) == len(set(ids(out))) == MANY
