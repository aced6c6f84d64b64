"""The command line: flags, output formats, and errors as one sentence. Models are tiny and random."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import process_kit
import pytest
from cli_kit import Ran, ok
from tilebeam.cli import bench as bench_cli
from tilebeam.cli import console
from tilebeam.cli.read_prompts import prompts
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.question_files import UserQuestion
from tilebeam.gguf.repack import pack
from tilebeam.measure import selftest
from tilebeam.measure.machine import OtherLoad, busy_note, cpu_seconds
from tilebeam.measure.throughput import Case, Runner, compare
from tilebeam.native import releases
from tilebeam.text_files import unescaped

from bench.lib import synth

GENERATING = ("generate", "best-of-n", "vote")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("cli") / "tiny.gguf", synth.preset("tiny", n_layer=2))


@pytest.fixture(scope="module")
def repacked(model: Path) -> Path:
    path = model.with_name("tiny-tiles.gguf")
    pack(model, path)
    return path


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_names_all_commands_and_needs_no_native_library(tmp_path: Path) -> None:
    environment = os.environ | {"TILEBEAM_LIB_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tilebeam", "--help"], capture_output=True, text=True, env=environment, check=True
    )
    for command in ("doctor", *GENERATING, "bench", "trace"):
        assert command in ran.stdout


def test_version() -> None:
    import tilebeam

    assert ok("--version").out == f"tilebeam {tilebeam.__version__}\n"


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["vote", "bench"])
def test_missing_model(command: str, tmp_path: Path) -> None:
    Ran(command, "-m", tmp_path / "no.gguf", "-p", 8, "--device", "cpu").fails_with("no.gguf", "does not exist")


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_file_that_is_no_model(device: str, tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no model at all")
    Ran("generate", "-m", junk, "-p", "x", "--device", device).fails_with("junk.gguf")


@pytest.mark.parametrize("command", ["generate", "vote"])
def test_prompt_is_needed_once(command: str, model: Path, tmp_path: Path) -> None:
    Ran(command, "-m", model).fails_with("-p", "-f")
    Ran(command, "-m", model, "-p", "x", "-f", tmp_path / "f").fails_with("-p", "-f")
    Ran(command, "-m", model, "-f", tmp_path / "missing.txt").fails_with("missing.txt")
    Ran(command, "-m", model, "-p", "").fails_with("empty")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        (
            '{"q": "x", "a": "y"}',
            'line 2 has no text under "prompt" or "question" or "problem" or "messages"; it has "q"',
        ),
        ("3", "line 2"),
        ('{"prompt": ""}', "line 2"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "line 2"),
    ],
)
def test_bad_prompt_lines_are_named(line: str, word: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    Ran("vote", "-m", model, "-f", file).fails_with("prompts.jsonl", word)


@pytest.mark.parametrize(
    "flags", [["--nonsense"], ["--device", "gpu"], ["-n", "many"], ["--temp", "-1"], ["-np", "257"], []]
)
def test_bad_flags_are_usage_errors(flags: list[str], model: Path) -> None:
    base = ["generate", "-p", "x"] + (["-m", str(model)] if flags else [])
    Ran(*base, *flags).fails_with("Usage", code=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cpu,gpu"], ["--device", "tilebeam and cpu, not 'gpu'"]),
        (["--device", "cpu,cpu"], ["twice"]),
        (["--device", ","], ["--device ','", "no device"]),
        (["--device", "cpu", "--devices", "2", "--memory-limit", "2G"], ["--devices, --memory-limit: for Tilebeam"]),
        (["--device", "tilebeam", "--cpu-model", "MODEL"], ["--cpu-model", "leaves the CPU aside"]),
        (["-p", "5x"], ["-p", "5x"]),
        (["-n", "1-8*1"], ["-n"]),
        (["-n", "8-1"], ["-n"]),
        (["-npl", "0"], ["sequences"]),
        (["-npl", "1,300", "-b", "512"], ["256"]),
        (["-npl", "16", "-b", "8"], ["-b 8", "16"]),
        (["-p", "0", "-n", "0"], ["nothing"]),
        (["-r", "0"], ["-r"]),
        (["-n", "1-1000000"], ["-n", "1000"]),
    ],
)
def test_bench_flags_that_make_no_sense(flags: list[str], words: list[str], model: Path) -> None:
    Ran("bench", "-m", model, *(model if flag == "MODEL" else flag for flag in flags)).fails_with(*words)


def test_base_model_has_no_chat_template(model: Path) -> None:
    ran = Ran("generate", "-m", model, "-p", "x", "--chat", "--device", "cpu")
    assert ran.code == 1
    assert "chat template" in ran.err


def test_an_interrupt_while_it_begins_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    path = f"{tmp_path}{os.pathsep}{process_kit.environment()['PYTHONPATH']}"
    done = process_kit.python("from tilebeam.__main__ import main\nmain()", PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_prompt_that_is_too_long_is_told_with_the_option_and_not_printed(model: Path) -> None:
    ran = Ran("generate", "-m", model, "-p", "the cat " * 400, "-c", 256, "--display-prompt", "--device", "cpu")
    assert (ran.code, ran.out) == (1, "")
    assert "shorten the prompt or give more of it with -c" in ran.err


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_DEBUG", "1")
    assert isinstance(Ran("bench", "-m", tmp_path / "no.gguf").exception, TilebeamError)


# --- generate, best-of-n, vote ----------------------------------------------------------------------------------------


def test_generate_prints_text_and_repeats_with_its_seed(model: Path) -> None:
    flags = ["generate", "-m", model, "-p", "the cat", "-n", 8, "--seed", 5, "--device", "cpu", "-t", 1]
    first, second = ok(*flags), ok(*flags)
    assert first.out == second.out
    assert "seed 5" in first.err
    assert "8 sampled tokens" in first.err
    record = json.loads(ok(*flags, "--json").out)
    assert first.out == record["outputs"][0]["text"] + "\n"  # in a pipe without its prompt
    assert ok(*flags, "--display-prompt").out == "the cat" + first.out
    assert record["seed"] == 5


def test_escapes_of_a_prompt_and_of_stop_strings(model: Path, tmp_path: Path) -> None:
    """As llama.cpp: expanded in what is typed unless --no-escape; files are taken as they are."""
    typed, real = r"Q:\t\x41\\n\nA: \d", "Q:\tA\\n\nA: \\d"
    flags = ["generate", "-m", model, "-n", 2, "--device", "cpu", "-t", 1, "--json"]
    assert json.loads(ok(*flags, "-p", typed).out)["prompt"] == real
    assert json.loads(ok(*flags, "-e", "-p", typed).out)["prompt"] == real
    assert json.loads(ok(*flags, "--no-escape", "-p", typed).out)["prompt"] == typed
    (tmp_path / "p.txt").write_text(typed)
    assert json.loads(ok(*flags, "-f", tmp_path / "p.txt").out)["prompt"] == typed
    assert json.loads(ok(*flags, "-p", "-", stdin=typed).out)["prompt"] == typed
    Ran(*flags, "-p", r"\xff").fails_with("UTF-8", r"\\xff")
    record = json.loads(ok("best-of-n", "-m", model, "-p", r"a\nb", "-N", 2, "-n", 2, "-t", 1, "--json").out)
    assert record["prompt"] == "a\nb"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"a\nb\rc\td", "a\nb\rc\td"),
        (r"\'\"", "'\""),
        (r"\\n", r"\n"),
        (r"\x41\x4A\xc3\xbc", "AJü"),
        (r"\x4", r"\x4"),
        (r"\xzz", r"\xzz"),
        ("\\d\\", "\\d\\"),
        ("ü \\ €", "ü \\ €"),
    ],
)
def test_escapes_mean_what_they_mean_to_llama_cpp(typed: str, meant: str) -> None:
    assert unescaped(typed) == meant


def test_generate_reads_json_lines(model: Path, tmp_path: Path) -> None:
    """The same reader as for the searches: a prompt a line, not one prompt of JSON."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n\n"the dog"\n')
    flags = ["generate", "-m", model, "-f", file, "-n", 3, "-N", 2, "-t", 1]
    records = [json.loads(line) for line in ok(*flags, "--json").out.splitlines()]
    assert [r["prompt"] for r in records] == ["the cat", "the dog"]
    assert [len(r["outputs"]) for r in records] == [2, 2]
    shown = ok(*flags).out
    assert shown.index("the cat") < shown.index("sample 1") < shown.index("the dog")
    file.write_text('{"q": "the cat", "question": ""}\n')
    assert json.loads(ok(*flags, "--field", "q", "--json").out)["prompt"] == "the cat"
    Ran(*flags).fails_with("prompts.jsonl line 1", "prompt")
    trace = ["trace", "-m", model, "-n", 2, "-t", 1, "-o", tmp_path / "t.json"]
    Ran(*trace, "-f", file).fails_with("prompts.jsonl line 1", "prompt")


def test_a_byte_order_mark_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Windows' editors write it: before lines of JSON, a prompt, what is compressed, and on stdin."""
    lines, text, packed = tmp_path / "p.jsonl", tmp_path / "p.txt", tmp_path / "p.jsonl.gz"
    lines.write_bytes('\ufeff{"prompt": "the cat"}\r\n"\ufeffthe\u2028dog"\r\n'.encode())
    text.write_bytes("\ufeffthe cat\r\n".encode())
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    said = [UserQuestion("the cat", id=1), UserQuestion("\ufeffthe\u2028dog", id=2)]
    assert prompts(None, lines, False) == prompts(None, packed, False) == said
    assert prompts(None, text, False) == [UserQuestion("the cat\n")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffthe cat"))
    assert prompts("-", None, False) == [UserQuestion("the cat")]


# --- bench ------------------------------------------------------------------------------------------------------------

FIELDS = (
    *("model_filename", "model_type", "model_size", "model_n_params", "device", "n_batch", "n_ubatch", "n_threads"),
    *("n_parallel", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
    *("ratio_vs_cpu", "samples_ns", "samples_ts"),
)
SHORT = ["-p", "8", "-n", "2", "-t", "1"]


def test_bench_json(model: Path) -> None:
    rows = json.loads(ok("bench", "-m", model, *SHORT, "-npl", "1,3", "-r", 2, "-o", "json", "-b", 64, "-ub", 32).out)
    assert [(r["n_prompt"], r["n_gen"], r["n_parallel"], r["device"]) for r in rows] == [
        (p, n, npl, device) for npl in (1, 3) for p, n in ((8, 0), (0, 2)) for device in ("cpu", "npu")
    ]
    for row in rows:
        assert set(FIELDS) <= row.keys()
        assert (row["n_batch"], row["n_ubatch"], row["n_threads"]) == (64, 32, 1)
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        tokens = row["n_parallel"] * (row["n_prompt"] + row["n_gen"])
        for nanoseconds, speed in zip(row["samples_ns"], row["samples_ts"], strict=True):
            assert speed == pytest.approx(tokens / nanoseconds * 1e9, rel=1e-3)
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
    for cpu, npu in zip(rows[::2], rows[1::2], strict=True):
        assert cpu["ratio_vs_cpu"] == 1.0
        pairs = sorted(a / b for a, b in zip(npu["samples_ts"], cpu["samples_ts"], strict=True))
        assert npu["ratio_vs_cpu"] == pytest.approx(sum(pairs) / 2)
        assert (npu["ratio_vs_cpu_min"], npu["ratio_vs_cpu_max"]) == pytest.approx((pairs[0], pairs[1]))
        assert cpu["executor"] is None
        assert npu["executor"] in ("thread", "process")


def test_progress_in_lines_comes_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.bar("generate") as progress:
        task = progress.add_task("", total=40, note="")
        for i in range(40):
            now += 1
            progress.update(task, completed=i, note=f"{i} t/s")
    lines = capsys.readouterr().err.splitlines()
    told = [re.fullmatch(r"generate (\d+)/40 \d:\d\d:\d\d left (\d+) t/s", line) for line in lines]
    assert [found and found.groups() for found in told] == [(f"{i}", f"{i}") for i in (9, 19, 29, 39)]


def test_bench_other_formats(model: Path) -> None:
    common = ["bench", "-m", model, *SHORT, "-r", 1, "--device", "cpu", "-o"]
    lines = [json.loads(line) for line in ok(*common, "jsonl").out.splitlines()]
    table = list(csv.DictReader(io.StringIO(ok(*common, "csv").out)))
    markdown = ok(*common, "md").out.splitlines()
    assert [r["n_gen"] for r in lines] == [0, 2]
    assert [r["n_gen"] for r in table] == ["0", "2"]
    assert set(table[0]) == {k for k in lines[0] if not k.startswith("samples_")}
    assert markdown[0].startswith("| model")
    assert "pp8" in markdown[2]
    assert "tg2" in markdown[3]
    assert len({line.count("|") for line in markdown[:4]}) == 1
    assert all(r["cpu_seconds_per_token"] > 0 for r in lines)


def test_bench_repacked_file_beside_the_ordinary_one(model: Path, repacked: Path) -> None:
    flags = [*SHORT, "-r", 1, "-o", "json", "--cpu-model", model]
    rows = json.loads(ok("bench", "-m", repacked, *flags).out)
    assert {(r["device"], Path(r["model_filename"]).name) for r in rows} == {
        ("cpu", "tiny.gguf"),
        ("npu", "tiny-tiles.gguf"),
    }
    refused = Ran("bench", "-m", repacked, *SHORT)
    assert refused.code == 1
    assert refused.err.splitlines()[-1].startswith(f"tilebeam: {repacked} is repacked")


def test_number_lists() -> None:
    assert bench_cli.numbers("512", "-p") == [512]
    assert bench_cli.numbers("1,2, 4", "-p") == [1, 2, 4]
    assert bench_cli.numbers("1-4", "-p") == [1, 2, 3, 4]
    assert bench_cli.numbers("1-8+3,9", "-p") == [1, 4, 7, 9]
    assert bench_cli.numbers("1-16*2", "-p") == [1, 2, 4, 8, 16]
    for bad in ("", "a", "1-", "-3", "1,,2", "1-4*1", "0-4*2", "4-1", "1-4+0", "1.5"):
        with pytest.raises(TilebeamError, match="-p"):
            bench_cli.numbers(bad, "-p")


# --- throughput -------------------------------------------------------------------------------------------------------


def test_runs_alternate_and_leave_the_model_usable(model: Path) -> None:
    import tilebeam

    order: list[tuple[str, bool]] = []
    with (
        tilebeam.load(model, device="cpu", n_ctx=256, n_seq_max=4, threads=1) as a,
        tilebeam.load(model, device="npu", n_ctx=256, n_seq_max=4, threads=1) as b,
    ):
        params = tilebeam.SamplingParams(max_tokens=6, temperature=0)
        before = b.generate("the cat", params)[0].outputs[0].token_ids
        case = Case(n_prompt=5, n_gen=3, n_parallel=4, n_depth=7, shared=True)
        costs = compare({"a": a, "b": b}, case, 3, on_run=lambda name, s: order.append((name, s is None)))
        assert b.generate("the cat", params)[0].outputs[0].token_ids == before
        assert {name: len(own) for name, own in costs.items()} == {"a": 3, "b": 3}
        assert all(cost.seconds > 0 and cost.cpu_seconds > 0 for own in costs.values() for cost in own)
        assert order == [("a", True), ("b", True)] + [("a", False), ("b", False)] * 3
        with pytest.raises(TilebeamError, match="cells"):
            Runner(a).run(Case(n_prompt=300))
        with pytest.raises(TilebeamError, match="sequences"):
            Runner(a).run(Case(n_gen=1, n_parallel=5))


def test_cases() -> None:
    assert Case(512).name == "pp512"
    assert Case(0, 128, 4).name == "tg128"
    assert Case(8, 4, 2, 100, True).name == "pp8+tg4 @ d100 shared"
    assert Case(8, 4, 2, 100).tokens == 24
    assert Case(8, 4, 2, 100).cells == 224
    assert Case(8, 4, 2, 100, True).cells == 124


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_json() -> None:
    assert "Everything works." in ok("doctor").out
    report = json.loads(ok("doctor", "--json").out)
    assert report["healthy"] is True
    assert report["versions"]["llama-cpp-python"] == releases.installed()
    assert report["abi"]["match"] is True
    assert [d["name"] for d in report["devices"]] == ["HMX0"]
    limits = report["limits"]
    assert 1 <= limits["threads"] <= limits["cores"] <= limits["cpus"]
    assert 0 < limits["memory"]["available"] <= limits["memory"]["total"]
    said = next(check["detail"] for check in report["checks"] if check["name"] == "limits")
    assert re.fullmatch(r"\d+ CPUs?.*: \d+ threads?; [\d.]+ of [\d.]+ GiB of memory available", said)
    assert report["kernel_sets"][-1] == "portable"
    assert {"thread", "process"} <= set(report["executors"]) <= {"thread", "process", "qemu-hexagon"}
    assert report["executors"]["process"]["own_process"] is True
    assert report["executors"]["thread"]["own_process"] is False
    process = report["executors"]["process"]
    assert process["guards"]["private"] is process["guards"]["parent"] is True
    assert not any(report["executors"]["thread"]["guards"].values())
    assert process["requests"] >= process["answers_while_spinning"]
    assert len(set(report["builds"].values())) == 1
    tested = {k["isa"] for k in report["kernels"]}
    assert tested == set(report["kernel_sets"])
    assert all(k["ok"] and k["nmse"] < report["nmse_limit"] for k in report["kernels"])


def test_doctor_says_what_to_do(tmp_path: Path) -> None:
    environment = os.environ | {"TILEBEAM_LIB_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tilebeam", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 1
    assert "FAIL" in ran.stdout
    assert "TILEBEAM_LIB_DIR" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=False)
    report = json.loads(ran.stdout)
    assert report["healthy"] is False
    assert all(c["advice"] for c in report["checks"] if not c["ok"])


def test_doctor_notices_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = selftest.KernelResult("portable", "mul_mat q4_0_col, 1 row", "gemm_x", 0.3)
    monkeypatch.setattr(selftest, "run", lambda: [wrong])
    ran = Ran("doctor", "--json")
    assert ran.code == 1
    [kernels] = [c for c in json.loads(ran.out)["checks"] if c["name"] == "kernels"]
    assert kernels["ok"] is False
    assert "mul_mat q4_0_col" in kernels["detail"]
    assert "TILEBEAM_ISA" in kernels["advice"]


def test_load_of_other_programs_is_told_from_the_own() -> None:
    with OtherLoad() as mine:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    assert 0 <= mine.share <= 1
    before, program = (
        cpu_seconds(),
        "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()",
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        running = cpu_seconds() - before
        child.communicate(b"\n")
    assert 0.25 < running <= cpu_seconds() - before + 0.02  # those that have ended count, too
    assert busy_note(0.05) is None
    note = busy_note(0.42)
    assert note is not None
    assert "42%" in note
