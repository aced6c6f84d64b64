"""Which backend a model gets where a trial decides; what a trial is of, how it fails, and what is remembered."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from gguf_kit import with_metadata
from tilebeam import PlacementWarning, SamplingParams, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write
from tilebeam.model import device_choice, trial
from tilebeam.model.file_check import inspect
from tilebeam.model.first_layers import write_first_layers
from tilebeam.model.load_options import CheckedOptions, LoadOptions
from tilebeam.model.trial import Trial

from bench.lib.synth import preset, write_model

SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 1}
FASTER = {"prompt": 2.0, "1": 1.0, "4": 1.5, "16": 2.0}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers in F16, where the rule is in doubt; its heads are listed layer by layer."""
    folder = tmp_path_factory.mktemp("trial")
    whole = write_model(folder / "whole.gguf", preset("tiny", n_layer=6, arch="qwen2", type="f16"))
    heads = gguf_write.kv_u32s(key := "qwen2.attention.head_count_kv", [2] * 6)
    return with_metadata(whole, folder / "floats.gguf", {key: heads})


@pytest.fixture(autouse=True)
def _trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trials decide, however busy the machine, and are remembered in a folder of the test's own."""
    monkeypatch.delenv("TILEBEAM_TRIAL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "_BUSY", 1.0)
    monkeypatch.setattr(trial, "_BUSY_QUEUE", 1e9)


def options(**changes: Any) -> CheckedOptions:
    return LoadOptions(**(SMALL | changes)).checked()


def remembered(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tilebeam" / "trials").glob("*"))


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_the_first_layers_are_a_model(floats: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with gguf_tools.open_gguf(floats) as f, cut.open("wb") as out:
        assert write_first_layers(f, out.fileno()) == 2
        with gguf_tools.GGUFFile(cut) as made:
            assert made.kv["qwen2.block_count"].value == 2
            assert made.kv["qwen2.attention.head_count_kv"].value == [2, 2]
            assert made.tensors["token_embd.weight"].ne[-1] == made.kv["qwen2.vocab_size"].value == 512
            assert {t.name.split(".")[1] for t in made.tensors.values() if t.name.startswith("blk.")} == {"0", "1"}
            for name, t in made.tensors.items():
                want = np.empty(t.nbytes, np.uint8)
                f.read_tensor(f.tensors[name], 0, want)
                assert np.array_equal(made.read(t.offset, t.nbytes), want)
    with tilebeam.load(cut, "cpu", **SMALL) as lm:
        assert len(lm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids) == 3


def test_every_kind_of_layer_is_there(floats: Path, tmp_path: Path) -> None:
    lacks = r"blk\.[01245]\.attn_q\.bias"
    for model, layers in ((with_metadata(floats, tmp_path / "other.gguf", {}, lacks), 4), (floats, 2)):
        with gguf_tools.open_gguf(model) as f, (tmp_path / "cut").open("wb") as out:
            assert write_first_layers(f, out.fileno()) == layers
    without = with_metadata(floats, tmp_path / "none.gguf", {"qwen2.block_count": None})
    with gguf_tools.open_gguf(without) as f, pytest.raises(TilebeamError, match="no layers"):
        write_first_layers(f, -1)


# --- trials -----------------------------------------------------------------------------------------------------------


def test_a_trial_is_remembered_until_its_file_is_damaged(floats: Path, tmp_path: Path) -> None:
    file = inspect(floats, False)
    first = trial.try_both(file, options())
    assert set(first.ratios) == {"prompt", "1", "2"}, first
    assert min(first.ratios.values()) > 0
    again = trial.try_both(file, options())
    assert again == replace(first, remembered=True)
    [kept] = remembered(tmp_path)
    for damage in (
        "",
        "{",
        "[]",
        '{"ratios": {"prompt": 1, "1": 1, "2": 1%s}}' % ("0" * 400),
        '{"ratios": {"prompt": 1}}',
        '{"ratios": {"prompt": 1, "1": -2, "2": 3}}',
    ):
        kept.write_text(damage)
        assert trial._read(kept, [1, 2]) is None
    assert not trial.try_both(file, options()).remembered
    assert json.loads(kept.read_text())["ratios"]
    trial._keep(kept, Trial(first.ratios))
    assert trial.try_both(file, options(type_k="q8_0")) != again  # another case
    assert len(remembered(tmp_path)) == 2


def test_a_relative_folder_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trial._folder() == tmp_path / ".cache" / "tilebeam" / "trials"


def test_a_trial_keeps_no_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_PACKED_CACHE", "1GiB")
    model = write_model(tmp_path / "model.gguf", preset("tiny", arch="qwen2", type="q4_0"))
    assert trial.try_both(inspect(model, False), options()).ratios
    assert not (tmp_path / "cache" / "tilebeam" / "packed").exists()


def program(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


@pytest.mark.parametrize(
    ("script", "why", "kept"),
    [
        ("kill -ABRT $$", "status -6", True),
        ("kill -KILL $$", "status -9", False),
        ('echo \'{"failure": "m needs at least 2 GiB of memory"}\'', "of memory", False),
        ("echo no JSON", "Expecting value", False),
        ('echo \'{"ratios": {"prompt": "nan"}}\'', "no ratios", False),
        ('echo \'{"failure": "it cannot be loaded"}\'', "it cannot be loaded", True),
        ("sleep 60", "not ended after", False),
    ],
)
def test_a_trial_that_fails_leaves_the_rule(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str, kept: bool
) -> None:
    monkeypatch.setattr(trial.sys, "executable", program(tmp_path, script))
    monkeypatch.setattr(trial, "_SECONDS", 0.5)
    choice = device_choice.choose(inspect(floats, False), options())
    assert (choice.backend, choice.tried) == ("npu", False)
    assert why in choice.why
    assert bool(remembered(tmp_path)) == kept


def test_a_busy_machine_decides_nothing(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = inspect(floats, False)
    script = 'echo \'{"ratios": {"prompt": 9, "1": 9, "2": 9}, "others": 0.5}\''
    monkeypatch.setattr(trial.sys, "executable", program(tmp_path, script))
    monkeypatch.setattr(trial, "_BUSY", 0.1)
    assert "50%" in trial.try_both(file, options()).failure
    monkeypatch.setattr(trial, "_COPIES", 1e12)
    assert trial.try_both(file, options()).failure == "the memory is too small"
    monkeypatch.setattr(trial.sys, "executable", None)
    assert "which Python" in trial.try_both(file, options()).failure
    monkeypatch.setattr(trial, "_BUSY_QUEUE", -1)
    assert trial.try_both(file, options()).failure == "other programs use the CPUs"
    assert not remembered(tmp_path)


def test_a_folder_that_cannot_be_written_is_no_error(
    floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setattr(trial, "_run", lambda *_: Trial(FASTER))
    assert trial.try_both(inspect(floats, False), options()).ratios == FASTER


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_a_trial_decides_where_the_rule_is_in_doubt(floats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tried = inspect(floats, False), []

    def found(ratios: dict[str, float]) -> device_choice.Choice:
        monkeypatch.setattr(device_choice, "try_both", lambda f, _: tried.append(f) or Trial(ratios))
        return device_choice.choose(file, options())

    assert found(FASTER).backend == "npu"
    for name in FASTER:
        assert found(FASTER | {name: 0.9}).backend == "cpu"
    said = found(FASTER | {"1": 0.9})
    assert "0.90 with 1 sequence, 1.50 with 4 sequences and 2.00 with 16 sequences" in said.why
    sentence = device_choice.warning("m.gguf", (), said)
    assert sentence == f'm.gguf runs on the CPU backend: {said.why}; device="tilebeam" forces the device.'
    tried.clear()
    quantized = tuple(replace(m, type="q4_k") for m in file.matrices)
    sure = replace(file, matrices=quantized)
    assert device_choice.choose(sure, options()).backend == "npu"
    nothing = replace(file, matrices=tuple(replace(m, type="nvfp4", why="type") for m in quantized))
    assert device_choice.choose(nothing, options()).backend == "cpu"
    assert device_choice.choose(file, options(executor="thread")).backend == "npu"
    monkeypatch.setenv("TILEBEAM_TRIAL", "0")
    assert "TILEBEAM_TRIAL=0" in device_choice.choose(file, options()).why
    assert not tried
    monkeypatch.delenv("TILEBEAM_TRIAL")
    part = replace(file, matrices=(replace(quantized[0], type="nvfp4", why="type"), *quantized[1:]))
    recurrent = replace(sure, cache=replace(file.cache, recurrent=True))
    for doubtful in (part, recurrent):
        device_choice.choose(doubtful, options())
    assert tried == [part, recurrent]


def test_load_says_what_was_chosen(
    floats: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_choice, "try_both", lambda *_: Trial(FASTER | {"1": 0.5}))
    with pytest.warns(PlacementWarning, match="0.50 with 1 sequence"):
        lm = tilebeam.load(floats, verbose=True, **SMALL)
    with lm:
        assert lm.info.device == "cpu"
        assert "times as fast as the CPU backend" in lm.info.choice
    assert f"{floats} runs on cpu: in a trial of its first layers" in capfd.readouterr().err
