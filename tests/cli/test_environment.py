"""The environment variables: those that the sources read are those that `tilebeam doctor` knows, TILEBEAM_NPU and
TILEBEAM_THREADS against their Python arguments, and what a wrong name or value leads to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import process_kit
import pytest
from tilebeam._ext.cpus import default_threads
from tilebeam.measure import doctor
from tilebeam.native import environment as variables

from bench.lib import synth

SCRIPT = """
import json, sys, tilebeam
from tilebeam.native.control import control
try:
    with tilebeam.load(sys.argv[1], n_ctx=256, n_seq_max=1, **json.loads(sys.argv[2])) as lm:
        lm.generate("the", tilebeam.SamplingParams(max_tokens=2))
        threads = control().status()["n_threads"] if lm.info.device == "npu" else 0
        numerics = [control().options()[name] for name in ("numerics", "softmax")] if threads else []
        print(json.dumps([lm.info.executor, lm.info.threads, threads, *numerics]))
except tilebeam.TilebeamError as error:
    print(json.dumps(str(error)))
"""
OVERRIDDEN = ("TILEBEAM_NPU", "TILEBEAM_THREADS", "TILEBEAM_NUMERICS", "TILEBEAM_SOFTMAX", "TILEBEAM_DETERMINISTIC")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", synth.preset("tiny", n_layer=1))


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"backend": ("*.cpp", "*.h", "*.c"), "ggml_ext": ("*.c", "*.h", "*.py")}
FOLDERS |= {"python/tilebeam": ("*.py",), "gguf_tools": ("*.py",)}
# In C the call, in Python any quoted name: some are constants that are used elsewhere.
READS = re.compile(r'(?:getenv\(|(?<=[\[( =]))"(TILEBEAM_[A-Z0-9_]+)"')


def test_doctor_knows_every_variable_that_is_read() -> None:
    read: set[str] = set()
    for folder, patterns in FOLDERS.items():
        for pattern in patterns:
            for file in (ROOT / folder).rglob(pattern):
                if file.name != "environment.py" and "hexagon" not in file.parts:
                    read |= set(READS.findall(file.read_text(encoding="utf-8")))
    assert read == set(variables.VARIABLES)


def test_doctor_shows_what_is_set_and_names_what_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def examined() -> tuple[doctor.Check, doctor.DoctorReport]:
        report = doctor.DoctorReport()
        report.attempt("environment", "advice", doctor._environment)
        return report.checks[0], report

    for name in list(os.environ):
        if name.startswith(variables.PREFIX):
            monkeypatch.delenv(name)
    assert examined()[0].detail == "set: nothing"
    monkeypatch.setenv("TILEBEAM_FUSE", "0")
    monkeypatch.setenv("TILEBEAM_API_KEY", "secret")
    monkeypatch.setenv("TILEBEAM_OF_ANOTHER_PROGRAM", "1")
    check, report = examined()
    assert check.ok
    assert "TILEBEAM_FUSE" in check.detail
    assert check.detail.endswith("not read by anything: TILEBEAM_OF_ANOTHER_PROGRAM")
    assert report.facts["environment"] == {"TILEBEAM_FUSE": "0", "TILEBEAM_API_KEY": "(set)"}
    monkeypatch.setenv("TILEBEAM_THREAD", "2")
    check, _ = examined()
    assert not check.ok
    assert check.detail == "TILEBEAM_THREAD is not read by anything: TILEBEAM_THREADS is"


def load(model: Path, environment: dict[str, str], **arguments: object) -> object:
    """What a fresh program finds: [executor, threads asked for, threads that the NPU has, and how it computes products
    and attention], or the error."""
    clean = {k: v for k, v in process_kit.environment().items() if k not in OVERRIDDEN}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=120,
        check=True,
    )
    return json.loads(run.stdout)


def test_the_variables_are_defaults(model: Path) -> None:
    threads = default_threads()
    assert load(model, {}) == ["thread", threads, threads, "int8", "table"]
    assert load(model, {"TILEBEAM_NPU": "process", "TILEBEAM_THREADS": "3"}) == ["process", 3, 3, "int8", "table"]
    numerics = {"TILEBEAM_NUMERICS": "fp16", "TILEBEAM_SOFTMAX": "exact"}
    assert load(model, numerics) == ["thread", threads, threads, "fp16", "exact"]
    assert load(model, {"TILEBEAM_THREADS": "3"}, device="cpu") == [None, 3, 0]


def test_arguments_come_first(model: Path) -> None:
    environment = {"TILEBEAM_NPU": "process", "TILEBEAM_THREADS": "3"}
    assert load(model, environment, executor="thread", threads=1) == ["thread", 1, 1, "int8", "table"]


@pytest.mark.parametrize(
    ("environment", "arguments", "told"),
    [
        ({"TILEBEAM_NPU": "proces"}, {}, "Invalid environment settings: TILEBEAM_NPU=proces"),
        ({"TILEBEAM_NUMERICS": "int8-256"}, {}, "TILEBEAM_NUMERICS=int8-256 is not int8 or fp16"),
        ({"TILEBEAM_SOFTMAX": "half"}, {}, "TILEBEAM_SOFTMAX=half is not table or exact"),
        ({"TILEBEAM_DETERMINISTIC": "yes"}, {}, "TILEBEAM_DETERMINISTIC=yes is not 0 or 1"),
        ({"TILEBEAM_DETERMINISTIC": "1"}, {"lookup": True}, "deterministic and lookup exclude each other"),
        ({"TILEBEAM_NUMERICS": "fp16"}, {"deterministic": True}, "deterministic results are those of numerics int8"),
        ({"TILEBEAM_THREADS": "many"}, {}, "TILEBEAM_THREADS must be a number from 1 to 512, not 'many'"),
        ({"TILEBEAM_THREADS": "0"}, {"device": "cpu"}, "not '0'"),
        ({"TILEBEAM_THREADS": "513"}, {"threads": 1}, "TILEBEAM_THREADS=513"),
    ],
)
def test_wrong_values_are_errors(
    model: Path, environment: dict[str, str], arguments: dict[str, object], told: str
) -> None:
    error = load(model, environment, **arguments)
    assert isinstance(error, str)
    assert told in error
