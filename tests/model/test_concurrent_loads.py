"""A load is judged by what it made itself, whatever other threads load, close and break meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as capi
import pytest
import tilebeam
from tilebeam import SamplingParams, TilebeamError, gguf
from tilebeam.model import loader
from tilebeam.native import register
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 1}


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "ordinary.gguf", preset("tiny", n_layer=1))


@pytest.fixture(scope="module")
def repacked(ordinary: Path) -> Path:
    return gguf.pack(ordinary, ordinary.with_name("repacked.gguf")).path


def while_loading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another thread act when the next load has its model, and before the load is judged."""
    load = register.own_load()

    def loaded(*args: Any) -> Any:
        monkeypatch.undo()
        pointer = load(*args)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(act).result()
        return pointer

    monkeypatch.setattr(loader, "own_load", lambda: loaded)


def breaks(lm: tilebeam.LM, file: Path) -> Callable[[], None]:
    """Truncates the file of a model, which the model then notices."""

    def act() -> None:
        os.truncate(file, 100)
        with pytest.raises(TilebeamError, match="truncated while in use"):
            lm.generate("the question", SamplingParams(max_tokens=4, temperature=0))

    return act


@pytest.mark.parametrize("what", ["closed", "loaded", "broken"])
def test_another_model_during_a_load(
    ordinary: Path, repacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    listed = len(gguf.manifest(repacked).tensors)
    victim = tmp_path / "victim.gguf"
    victim.write_bytes(ordinary.read_bytes())
    others = []
    if what == "closed":
        others.append(tilebeam.load(repacked, **SMALL))
        while_loading(monkeypatch, others[0].close)
    elif what == "broken":
        others.append(tilebeam.load(victim, **SMALL))
        while_loading(monkeypatch, breaks(others[0], victim))
    else:

        def load_raw() -> None:
            params = capi.llama_model_default_params()
            params.n_gpu_layers = 99
            capi.llama_model_free(capi.llama_model_load_from_file(os.fsencode(ordinary), params))

        while_loading(monkeypatch, load_raw)
    bad = control().status()["bad_buffers"]
    with tilebeam.load(repacked, **SMALL) as lm:
        assert lm.info.tiled_tensors == listed
        assert lm.generate("the", SamplingParams(max_tokens=2))
    assert (control().status()["bad_buffers"] > bad) == (what == "broken")
    for other in others:
        other.close()


def test_a_failed_load_is_not_explained_by_anothers_error(
    ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, odd = tmp_path / "victim.gguf", tmp_path / "odd.gguf"
    victim.write_bytes(ordinary.read_bytes())
    data = ordinary.read_bytes()
    at = data.index(b"llama", data.index(b"general.architecture"))
    odd.write_bytes(data[:at] + b"qwen9" + data[at + 5 :])
    with tilebeam.load(victim, **SMALL) as other:
        while_loading(monkeypatch, breaks(other, victim))
        with pytest.raises(TilebeamError, match="unknown model architecture: 'qwen9'") as failed:
            tilebeam.load(odd, **SMALL)
    assert "truncated" not in str(failed.value)
