"""Loads in which the NPU dies or stops, or which are interrupted, at points that they certainly reach: a sentence,
nothing stays loaded, and the next load works."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import process_kit
import pytest
from server_kit import until

from bench.lib.synth import preset, write_model

# Loads again and again, each time with a fault at a point; prints how each load ended, what is left of it, and whether
# the next one is right. {"tensors"}: within llama.cpp's load, at that call of its progress hook.
FAULTY = """
import json, os, signal, sys
import llama_cpp.llama_cpp as C
import tilebeam
from tilebeam.native.control import control

path, device, executor, points = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
options = {"device": device, "n_ctx": 256, "n_seq_max": 1, "threads": 1}
options |= {"executor": executor} if device == "npu" else {}
signal.signal(signal.SIGINT, signal.default_int_handler)

def said():
    with tilebeam.load(path, **options) as lm:
        return lm.generate("the question", max_tokens=4, temperature=0)[0].outputs[0].token_ids

def fault(kind):
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif (pid := control().status()["npu_pid"]) not in (0, os.getpid()):
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "kill":
            while os.path.exists(f"/proc/{pid}/exe") and open(f"/proc/{pid}/stat").read().split()[2] != "Z":
                pass

def on_call(number, kind, call):
    count = 0
    def counted(*args):
        nonlocal count
        count += 1
        if count == number:
            fault(kind)
        return call(*args)
    return counted

want, real = said(), (C.llama_progress_callback, C.llama_model_load_from_file, C.llama_init_from_model)
control().configure(deadline_ms=1500)
for kind, point in points:
    if isinstance(point, int):
        C.llama_progress_callback = lambda call: real[0](on_call(point, kind, call))
    elif point == "before context":
        C.llama_init_from_model = on_call(1, kind, real[2])
    else:
        def last(model, params):
            context = real[2](model, params)
            fault(kind)
            return context
        C.llama_init_from_model = last
    try:
        tilebeam.load(path, **options)
        how = ["loaded", ""]
    except BaseException as error:
        how = [type(error).__name__, str(error)]
    C.llama_progress_callback, C.llama_model_load_from_file, C.llama_init_from_model = real
    left = control().status()
    print(json.dumps([*how, left["buffers"], left["session"], said() == want]), flush=True)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "tiny.gguf", preset("tiny", type="q8_0"))


def endings(path: Path, device: str, executor: str, points: list[tuple[str, Any]]) -> list[list[Any]]:
    done = process_kit.python(FAULTY, path, device, executor, json.dumps(points), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("device", "executor"), [("npu", "process"), ("npu", "thread"), ("cpu", "")])
def test_interrupted(path: Path, device: str, executor: str) -> None:
    points = [("interrupt", at) for at in (1, 2, 9, "before context", "behind it")]
    assert endings(path, device, executor, points) == [["KeyboardInterrupt", "", 0, "none", True]] * len(points)


def test_a_handler_of_the_programs_own_is_called_and_the_load_goes_on(path: Path) -> None:
    code = (
        FAULTY.split("want, real")[0]
        + """
make, came = C.llama_progress_callback, []
C.llama_progress_callback = lambda call: make(on_call(2, "interrupt", call))
signal.signal(signal.SIGINT, lambda *given: came.append(given))
with tilebeam.load(path, **options):
    print(came, signal.getsignal(signal.SIGINT).__name__)
"""
    )
    done = process_kit.python(code, path, "cpu", "", "[]")
    assert (done.stdout, done.stderr) == ("[(<Signals.SIGINT: 2>, None)] <lambda>\n", "")


@pytest.mark.parametrize(
    ("kind", "why"),
    [("kill", r"killed by signal 9|was lost while .*tiny\.gguf was loaded"), ("stop", "the deadline of 1500 ms")],
)
def test_the_npu_is_lost(path: Path, kind: str, why: str) -> None:
    # Each that stands still is waited for until the deadline.
    points = [(kind, at) for at in ((1, 2, 9, "before context") if kind == "kill" else (2, "before context"))]
    for name, message, buffers, session, right in endings(path, "npu", "process", points):
        assert (name, buffers, session, right) == ("NpuError", 0, "none", True), message
        assert re.search(why, message)


STOPPED = (
    FAULTY.split("want, real")[0]
    + """
make = C.llama_progress_callback
C.llama_progress_callback = lambda call: make(on_call(1, "stop", call))
stop, fault = fault, lambda kind: (stop(kind), print(control().status()["npu_pid"], flush=True))
try:
    tilebeam.load(path, **options)
    print("loaded", flush=True)
except KeyboardInterrupt:
    C.llama_progress_callback = make
    print("interrupted", len(said()), flush=True)
"""
)


def test_signals_from_outside_while_the_load_waits_for_the_npu(path: Path) -> None:
    """Which stands still, so that the load cannot end before the signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(path), "npu", "process", "[]"],
            stdout=subprocess.PIPE,
            text=True,
            env=process_kit.environment(),
        ) as program:
            assert program.stdout is not None
            npu = int(program.stdout.readline())
            program.send_signal(number)
            if number == signal.SIGINT:
                os.kill(npu, signal.SIGCONT)
                assert program.stdout.read() == "interrupted 4\n"
            assert program.wait(60) == (0 if number == signal.SIGINT else -number)
        until(lambda pid=npu: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]


@pytest.mark.parametrize(("end", "why"), [("kill -9 $$", "signal 9"), ("exit 3", "exit code 3|exited with")])
def test_the_npu_is_lost_before_it_says_a_word(path: Path, tmp_path: Path, end: str, why: str) -> None:
    npud = tmp_path / "npud"
    npud.write_text(f"#!/bin/sh\n{end}\n")
    npud.chmod(0o755)
    code = """
import sys, tilebeam
from tilebeam.native.control import control
options, before = control()._options(), control()._options()
options.npud_path, options.deadline_ms = sys.argv[2].encode(), 1500
assert control()._call.configure(options) == 0
try:
    tilebeam.load(sys.argv[1], n_ctx=256, executor="process", threads=1)
except tilebeam.TilebeamError as error:
    print(error)
assert control()._call.configure(before) == 0
with tilebeam.load(sys.argv[1], n_ctx=256, executor="process", threads=1) as lm:
    print(len(lm.generate("a", max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids))
"""
    done = process_kit.python(code, path, npud, timeout=120)
    *said, last = done.stdout.strip().split("\n")
    assert (done.stderr, last) == ("", "2")
    assert "tiny.gguf" in said[0]
    assert re.search(why, said[0])
