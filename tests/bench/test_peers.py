"""What bench/peers.py reads off other engines, and which of its rounds count."""

from __future__ import annotations

from pathlib import Path

import pytest
from tilebeam.measure.throughput import Case

from bench import peers
from bench.lib import rounds
from bench.lib.batched_bench import BatchedBench
from bench.lib.engines import Work
from bench.lib.speculative_program import SpeculativeProgram

# What llama-batched-bench prints; here prompts take 2.5 s and decoding 0.25 s.
TABLE = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     16 |    8 |   1152 |    2.500 |   409.60 |    0.250 |   512.00 |    2.750 |   418.91 |
"""
DECODED = "encoded   20 tokens in    0.100 seconds, speed: 200 t/s\ndecoded   40 tokens in    2.000 seconds\n"
SUMMARY = '{"row_type": "attempt"}\n{"row_type": "summary", "successes": 1, "generated": 30, "decode_s": 1.5}\n'


def program(folder: Path, name: str, output: str, status: int = 0, stream: int = 1) -> Path:
    """It keeps its arguments, prints the output on a stream (ik_llama.cpp's on the second), ends with the status."""
    path = folder / name
    (folder / "output").write_text(output)
    path.write_text(f'#!/bin/sh\necho "$@" > "{folder}/arguments"\ncat "{folder}/output" >&{stream}\nexit {status}\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("stream", [1, 2])
def test_a_prompt_has_its_own_time(tmp_path: Path, stream: int) -> None:
    engine = BatchedBench(program(tmp_path, "llama-batched-bench", TABLE, stream=stream), ("-rtr",))
    assert engine.seconds(Path("m.gguf"), Case(128), 2) == 2.5
    assert engine.seconds(Path("m.gguf"), Case(0, 16, 8, n_depth=128), 2) == 0.25
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-npp") + 1 :][:5] == ["128", "-ntg", "16", "-npl", "8"]
    assert arguments[-1] == "-rtr"


@pytest.mark.parametrize(("output", "status"), [("", 0), (TABLE, 1), (TABLE + TABLE, 0)])
def test_a_run_without_one_line_of_figures_fails(tmp_path: Path, output: str, status: int) -> None:
    engine = BatchedBench(program(tmp_path, "llama-batched-bench", output, status))
    with pytest.raises(RuntimeError, match=f"llama-batched-bench ended with status {status} and no line of figures"):
        engine.seconds(Path("m.gguf"), Case(128), 2)


def test_figures_of_programs_that_guess(tmp_path: Path) -> None:
    simple = SpeculativeProgram.parse(f"'{program(tmp_path, 'llama-speculative-simple', DECODED)}' --draft-max 4")
    assert simple.run(Path("m.gguf"), Path("d.gguf"), "a prompt", 40, 2, 512) == (40, 2.0)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-md") :][:4] == ["-md", "d.gguf", "--spec-type", "draft-simple"]
    lookup = SpeculativeProgram(program(tmp_path, "llama-lookup", DECODED))
    assert lookup.run(Path("m.gguf"), Path("d.gguf"), "p", 40, 2, 512) == (40, 2.0)
    assert "-md" not in (tmp_path / "arguments").read_text().split()
    ik = SpeculativeProgram(program(tmp_path, "llama-spec-bench", SUMMARY))
    assert ik.run(Path("m.gguf"), None, "p", 40, 2, 512) == (30, 1.5)
    silent = SpeculativeProgram(program(tmp_path, "llama-lookup", ""))
    with pytest.raises(RuntimeError, match="llama-lookup ended with status 0 and no figures"):
        silent.run(Path("m.gguf"), None, "p", 4, 1, 512)


def test_a_round_whose_difference_is_noise_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LONG", 1e9)
    work = Work(2, 10, 6)
    group = peers.Group(Path("a.gguf"), 2, (work,))
    log = rounds.Rounds(None, {})
    figures = {"Tilebeam, read": 2.0, "Tilebeam, decode": 1.0, "stock, read": 4.0}
    for decode in ({"stock, decode": 5.0}, {}, {"stock, decode": 3.0}):
        assert log.begin(group.label(work))
        log.end(**figures, **decode)
    read, decoded = peers.rows_of([group], log, peers.Peers())
    assert (read["rounds"], read["ratio"], read["value"]) == (3, 2.0, 10.0)
    assert (decoded["rounds"], decoded["ratio"], decoded["value"], decoded["baseline"]) == (2, 4.0, 10.0, 2.5)
