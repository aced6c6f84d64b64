"""bench/speculation.py: its tasks and cases, and other engines' programs beside it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib import guessing_tasks, synth
from bench.lib.speculative_program import SpeculativeProgram
from bench.speculation import OWN, Case, cases

DECODED = "encoded   20 tokens in    0.100 seconds, speed: 200 t/s\ndecoded   40 tokens in    2.000 seconds\n"
SUMMARY = '{"row_type": "attempt"}\n{"row_type": "summary", "successes": 1, "generated": 30, "decode_s": 1.5}\n'


def program(folder: Path, name: str, output: str, status: int = 0) -> Path:
    """It keeps its arguments and the prompt beside itself, prints the output, and ends with the status."""
    path = folder / name
    (folder / "output").write_text(output)
    keep = f'echo "$@" > "{folder}/arguments"\nwhile [ "$1" != -f ]; do shift; done\ncat "$2" > "{folder}/prompt"'
    path.write_text(f'#!/bin/sh\n{keep}\ncat "{folder}/output"\nexit {status}\n')
    path.chmod(0o755)
    return path


def test_sixteen_prompts_of_a_task_differ() -> None:
    for task in (t for t in OWN if t != "noise"):
        texts = [guessing_tasks.own(task, i) for i in range(16)]
        assert len(set(texts)) == 16
        assert min(map(len, texts)) > 40


def test_problems_are_read_from_files_as_they_are_published(tmp_path: Path) -> None:
    gsm = tmp_path / "test.jsonl"
    gsm.write_text('{"question": "2+2?", "answer": "4 #### 4"}\n')
    human = tmp_path / "HumanEval.jsonl.gz"
    human.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f():\\n", "test": ""}\n'))
    assert guessing_tasks.from_file(gsm) == ["2+2?"]
    assert guessing_tasks.from_file(human)[0].endswith("\n\ndef f():\n")


def test_sequences_are_prompts_when_greedy_and_samples_otherwise() -> None:
    greedy, sampled = Case("chat", 4, 0), Case("chat", 4, 0.7)
    assert [list(c) for c in greedy.calls(4)] == [[0, 1, 2, 3]]
    assert [list(c) for c in sampled.calls(8)] == [[0], [1]]
    assert [list(c) for c in Case("chat", 1, 0).calls(3)] == [[0], [1], [2]]
    assert [list(c) for c in Case("edit", 1, 0).calls(3)] == [[0]]
    assert (greedy.params(8).n, sampled.params(8).n) == (1, 4)
    assert [c.temperature for c in cases(["noise", "chat"], [1], [0, 0.7])] == [3.0, 0, 0.7]


def test_figures_of_other_programs(tmp_path: Path) -> None:
    simple = SpeculativeProgram.parse(f"'{program(tmp_path, 'llama-speculative-simple', DECODED)}' --draft-max 4")
    assert simple.run(Path("m.gguf"), Path("d.gguf"), "a \\n prompt", 40, 2, 512) == (40, 2.0)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-md") :][:4] == ["-md", "d.gguf", "--spec-type", "draft-simple"]
    assert arguments[-2:] == ["--draft-max", "4"]
    assert (tmp_path / "prompt").read_text() == "a \\n prompt"
    ngrams = SpeculativeProgram(simple.program, ("--spec-type", "ngram-simple"))
    assert ngrams.run(Path("m.gguf"), Path("d.gguf"), "p", 40, 2, 512) == (40, 2.0)
    assert "-md" not in (tmp_path / "arguments").read_text().split()
    lookup = SpeculativeProgram(program(tmp_path, "llama-lookup", DECODED))
    assert lookup.run(Path("m.gguf"), Path("d.gguf"), "p", 40, 2, 512) == (40, 2.0)
    assert "-md" not in (tmp_path / "arguments").read_text().split()
    ik = SpeculativeProgram(program(tmp_path, "llama-spec-bench", SUMMARY))
    assert ik.run(Path("m.gguf"), None, "p", 40, 2, 512) == (30, 1.5)


@pytest.mark.parametrize(("output", "status"), [("", 0), (DECODED, 1)])
def test_a_program_without_figures_fails(tmp_path: Path, output: str, status: int) -> None:
    one = SpeculativeProgram(program(tmp_path, "llama-lookup", output, status))
    with pytest.raises(RuntimeError, match=f"llama-lookup ended with status {status} and no figures"):
        one.run(Path("m.gguf"), None, "p", 4, 1, 512)


def test_rows_name_all_sides(tmp_path: Path) -> None:
    model = synth.write_model(tmp_path / "tiny.gguf", synth.preset("tiny", arch="qwen2"))
    peer = program(tmp_path, "llama-lookup", DECODED)
    options = ["--quick", "-m", model, "-md", model, "-t", "1", "--only", "chat", "-npl", "1", "-n", "4", "--json"]
    command = [sys.executable, "-m", "bench.speculation", *options, "--peer", peer, "--resume", tmp_path / "r.jsonl"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == [f"chat, 1 prompt, T = 0, {source}" for source in ("look-up", "draft")]
    for row in rows:
        assert row["llama-lookup"] == 20.0
        assert row["stock"] > 0
        assert 0 <= row["accepted"] <= row["drafted"]
