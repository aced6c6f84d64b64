"""tilebeam diff: the first tensor that deviates is the one that something was done to."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tilebeam
from tilebeam.cli.main import app
from tilebeam.measure import deviation
from tilebeam.measure.deviation import Deviation, Recorder, deviations, first_beyond, record
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("diff") / "sound.gguf", preset("tiny", arch="qwen2", type="f32"))


@pytest.fixture(scope="module")
def wrong(sound: Path) -> Path:
    """The same model but for one matrix of its layer 1."""
    path = write_model(sound.with_name("wrong.gguf"), preset("tiny", arch="qwen2", type="f32"))
    (tensor,) = (t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.1.ffn_down.weight")
    tensor.data[:] *= 3
    return path


def recorded(path: Path, everything: bool = False, layer: int | None = None, device: str = "cpu") -> Recorder:
    recorder = Recorder(everything, layer)
    with tilebeam.load(path, device, n_ctx=64, n_seq_max=1, threads=1) as lm:  # type: ignore[arg-type]
        record(lm, TOKENS, recorder, threads=1)
    return recorder


def test_layers_agree_and_come_in_their_order(sound: Path) -> None:
    found = deviations(recorded(sound), recorded(sound, device="npu"))
    layers = [f"l_out-{i}" for i in range(len(found) - 2)]
    assert [d.name for d in found] == [*layers, "result_norm", "result_output"]
    assert [d.layer for d in found] == [*range(len(layers)), len(layers), len(layers)]
    assert [d.shape for d in found][:1] == [(len(TOKENS), 256)]
    assert all(0 < d.error <= d.worst < 0.1 for d in found)
    assert first_beyond(found, 0.1) is None
    assert [d.error for d in deviations(recorded(sound), recorded(sound))] == [0.0] * len(found)


def test_the_tensor_that_was_changed_is_found(sound: Path, wrong: Path) -> None:
    layers = deviations(recorded(sound), recorded(wrong))
    first = first_beyond(layers, 0.05)
    assert first is not None
    assert (first.name, first.layer) == ("l_out-1", 1)
    assert layers[0].error == 0
    inside = deviations(recorded(sound, True, first.layer), recorded(wrong, True, first.layer))
    assert {d.layer for d in inside} == {1}
    first = first_beyond(inside, 0.05)
    assert first is not None
    assert (first.name, first.op, first.error) == ("ffn_out-1", "MUL_MAT", pytest.approx(2))
    everything = deviations(recorded(sound, True), recorded(wrong, True))
    assert [d for d in everything if d.layer == 1] == inside
    assert len({d.name for d in everything}) == len(everything)
    assert {d.op for d in inside} >= {"RMS_NORM", "MUL", "MUL_MAT", "ADD", "ROPE", "GLU"}


@pytest.mark.parametrize(
    ("a", "b", "error", "worst"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0, 0),
        ([3.0, -3.0], [3.0, -6.0], 0.5**0.5, 1),
        ([-np.inf, 1.0], [-np.inf, 1.5], 0.5, 0.5),
        ([1.0, 2.0], [1.0, np.nan], np.inf, np.inf),
        ([1.0, np.inf], [1.0, 2.0], np.inf, np.inf),
        ([0.0, 0.0], [0.0, 1e-9], np.inf, np.inf),
        ([np.nan], [np.nan], 0, 0),
    ],
)
def test_distances(a: list[float], b: list[float], error: float, worst: float) -> None:
    found = deviation._distance(np.array(a, np.float32), np.array(b, np.float32))
    assert found == pytest.approx((error, worst))


def test_infinite_errors_deviate() -> None:
    rows = [Deviation("a", "ADD", (1,), 0, 0.01, 0.02), Deviation("b", "ADD", (1,), 0, float("inf"), float("inf"))]
    assert first_beyond(rows, 1e9) is rows[1]


def test_the_command_says_whether_a_tensor_deviates(sound: Path) -> None:
    words = ["diff", "-m", str(sound), "-c", "24", "-t", "1", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["reference"], found["device"], found["first"]) == ("cpu", "npu", None)
    assert found["tensors"][0]["shape"] == [24, 256]
    done = CliRunner().invoke(app, [*words, "--tolerance", "0"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["first"] == "l_out-0"
    shown = CliRunner().invoke(app, [*words[:-1], "--layer", "0", "--tolerance", "0"])
    assert shown.exit_code == 1
    assert "FLASH_ATTN_EXT" in shown.stdout
    assert "First beyond 0:" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "npu"], "give two"),
        (["--device", "cpu,gpu"], "not 'gpu'"),
        (["--layer", "99"], "names no such tensors"),
        (["-m", "missing.gguf"], "missing.gguf"),
        (["-f", "missing.txt"], "missing.txt"),
    ],
)
def test_what_cannot_be_compared_is_said(sound: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["diff", "-m", str(sound), "-t", "1", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
